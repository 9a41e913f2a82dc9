"""Optimizers that were made before a model was spread: moved to the new parameters.

``parallelize`` makes new parameters, and an optimizer of the old ones is refused by these
(:mod:`~autopar.runtime.parameters.old_parameters`). :class:`Move` gives it the new parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.parameters.placed_alike import like
from autopar.runtime.ranks.collectives import as_sent
from autopar.words.trees import PyTree
from cost_models.optimizer_bytes import MUON

_STATES = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SparseAdam": 2, "Adadelta": 2, "ASGD": 1, "Rprop": 2,
    "Adagrad": 1, "RMSprop": 1, "SGD": 0, "Muon": 1, "Adafactor": 0, "LBFGS": 2,
}  # fmt: skip
"""Values of state for each element of a parameter, of torch's own optimizers without options."""
_EIGHT_BIT = ("AdamW8bit", "Adam8bit", "PagedAdamW8bit", "PagedAdam8bit")
"""Optimizers of torchao and bitsandbytes whose states have 8 bits."""


def name_of(optimizer: torch.optim.Optimizer | str) -> str:
    """Return the name by which the planner knows the memory of an optimizer; of unknown classes AdamW's."""
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, torch.optim.Muon):
        return MUON
    if type(optimizer).__name__ in _EIGHT_BIT:
        return "adamw8bit"
    count = _STATES.get(type(optimizer).__name__, 2)
    options = [group.get("momentum") or group.get("centered") for group in optimizer.param_groups]
    count += any(options) and type(optimizer).__name__ in ("SGD", "RMSprop")
    return ("sgd", "sgd_momentum", "adamw")[min(count, 2)]


# --- the move --------------------------------------------------------------------------------------------------------


