"""A rank's shard of a dim that axes cut: its number, length, first element, and share of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.rules.lowering_helpers.lowering_trial import COUNTED, TRIAL, in_trial
from autopar.torch_private import LocalIntNode, group_of_axis, local_tensor_mode
from autopar.words.placements import axis_and_block
from autopar.words.shards import lengths_of

Axes = Sequence[str]
Cuts = Mapping[str, Axes]
"""The axes that cut each factor, by its name."""
Sizes = Mapping[str, int] | None
"""The whole size of each factor that is cut into unequal shards."""


def axes_of(cut: Mapping[str, Axes], *factors: str) -> tuple[str, ...]:
    """Return the axes that cut any of ``factors``."""
    return tuple(axis_and_block(axis)[0] for f in factors for axis in cut.get(f, ()))


def axes_except(cut: Mapping[str, Axes], *factors: str) -> tuple[str, ...]:
    """Return the axes that cut any other factor."""
    return tuple(axis_and_block(axis)[0] for f, axes in cut.items() if f not in factors for axis in axes)


def n_shards(axes: Axes) -> int:
    """Return the number of shards that ``axes`` cut together."""
    return prod(size_and_unit(axis)[0] for axis in axes)


def size_and_unit(axis: str) -> tuple[int, int]:
    """Return the number of ranks of an axis, and the block size of the shards that it cuts (``tensor*64``)."""
    name, unit = axis_and_block(axis)
    sizes = TRIAL.get()
    return spmd.normalize_axis(name).size() if sizes is None else sizes[name], unit


def index_on(axis: str) -> Any:
    """Return this rank's number on an axis of the ambient mesh: an int; one for each simulated rank."""
    return for_each(axis, lambda number: number)


def for_each(axis: str, value: Callable[[int], int]) -> Any:
    """Evaluate ``value`` at this rank's number on an axis: for each simulated rank, or in a trial for the first."""
    if in_trial():
        return value(0)
    group, mode = group_of_axis(axis), local_tensor_mode()
    if mode is None:
        return value(dist.get_rank(group))
    numbers = {rank: k for ranks in groups_like(group) for k, rank in enumerate(ranks)}
    return torch.SymInt(LocalIntNode({rank: value(numbers[rank]) for rank in mode.ranks}))


def groups_like(group: ProcessGroup | None) -> list[list[int]]:
    """List the ranks of this process group and of its siblings, of which a simulating process knows only one."""
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = stride * len(ranks)
    return [
        [start + offset + stride * k for k in range(len(ranks))]
        for start in range(0, dist.get_world_size(), block) for offset in range(stride)
    ]  # fmt: skip


def which_shard(axis: str) -> Any:
    """Return this rank's number on an axis, as :func:`index_on`; in a trial that of the last rank.

    The last rank works most where a mask is causal.
    """
    as_last = TRIAL.get() is not None or COUNTED.get() is not None
    return size_and_unit(axis)[0] - 1 if as_last else index_on(axis_and_block(axis)[0])


def cuts_on(axes: Axes) -> tuple[tuple[int, int], ...]:
    """Return ``(size, unit)`` of axes that cut a dim, for :func:`~autopar.words.shards.nested_shard_of`."""
    return tuple(map(size_and_unit, axes))


