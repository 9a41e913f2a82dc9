"""The collectives that programs call: ``spmd_types`` functions with plain arguments, so that programs print as Python.

``axis`` is the name of a mesh axis, looked up in the ambient ``spmd_types.set_current_mesh``. Each function changes the
placement of ``x`` on that axis in one step; its backward is the adjoint step (see :mod:`autopar.words.placements`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import spmd_types as spmd
import torch
import torch.fx
from torch.autograd.function import FunctionCtx

from autopar.rules.lowering_helpers.collective_helpers import summed_back
from autopar.rules.lowering_helpers.local_shard import length_of, padded
from autopar.torch_private import functional_collectives, group_of_axis
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, PENDING, REPLICATED, Placement, State, Step, axis_and_block, axis_text
from autopar.words.placements import shard as placement_of
from autopar.words.shards import cut_extent
from autopar.words.tracing import is_traced

Collective = TypeVar("Collective", bound=Callable[..., torch.Tensor])
_TYPE: dict[str, Any] = {REPLICATED: spmd.R, INVARIANT: spmd.I, PENDING: spmd.P}


def _typed(placement: Placement) -> Any:
    dim = placement.dim
    return _TYPE[placement] if dim is None else spmd.S(dim)


class _ContiguousGradient(torch.autograd.Function):
    """The identity whose gradient is contiguous, as all-reduces want their input: a gradient can come expanded."""

    @staticmethod
    def forward(_ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.contiguous()


def _contiguous_gradient(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad and not spmd.is_type_checking():
        return _ContiguousGradient.apply(x)
    return x


class _ResolvedGradient(torch.autograd.Function):
    """The identity whose gradient is not lazily conjugated."""

    @staticmethod
    def forward(_ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.resolve_conj()


def _of_memory(collective: Collective) -> Collective:
    """Apply a collective to values in memory, forward and backward: a lazy ``z.conj()`` is resolved first."""

    @functools.wraps(collective)
    def run(x: torch.Tensor, *args: object) -> torch.Tensor:
        if not x.is_complex():
            return collective(x, *args)
        # the type checker has not heard of lazy conjugation, but of copies, which resolve it
        lazily = spmd.is_type_checking() or x.is_conj()
        changed = collective(x.clone() if lazily else x, *args)
        if changed.requires_grad and not spmd.is_type_checking():
            return _ResolvedGradient.apply(changed)
        return changed

    return run  # type: ignore[return-value]


@_of_memory
def all_gather(x: torch.Tensor, axis: str, dim: int, to: str) -> torch.Tensor:
    """Gather: ``S<dim>`` -> ``to`` (``R`` or ``I``)."""
    return spmd.all_gather(x, axis, src=spmd.S(dim), dst=_TYPE[to], **summed_back(x))


@_of_memory
def all_reduce(x: torch.Tensor, axis: str, to: str) -> torch.Tensor:
    """Sum over the ranks: ``P`` -> ``to`` (``R`` or ``I``)."""
    reduced = spmd.all_reduce(x.contiguous(), axis, src=spmd.P, dst=_TYPE[to], **summed_back(x))
    return _contiguous_gradient(reduced) if to == REPLICATED else reduced  # of an invariant one it goes on as it is


@_of_memory
def reduce_scatter(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Sum over the ranks and scatter: ``P`` -> ``S<dim>``."""
    return spmd.reduce_scatter(x, axis, src=spmd.P, dst=spmd.S(dim), **summed_back(x))


@_of_memory
def all_to_all(x: torch.Tensor, axis: str, src: int, dst: int) -> torch.Tensor:
    """Exchange shards: ``S<src>`` -> ``S<dst>``.

    A compiler gets a functional collective: that of spmd-types writes to a list of tensors, which Dynamo leaves in the
    graph as it is, and Inductor can trace once, but not a second time.
    """
    if is_traced():
        group = group_of_axis(axis)
        pieces = x.unflatten(dst, (group.size(), -1)).movedim(dst, 0).contiguous()
        arrived = functional_collectives.all_to_all_single_autograd(pieces, None, None, group)
        return arrived.movedim(0, src).flatten(src, src + 1)
    return spmd.all_to_all(x, axis, src=spmd.S(src), dst=spmd.S(dst), **summed_back(x))


@_of_memory
def shard(x: torch.Tensor, axis: str, dim: int, of: str) -> torch.Tensor:
    """Keep each rank's slice: ``of`` (``R`` or ``I``) -> ``S<dim>``."""
    return spmd.convert(x, axis, src=_TYPE[of], dst=spmd.S(dim), **summed_back(x))


@_of_memory
def convert(x: torch.Tensor, axis: str, src: str, dst: str) -> torch.Tensor:
    """Change the placement without communication in the forward or another local shape, or ``S`` -> ``P``."""
    source = _typed(Placement(src))  # programs name placements by their texts
    converted = spmd.convert(x, axis, src=source, dst=_TYPE[dst], expert_mode=True, **summed_back(x))
    return _contiguous_gradient(converted) if (src, dst) == (INVARIANT, REPLICATED) else converted