class Move:
    """An optimizer's way from the parameters of a model to those of its parallel module, by name.

    Made from the model before it is spread; every rank does the same. :meth:`check` refuses what cannot be moved
    before anything is changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Find the model's parameters in the optimizer's groups.

        Args:
            optimizer: was made before the model was spread.
            model: or its parameters by name.
        """
        self.optimizer = optimizer
        named = model if isinstance(model, Mapping) else dict(model.named_parameters(remove_duplicate=False))
        self.names: dict[int, str] = {}
        for name, param in named.items():
            self.names.setdefault(id(param), name)
        self.layout = [[self.names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]

    def __str__(self) -> str:
        """Return what must be alike on all ranks: class, options and names of the parameters of every group."""
        groups = []
        for group, names in zip(self.optimizer.param_groups, self.layout, strict=True):
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            shown = ", ".join(f"{k}={_plain(v)}" for k, v in sorted(options.items()))
            groups.append(f"{shown}: {', '.join(name or 'of no model' for name in names)}")
        return f"{type(self.optimizer).__name__} with {len(groups)} groups of parameters [{'; '.join(groups)}]"

    def check(self) -> None:
        """Refuse an optimizer that holds none of the model's parameters, or whose state cannot follow them.

        Raises:
            AutoparError: with the parameter and the state that do not fit.
        """
        kind = type(self.optimizer).__name__
        if not any(name is not None for names in self.layout for name in names):
            have = sum(map(len, self.layout))
            raise AutoparError(
                f"optimizer is a {kind} of {have} parameters, none of which is one of the model's "
                f"{len(self.names)}; pass the optimizer that was made from this model's parameters()"
            )
        for param, name in self._own():
            for key, value in self.optimizer.state.get(param, {}).items():
                tensors = [t for t in _tensors(value) if not _scalar(key, t, param)]
                if any(t.device.type == "meta" for t in tensors):
                    raise AutoparError(f"optimizer: state '{key}' of '{name}' is on the meta device; it has no values")
                if tensors and (tensors[0] is not value or value.shape != param.shape):
                    shape = tuple(tensors[0].shape)
                    raise AutoparError(
                        f"optimizer: state '{key}' of '{name}' in this {kind} has shape {shape}, the parameter "
                        f"{tuple(param.shape)}; only state of the parameter's shape, and single numbers, can be cut as "
                        "the parameter is. Make the optimizer after parallelize"
                    )
        for attribute, value in vars(self.optimizer).items():
            if attribute not in ("param_groups", "state") and self._holds(value, self._shared()):
                raise AutoparError(
                    f"optimizer: this {kind} keeps the model's parameters in its attribute '{attribute}' too, where "
                    "they cannot be replaced; make it after parallelize"
                )

    def to(self, new: Mapping[str, torch.Tensor], device: torch.device, group: Any) -> None:
        """Move the optimizer to other parameters: groups, options and the first rank's state are kept.

        Args:
            new: those of the parallel module on this rank, by all their names.
            device: this rank's.
            group: the ranks that hold a part of the module.
        """
        state = self._first_ranks_state(group, device, new)
        for options, names in zip(self.optimizer.param_groups, self.layout, strict=True):
            olds = options["params"]
            kept = [i for i, name in enumerate(names) if name is None or name in new]
            if "param_names" in options:
                options["param_names"] = [options["param_names"][i] for i in kept]
            for old, name in zip(olds, names, strict=True):
                if name is not None:
                    self.optimizer.state.pop(old, None)
            olds[:] = [olds[i] if (name := names[i]) is None else new[name] for i in kept]  # LBFGS holds the list
        for name, values in state.items():
            self.optimizer.state[new[name]] = values

    # -- state

    def _own(self) -> Iterator[tuple[torch.Tensor, str]]:
        for options, names in zip(self.optimizer.param_groups, self.layout, strict=True):
            for param, name in zip(options["params"], names, strict=True):
                if name is not None:
                    yield param, name

    def _shared(self) -> set[int]:
        """Return lists of parameters that are the groups' own, which the move changes in place."""
        return {id(options["params"]) for options in self.optimizer.param_groups}

    def _holds(self, value: PyTree, shared: set[int], depth: int = 3) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in self.names
        if depth == 0 or id(value) in shared:
            return False
        if isinstance(value, torch.optim.Optimizer):
            value = [options["params"] for options in value.param_groups]
        if isinstance(value, Mapping):
            value = list(itertools.chain(value.keys(), value.values()))
        if isinstance(value, (list, tuple, set)):
            return any(self._holds(v, shared, depth - 1) for v in value)
        return False

    def _first_ranks_state(
        self, group: Any, device: torch.device, new: Mapping[str, torch.Tensor]
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Return the state by name of the parameters that are here, each value placed as its parameter."""
        mine = {name: self.optimizer.state[p] for p, name in self._own() if self.optimizer.state.get(p)}
        alone = dist.get_world_size(group) == 1
        first = 0 if alone or group is dist.group.WORLD else dist.get_global_rank(group, 0)
        leading = alone or dist.get_rank(group) == 0
        params = {name: param for param, name in self._own()}
        box: list[Any] = [None]
        if leading:
            box = [{name: {k: _described(k, v, params[name]) for k, v in s.items()} for name, s in mine.items()}]
        if not alone:
            dist.broadcast_object_list(box, src=first, group=group)
        states: dict[str, dict[str, Any]] = {}
        for name, values in box[0].items():
            for key, value in values.items():
                if isinstance(value, _Shaped):
                    here = mine[name][key].detach() if leading else None
                    if here is None:
                        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
                    else:
                        whole = here.to(device, copy=True).contiguous()
                    if not alone:
                        dist.broadcast(as_sent(whole), src=first, group=group)
                    value = like(new[name], whole) if name in new else None
                elif isinstance(value, torch.Tensor) and leading:
                    value = mine[name][key]
                if name in new:
                    states.setdefault(name, {})[key] = value
        return states


class _Shaped:
    """A tensor of state, without its values."""

    def __init__(self, like: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(like.shape), like.dtype


def _described(key: str, value: PyTree, param: torch.Tensor) -> PyTree:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if _scalar(key, value, param) else _Shaped(value)
    return value


def _scalar(key: str, value: torch.Tensor, param: torch.Tensor) -> bool:
    """Check whether a state is one number for the whole parameter, such as the count of steps."""
    return value.ndim == 0 and (param.ndim > 0 or key == "step")


def _tensors(value: PyTree) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)


def _plain(value: PyTree) -> PyTree:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
