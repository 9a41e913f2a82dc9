"""Steps of optimizers under a policy that keeps moments, or parameters, in fewer bits than a step computes in.

Under ``Precision(moments="bfloat16")`` torch's optimizers would keep their state as the parameters are: float32. Here
the state is made, and kept, in the policy's format; a step makes wide copies of the state of some parameters at a time,
steps on these and rounds them back, so that at no moment all of it is wide. Parameters that are stored in bfloat16
and rounded stochastically are stepped on alike: the step computes in float32.

Stochastic rounding takes the upper of the two nearest numbers of bfloat16 with the probability that makes the mean
right, so that many small updates are not lost: the lower 16 bits of a float32 get a random number of 16 bits added,
and what carries over stays (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). The random bits are a
hash of the step's number, the name of the parameter, which value of it is rounded, and where an element lies in the
whole tensor (:func:`autopar.rules.families.sharded_random.bits_at`): any mesh, and one device, round alike. The step's
number stands in the optimizer's group of parameters, so it is saved and loaded with the state.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError
from autopar.rules.families.sharded_random import bits_at
from autopar.runtime.parameters.state import wrapped_as
from autopar.torch_private import OPTIMIZER_STATES
from autopar.words.precision import Precision
from autopar.words.shards import shard_of
from autopar.words.trees import PyTree

AT_ONCE = 1 << 24
"""Elements, on a rank, whose wide copies are there together."""
COUNT = "rounded_steps"
"""In a group of parameters: how many steps it has had, where it is rounded stochastically."""
_NOT_MOMENTS = ("step", "eta", "mu", "mu_product")
"""Numbers in an optimizer's state, which may look like the moment of a parameter that is a single number."""
_MARK = "_autopar_moments_of"


class _Kept(NamedTuple):
    name: str
    policy: Precision