# --- unequal shards ---------------------------------------------------------------------------------------------------
#
# Shards are padded to the largest one, so that the same collectives serve, and the padding is cut off afterwards: it is
# at the end of the whole dim, as shards are those of torch.chunk. ``n`` is the size of the dim on all ranks,
# ``axes`` are those that cut it one after the other, ``axis`` the last of them; ``tensor*64`` cuts it into multiples of
# 64 elements. Results are contiguous on every rank, so that operators behave alike on all of them.


def _sizes(n: int, axes: Sequence[str]) -> tuple[Any, Any, Any, int]:
    """Return ``(whole, largest shard, own shard, ranks)`` of a dim on the ranks of the last of the axes."""
    axis, unit = axis_and_block(axes[-1])
    ranks = spmd.normalize_axis(axis).size()
    whole = length_of(n, axes[:-1])
    return whole, -(-whole // (ranks * unit)) * unit, length_of(n, axes), ranks


def _first(x: torch.Tensor, *lengths: tuple[int, Any]) -> torch.Tensor:
    """Return the first elements along some ``(dim, length)``, contiguous.

    A tensor that has no more is returned itself: the backward would compute a part of full size again. Not while a
    compiler traces: ranks whose graphs differ may get backwards with collectives in another order.
    """
    for dim, n in lengths:
        is_replicated = isinstance(n, int) and isinstance(x.shape[dim], int) and x.shape[dim] == n
        if not is_replicated or is_traced():
            x = x.narrow(dim, 0, n)
    return x.contiguous()


def all_gather_shards(x: torch.Tensor, axis: str, dim: int, to: str, n: int, axes: Sequence[str]) -> torch.Tensor:
    """Do :func:`all_gather` with unequal shards."""
    whole, largest, _, _ = _sizes(n, axes)
    return _first(all_gather(padded(x, dim, largest), axis, dim, to), (dim, whole))


def reduce_scatter_shards(x: torch.Tensor, axis: str, dim: int, n: int, axes: Sequence[str]) -> torch.Tensor:
    """Do :func:`reduce_scatter` into unequal shards."""
    _, largest, length, ranks = _sizes(n, axes)
    return _first(reduce_scatter(padded(x, dim, largest * ranks), axis, dim), (dim, length))


def all_to_all_shards(
    x: torch.Tensor, axis: str, src: int, dst: int, n_src: int, axes_src: Sequence[str], n_dst: int,
    axes_dst: Sequence[str],
) -> torch.Tensor:  # fmt: skip
    """Do :func:`all_to_all` between unequal shards."""
    whole, largest, _, _ = _sizes(n_src, axes_src)
    _, largest_new, length, ranks = _sizes(n_dst, axes_dst)
    x = padded(padded(x, src, largest), dst, largest_new * ranks)
    return _first(all_to_all(x, axis, src, dst), (src, whole), (dst, length))


def shard_unevenly(x: torch.Tensor, axis: str, dim: int, of: str, n: int, axes: Sequence[str]) -> torch.Tensor:
    """Do :func:`shard` into unequal shards."""
    _, largest, length, ranks = _sizes(n, axes)
    return _first(shard(padded(x, dim, largest * ranks), axis, dim, of), (dim, length))


def terms_of_shards(x: torch.Tensor, axis: str, dim: int, n: int, axes: Sequence[str]) -> torch.Tensor:
    """Convert unequal shards, ``S<dim>`` -> ``P``: each is a term that is zero elsewhere."""
    whole, largest, _, _ = _sizes(n, axes)
    return _first(convert(padded(x, dim, largest), axis, placement_of(dim), PENDING), (dim, whole))


_UNEQUAL: dict[object, object] = {
    all_gather: all_gather_shards, reduce_scatter: reduce_scatter_shards, all_to_all: all_to_all_shards,
    shard: shard_unevenly,
}  # fmt: skip


def state_step(shape: Sequence[int], src: State, dst: State, mesh: Mesh) -> tuple[object, tuple[object, ...]]:
    """Return ``(function, arguments after the tensor)`` for one step of a tensor of global ``shape``."""
    axis = Step.between(src, dst).axis
    name = mesh.name(axis)
    fn, args = step(src[axis], dst[axis])
    cuts = [(cut_extent(shape, state, mesh, axis), state) for state in (src, dst) if state[axis].is_shard]
    if all(even for (_, _, even), _ in cuts):
        return fn, (name, *args)
    extents = [part for (n, earlier, _), state in cuts for part in (n, _cutting(mesh, state, (*earlier, axis)))]
    if fn is convert:
        return terms_of_shards, (name, src[axis].dim, *extents)
    return _UNEQUAL[fn], (name, *args, *extents)


def _cutting(mesh: Mesh, state: State, axes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of `axes` with their block sizes."""
    return tuple(axis_text(mesh.name(a), state[a].unit) for a in axes)


def step(src: Placement, dst: Placement) -> tuple[object, tuple[object, ...]]:
    """Return ``(function, arguments after the axis)`` for one step from ``src`` to ``dst`` with equal shards."""
    from_dim, to_dim = src.dim, dst.dim
    if from_dim is not None and to_dim is not None:
        return all_to_all, (from_dim, to_dim)
    if from_dim is not None and not dst.is_pending:
        return all_gather, (from_dim, dst.kind)
    if to_dim is not None:
        return (reduce_scatter, (to_dim,)) if src.is_pending else (shard, (to_dim, src.kind))
    if src.is_pending:
        return all_reduce, (dst.kind,)
    return convert, (src, dst)
