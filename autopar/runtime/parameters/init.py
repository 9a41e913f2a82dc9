"""Initial values of a model on the meta device: the same weights on any mesh, one module in memory at a time.

Every module that owns parameters or buffers is materialised alone on the CPU, with a seed that follows from the base
seed and its path, and initialised by ``init``, by the model's ``_init_weights`` (transformers), or by its own
``reset_parameters``. Ranks take turns, a module each, and send what they made to the others. A rank keeps its slices;
the rest is freed.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.ranks.agree import SentValues
from autopar.torch_private import module_at

Init = Callable[[torch.nn.Module], Any]


class MetaValues:
    """Values by name, made when asked for."""

    def __init__(self, model: torch.nn.Module, init: Init | None, seed: int) -> None:
        self.model, self.init, self.seed = model, init, seed
        self.path: str | None = None
        self.values: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        """Return the whole value of a parameter or buffer, which is kept only by the caller."""
        path, _, key = name.rpartition(".")
        if path != self.path or key not in self.values:
            self.values = {}
            self.values = self._materialise(path)
            self.path = path
        return self.values.pop(key)

    def _materialise(self, path: str) -> dict[str, torch.Tensor]:
        module = module_at(self.model, path)
        stand_in = copy.copy(module)
        blank: dict[str, torch.Tensor] = {}
        for kind in ("_parameters", "_buffers"):
            entries: dict[str, Any] = {}
            for key, value in getattr(module, kind).items():
                if value is not None and value.device.type == "meta":
                    fresh = _unset(value)
                    blank[key] = fresh
                    value = torch.nn.Parameter(fresh, value.requires_grad) if kind == "_parameters" else fresh
                entries[key] = value
            stand_in.__dict__[kind] = entries
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.seed * 1_000_003 + zlib.crc32(path.encode())) % (1 << 62))
            with torch.no_grad():
                for how in self._ways(stand_in):
                    how()
                    if not any(_is_unset(stand_in._parameters.get(k, stand_in._buffers.get(k))) for k in blank):
                        break
        initialised = {**stand_in._parameters, **stand_in._buffers}
        missing = sorted(k for k in blank if _is_unset(initialised[k]))
        if missing:
            raise RunError(
                f"no initial value for {', '.join(missing)} of module '{path or '<model>'}' "
                f"({type(module).__name__}), which is on the meta device\n  pass init=fn to parallelize, where "
                "fn(module) sets the parameters and buffers that the module itself owns, give the class a "
                "reset_parameters() method, or build the model on the CPU"
            )
        return {k: v.detach() for k, v in initialised.items() if v is not None}

    def _ways(self, stand_in: torch.nn.Module) -> list[Callable[[], Any]]:
        if self.init is not None:
            init = self.init
            return [lambda: init(stand_in)]
        ways: list[Callable[[], Any]] = []
        whole: Any = getattr(self.model, "_init_weights", None)
        if callable(whole):
            ways.append(lambda: whole(stand_in))
        for name in ("reset_parameters", "_reset_parameters"):
            method = getattr(stand_in, name, None)
            if callable(method):
                ways.append(method)
        return ways


class MadeInTurn(SentValues):
    """Initial values that ranks make in turn, a module each, and send to the others: none makes them all."""

    def __init__(self, values: MetaValues, group: dist.ProcessGroup, device: torch.device) -> None:
        model = values.model
        super().__init__({**_named(model.named_parameters), **_named(model.named_buffers)}, group, device)
        self.values, self.ranks = values, dist.get_process_group_ranks(group)
        paths = dict.fromkeys(name.rpartition(".")[0] for name in self.named)
        self.turns = {path: turn % len(self.ranks) for turn, path in enumerate(paths)}

    def source(self, name: str) -> int:
        """Return the rank that initializes the module."""
        return self.ranks[self.turns[name.rpartition(".")[0]]]

    def take(self, name: str) -> torch.Tensor:
        """Return the value that this rank makes."""
        return self.values(name)


def _named(each: Callable[..., Iterable[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    return dict(each(remove_duplicate=False))


def is_meta(model: torch.nn.Module) -> bool:
    """Check whether any parameter or buffer is on the meta device."""
    return any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers()))


def _unset(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        return torch.full(like.shape, float("nan"), dtype=like.dtype)
    if like.dtype is torch.bool:
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.full(like.shape, torch.iinfo(like.dtype).min, dtype=like.dtype)


def _is_unset(value: torch.Tensor | None) -> bool:
    if value is None or value.numel() == 0 or value.device.type == "meta":
        return value is not None and value.device.type == "meta"
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    if value.dtype is torch.bool:
        return False
    return bool((value == torch.iinfo(value.dtype).min).any()) and value.dtype is not torch.uint8