def length_of(n: int, axes: Axes) -> Any:
    """Return how many of ``n`` elements this rank has where ``axes`` cut them, each as ``torch.chunk`` does."""
    for axis in axes:
        size, unit = size_and_unit(axis)
        length = -(-n // (size * unit)) * unit
        if TRIAL.get() is not None:  # of the first rank, whose piece is the largest
            n = length
            continue
        at = index_on(axis_and_block(axis)[0])
        n = _least(length, n - _least(at * length, n))
    return n


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def first_of(n: int, axes: Axes, device: torch.device) -> torch.Tensor:
    """Return this rank's first of ``n`` elements where ``axes`` cut them: int64 without dims, V on ``axes``."""
    if TRIAL.get() is not None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return _own(_pieces(n, axes, device)[0], axes)


def _pieces(n: int, axes: Axes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first elements and the lengths of all shards of ``n`` elements cut by ``axes``, int64 [shards].

    The first axis is the major one, as in :func:`~autopar.words.shards.shard_of`. They are computed on the device,
    since a copy from the host would be waited for.
    """
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    lengths = torch.full((1,), n, dtype=torch.int64, device=device)
    for axis in axes:
        size, unit = size_and_unit(axis)
        each = (lengths + (size * unit - 1)).div(size * unit, rounding_mode="floor") * unit
        begins = torch.minimum(torch.arange(size, device=device) * each.unsqueeze(1), lengths.unsqueeze(1))
        starts = (starts.unsqueeze(1) + begins).flatten()
        lengths = torch.minimum(each.unsqueeze(1), lengths.unsqueeze(1) - begins).flatten()
    return starts, lengths


def _own(every: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return this rank's value of those of all ranks of ``axes`` [shards]: no dims, V on ``axes``."""
    for axis in axes_of({"": axes}, ""):
        every = spmd.convert(every, axis, src=spmd.R, dst=spmd.S(0))
    return every.reshape(())


def piece(axes: Axes, device: torch.device) -> torch.Tensor:
    """Return the number of this rank's shard: int64 without dims, V on ``axes``; the first axis is major."""
    if not axes or TRIAL.get() is not None:
        return torch.zeros((), dtype=torch.int64, device=device)
    number = torch.arange(n_shards(axes), device=device)
    for axis in axes:
        number = spmd.convert(number, axis, src=spmd.R, dst=spmd.S(0))
    return number.reshape(())


def positions(n: int, axes: Axes, device: torch.device) -> torch.Tensor:
    """Return the global positions of this rank's elements of a dim of ``n``, which ``axes`` cut."""
    if n % prod(prod(size_and_unit(axis)) for axis in axes):
        return torch.arange(length_of(n, axes), device=device) + first_of(n, axes, device)
    local = torch.arange(n // n_shards(axes), device=device)
    return local + piece(axes, device) * (n // n_shards(axes)) if axes else local


def first(cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str, x: torch.Tensor, dim: int) -> Any:
    """Return the global position of the first element of ``x`` along a dim that ``factor`` cuts: V on its axes."""
    axes = cut.get(factor, ())
    if sizes is None:
        return piece(axes, x.device) * x.shape[dim]
    return first_of(sizes[factor], axes, x.device)


def some_have_none(cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str) -> bool:
    """Check whether the axes that cut a factor leave some rank without any of it."""
    if sizes is None or factor not in cut:
        return False
    return not min(lengths_of(sizes[factor], [size_and_unit(axis) for axis in cut[factor]]))


def with_one(
    x: torch.Tensor, dim: int, value: float, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str
) -> torch.Tensor:
    """Append one element of ``value`` along a dim if some rank has none of the factor that cuts it.

    So a maximum over nothing has a neutral element, and an index finds something to read.
    """
    if not some_have_none(cut, sizes, factor):
        return x
    return padded(x, dim, x.shape[dim] + 1, value)


def padded(x: torch.Tensor, dim: int, to: Any, value: float = 0.0) -> torch.Tensor:
    """Pad ``x`` along a dim with ``value`` up to ``to`` elements."""
    missing = to - x.shape[dim]
    if isinstance(missing, int) and not missing:
        return x
    behind = [*[0, 0] * (x.dim() - 1 - dim % x.dim()), 0, missing]
    if not spmd.is_type_checking():
        return torch.nn.functional.pad(x, behind, value=value)
    with spmd.no_typecheck():  # zeros change no type: of a pending sum they are terms
        longer = torch.nn.functional.pad(x, behind, value=value)
    spmd.assert_type(longer, dict(spmd.get_local_type(x)))
    return longer


def share(x: torch.Tensor, cut: Mapping[str, Axes], sizes: Mapping[str, int], factors: Sequence[str]) -> torch.Tensor:
    """Return this rank's share of all elements of these factors: a number of the type of ``x``, V on their axes."""
    part = torch.ones((), dtype=x.dtype, device=x.device)
    for f in factors:
        if f in cut:
            part = part * _part(sizes[f], cut[f], x)
    return part


def _part(n: int, axes: Axes, x: torch.Tensor) -> torch.Tensor:
    if TRIAL.get() is not None:
        return torch.ones((), dtype=x.dtype, device=x.device)
    lengths = _pieces(n, axes, x.device)[1]
    return _own((lengths.double() / n).to(x.dtype), axes)


def weights_on(n: int, axes: Axes, k: int, device: torch.device) -> torch.Tensor:
    """Return each rank's share on axis ``k`` of the ``n`` elements that ``axes`` cut one after the other.

    float64 [ranks], V on the axes before; all zeros if they have none.
    """
    sizes = [size_and_unit(axis)[0] for axis in axes]
    if TRIAL.get() is not None:
        return torch.full((sizes[k],), 1 / sizes[k], dtype=torch.float64, device=device)
    lengths = _pieces(n, axes, device)[1].reshape(prod(sizes[:k]), sizes[k], -1).sum(-1)
    for axis in axes_of({"": axes[:k]}, ""):
        lengths = spmd.convert(lengths, axis, src=spmd.R, dst=spmd.S(0))
    lengths = lengths.reshape(sizes[k]).double()
    return lengths / lengths.sum().clamp(min=1)


def all_of(n: int, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str) -> int:
    """Return how many elements a dim that has ``n`` on this rank has on all ranks."""
    return n * n_shards(cut.get(factor, ())) if sizes is None else sizes.get(factor, n)