_kept: Any = WeakIdKeyDictionary()
"""Parameters under such a policy."""
_now = threading.local()
"""The number of steps of the group whose step runs in this thread."""
_asked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that keep the policy."""
_hook: Any = None


def keep(param: torch.nn.Parameter, name: str, policy: Precision) -> None:
    """Step on a parameter, and keep its state, by a policy from now on; a second call changes nothing."""
    global _hook
    if not policy.rounds:
        return
    _kept[param] = _Kept(name, policy)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_refuse_unknown)
        for function in OPTIMIZER_STATES:
            plain = function.get()
            wrapped = _in_format(plain)
            setattr(wrapped, _MARK, plain)
            function.set(wrapped)


def kept_apart(params: Sequence[torch.Tensor]) -> bool:
    """Check whether :func:`step` handles a step on `params`."""
    return _hook is not None and any(param in _kept for param in params)


def is_used() -> bool:
    """Check whether a policy with rounded steps has been used in this process."""
    return _hook is not None


@torch.compiler.disable
def _refuse_unknown(optimizer: torch.optim.Optimizer, args: PyTree, kwargs: PyTree) -> None:
    """Refuse optimizers whose state is not known.

    Raises:
        RunError: their class is none of torch's elementwise ones, or they are asked to be captured in a CUDA graph.
    """
    if optimizer in _asked:
        return
    entries = [_kept[p] for group in optimizer.param_groups for p in group["params"] if p in _kept]
    if not entries:
        return
    kind = type(optimizer)
    init: Any = getattr(kind, "_init_group", None)
    if not hasattr(init, _MARK) or kind.step.__module__ not in {f.module for f in OPTIMIZER_STATES}:
        raise RunError(
            f"precision {entries[0].policy}: what {kind.__name__} keeps for '{entries[0].name}' is not known, so it "
            f"cannot be kept in {entries[0].policy.moments}, or rounded\n"
            f"  give an optimizer of torch.optim that computes each element by itself "
            f"({', '.join(sorted(f.module.rpartition('.')[2] for f in OPTIMIZER_STATES))}), or a policy with "
            f"moments='{entries[0].policy.master}' and without stochastic_rounding"
        )
    captured = any(group.get("capturable") for group in optimizer.param_groups)
    if captured and any(entry.policy.stochastic_rounding for entry in entries):
        raise RunError(
            f"precision {entries[0].policy}: a step that is captured in a CUDA graph would round with the same random "
            f"bits at every replay; give {kind.__name__} capturable=False"
        )
    _asked.add(optimizer)


# --- state -----------------------------------------------------------------------------------------------------------


class _Born(TorchFunctionMode):
    """A mode in which tensors made like a parameter have the format of its moments."""

    def __torch_function__(self, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        kwargs = kwargs or {}
        if func in (torch.zeros_like, torch.full_like) and isinstance(args[0], torch.nn.Parameter) and args[0] in _kept:
            kwargs = {**kwargs, "dtype": _dtype(_kept[args[0]].policy.moments)}
        return func(*args, **kwargs)


def _in_format(init_group: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's ``_init_group``, which makes and lists state, to give moments their policy's format."""

    @functools.wraps(init_group)
    def in_format(self: torch.optim.Optimizer, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        params = [p for p in group["params"] if p.grad is not None and p in _kept]
        if not params:
            return init_group(self, group, *lists, **named)
        for param in params:
            _to_format(self.state, param)  # what was loaded, or made with the optimizer
        new = any(not self.state.get(param) for param in params)
        with _Born() if new else contextlib.nullcontext():
            result = init_group(self, group, *lists, **named)
        for param in params if new else ():
            for before, after in _to_format(self.state, param):
                for values in (*lists, *named.values()):
                    if isinstance(values, list):
                        values[:] = [after if value is before else value for value in values]
        if any(_kept[param].policy.stochastic_rounding for param in params):
            _now.count = group[COUNT] = group.get(COUNT, 0) + 1
        return result

    return in_format


def _to_format(state: Any, param: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bring the state of a parameter into its format; what was there and what is now."""
    moments, changed = _dtype(_kept[param].policy.moments), []
    for key, value in state[param].items() if param in state else ():
        if (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != moments
            and value.shape == param.shape and key not in _NOT_MOMENTS
        ):  # fmt: skip
            state[param][key] = value.to(moments)
            changed.append((value, state[param][key]))
    return changed


# --- the step --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def step(run: Callable[..., None], params: Sequence[torch.Tensor], lists: Sequence[Any], options: Any) -> None:
    """Step on some parameters after others, all local and in the format that a step computes in.

    Args:
        run: the functional form of an elementwise optimizer, for plain tensors.
        lists: gradients, and lists of state beside the parameters, or empty ones; what is no list is an option.
    """
    for part in _parts(params):
        chosen = [params[i] for i in part]
        given = [[values[i] for i in part] if isinstance(values, list) and values else values for values in lists]
        gradients = [_placed_as(grad, param) for grad, param in zip(given[0], chosen, strict=True)]
        entries = [_kept.get(param) for param in chosen]
        wide = [_wide(chosen, entries), _wide(gradients, entries)]
        wide += [_wide(values, entries) if isinstance(values, list) and values else values for values in given[1:]]
        before = [list(values) if isinstance(values, list) else values for values in wide]
        run(*wide, **options)
        for position, values in ((0, chosen), *enumerate(given[1:], 2)):
            if isinstance(values, list):
                for k, value in enumerate(values):
                    replaced = wide[position][k] is not before[position][k]
                    result = _back(value, wide[position][k], chosen[k], entries[k], position)
                    if replaced or not isinstance(value, torch.Tensor):  # SGD puts its first momentum into the list
                        lists[position - 1][part[k]] = result


def _parts(params: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield lists of numbers of parameters that have at most :data:`AT_ONCE` elements here together."""
    part: list[int] = []
    elements = 0
    for i, param in enumerate(params):
        n = _local(param).numel()
        if part and elements + n > AT_ONCE:
            yield part
            part, elements = [], 0
        part.append(i)
        elements += n
    if part:
        yield part


def _placed_as(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a gradient placed as its parameter."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        return grad.redistribute(placements=param.placements)
    return grad


def _wide(values: Sequence[PyTree], entries: Sequence[_Kept | None]) -> list[Any]:
    """Return local tensors in the format of each parameter's step; those that have it already are not copied."""
    return [
        _local(value).to(_computes_in(entry)) if entry is not None and _is_cast(value, entry) else _local(value)
        for value, entry in zip(values, entries, strict=True)
    ]


def _is_cast(value: PyTree, entry: _Kept) -> bool:
    """Check whether a value is stepped on as a wide copy."""
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point()
        and value.dtype in (_dtype(entry.policy.moments), _dtype(entry.policy.master))
        and value.dtype != _computes_in(entry)
    )  # fmt: skip


def _back(value: PyTree, wide: Any, param: torch.Tensor, entry: _Kept | None, position: int) -> PyTree:
    """Write what a step left in a wide copy into the value that it is a copy of; or give what the step has made."""
    if entry is None or not isinstance(wide, torch.Tensor):
        return wide
    if isinstance(value, torch.Tensor):
        if _is_cast(value, entry):
            _local(value).copy_(_narrow(wide, value.dtype, param, entry, position))
        return value
    local = _narrow(wide, _dtype(entry.policy.moments), param, entry, position)
    if not isinstance(param, DTensor):
        return local
    return wrapped_as(param, local)


def _narrow(wide: torch.Tensor, dtype: torch.dtype, param: torch.Tensor, entry: _Kept, position: int) -> torch.Tensor:
    if not entry.policy.stochastic_rounding or dtype != torch.bfloat16 or wide.dtype == dtype:
        return wide.to(dtype)
    seed = torch.full((), _now.count, dtype=torch.int64, device=wide.device)
    random = bits_at(seed, _site(entry.name, position), tuple(param.shape), _places(param, wide.device))
    return stochastically_rounded(wide, random)


def stochastically_rounded(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round ``x`` to bfloat16, up or down such that the mean over the random bits is ``x``.

    Args:
        x: any floating point format; taken as float32.
        random: int32 of the same shape, of whose bits the lower 16 are used.
    """
    x = x.float()
    carried = (x.view(torch.int32) + (random & 0xFFFF)) & ~0xFFFF
    return torch.where(x.isfinite(), carried.view(torch.float32), x).bfloat16()


@functools.cache
def _site(name: str, position: int) -> int:
    """Return a number for a parameter, or for its state at a position in the lists of a step."""
    digest = hashlib.blake2b(f"{position} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _places(param: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return the positions of this rank's elements in the whole parameter, for each dim."""
    pieces = [(0, n) for n in param.shape]
    if isinstance(param, DTensor):
        at = param.device_mesh.get_coordinate()
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                assert at is not None, "a rank outside of the mesh has no parameters"
                start, length = pieces[placement.dim]
                within, shorter = shard_of(length, param.device_mesh.size(axis), at[axis])
                pieces[placement.dim] = start + within, shorter
    return [torch.arange(start, start + length, device=device) for start, length in pieces]


def _local(value: PyTree) -> PyTree:
    return value._local_tensor if isinstance(value, DTensor) else value


def _computes_in(entry: _Kept) -> torch.dtype:
    master = _dtype(entry.policy.master)
    return torch.float32 if master.itemsize < 4 else master


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
