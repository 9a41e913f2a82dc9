"""Hops: a parameter's way from its stored to its used placement, and its gradient's way back.

They are the plan's steps, neighbouring axes merged into one collective over their common group. Collectives want pieces
of one size: pieces that are not equal are padded to the largest one, and what was added is cut off afterwards. Pieces
are those of ``torch.chunk``, so all that is added stands at the end of the whole dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import PlanError
from autopar.plans.plan import ParamChoice
from autopar.runtime.ranks.collectives import all_gather_flat, reduce_scatter_flat
from autopar.runtime.ranks.groups import groups_on
from autopar.torch_private import all_gather_single, compiler_traces, functional_collectives
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATED, Placement, State, path
from autopar.words.shards import cut_extent, largest_shard, local_shape, shard_of


@dataclass(frozen=True)
class Cut:
    """A dim that the ranks of a hop cut, how many elements of it they have together, and the pieces' unit."""

    dim: int = 0
    size: int = 0
    unit: int = 1

    def largest(self, n: int) -> int:
        """Return the elements of the largest of ``n`` pieces."""
        return largest_shard(self.size, n, self.unit)

    def piece(self, n: int, at: int) -> tuple[int, int]:
        """Return ``(start, length)`` of shard number ``at`` of ``n``."""
        return shard_of(self.size, n, at, self.unit)

    def is_first_and_even(self, n: int) -> bool:
        """Check that ``n`` shards, one after the other, are the whole tensor."""
        return self.dim == 0 and self.size % (n * self.unit) == 0


@dataclass(frozen=True)
class ReshardStep:
    """One change of placement on the ``n`` ranks of ``group``, of which this is number ``index``.

    ``forward`` is done to values (stored -> used), ``backward`` to gradients (used -> stored): ``none gather slice swap
    all_reduce reduce_scatter``. ``cut`` is the dim in pieces; ``other`` the target dim of a swap.
    """

    forward: str
    backward: str
    group: dist.ProcessGroup
    n: int
    index: int
    cut: Cut = Cut()
    other: Cut = Cut()


_KINDS = {
    ("S", "R"): ("gather", "reduce_scatter"), ("S", "I"): ("gather", "slice"), ("I", "R"): ("none", "all_reduce"),
    ("I", "S"): ("slice", "gather"), ("R", "S"): ("slice", "none"), ("S", "S"): ("swap", "swap"),
    ("R", "I"): ("none", "none"), ("R", "R"): ("none", "none"),
}  # fmt: skip


def reshard_steps(
    name: str, choice: ParamChoice, shape: Sequence[int], device_mesh: DeviceMesh, mesh: Mesh
) -> tuple[ReshardStep, ...]:
    """Return the reshard steps from stored to used of a parameter of global ``shape``.

    Raises:
        PlanError: there is no such path.
    """
    result = []
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    for a, b, axes, state in _merged(name, choice, shape, mesh):
        forward, backward = _KINDS[a.kind, b.kind]
        index = 0
        for axis in axes:
            index = index * mesh.size(axis) + coordinate[axis]
        n = prod(mesh.size(axis) for axis in axes)
        whole = State(REPLICATED if axis in axes else p for axis, p in enumerate(state))
        sizes = local_shape(shape, whole, mesh, coordinate)
        cuts = [Cut(d, sizes[d], p.unit) for p in (a, b) if (d := p.dim) is not None] or [Cut()]
        result.append(ReshardStep(forward, backward, group_of(device_mesh, mesh, axes), n, index, cuts[0], cuts[-1]))
    return tuple(result)


def hop_axes(name: str, choice: ParamChoice, shape: Sequence[int], mesh: Mesh) -> list[tuple[int, ...]]:
    """List the axes over whose common groups the reshard steps of a parameter go.

    Raises:
        PlanError: there is no path from stored to used.
    """
    return [tuple(axes) for _, _, axes, _ in _merged(name, choice, shape, mesh)]


def _merged(
    name: str, choice: ParamChoice, shape: Sequence[int], mesh: Mesh
) -> list[tuple[Placement, Placement, list[int], State]]:
    """List the steps that communicate or cut: from, to, the axes that go together, and the state before."""
    steps = path(choice.stored, choice.used)
    legal = steps is not None and all((a[i].kind, b[i].kind) in _KINDS for i, a, b in steps)
    if steps is None or not legal:
        raise PlanError(
            f"parameter '{name}': stored as {choice.stored.text} it cannot be used as "
            f"{choice.used.text}; store it so that only whole axes are gathered, such as the used placement"
        )
    merged: list[tuple[Placement, Placement, list[int], State]] = []
    for axis, src, dst in steps:
        if mesh.size(axis) == 1:
            continue
        a, b = src[axis], dst[axis]
        last = merged[-1] if merged else None
        if last is not None and last[:2] == (a, b) and not b.is_shard and _as_one(shape, src, mesh, axis, last[2]):
            last[2].insert(0, axis)
        else:
            merged.append((a, b, [axis], src))
    return [each for each in merged if _KINDS[each[0].kind, each[1].kind] != ("none", "none")]


def _as_one(shape: Sequence[int], state: State, mesh: Mesh, axis: int, inner: Sequence[int]) -> bool:
    """Check that ``axis`` and the ``inner`` axes may go together: shards of shards are the shards of one cut."""
    if not state[axis].is_shard:
        return True
    extent, earlier, _ = cut_extent(shape, state, mesh, axis)
    return extent % prod(mesh.size(a) for a in (*earlier, axis, *inner)) == 0


def group_of(device_mesh: DeviceMesh, mesh: Mesh, axes: Sequence[int]) -> Any:
    """Return the process group over several axes; every rank must ask for the same ones in the same order."""
    names = tuple(mesh.name(axis) for axis in axes)
    if len(names) == 1:
        return device_mesh.get_group(names[0])
    return groups_on(device_mesh).along(device_mesh, axes)


def padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Pad ``x`` with zeros up to ``size`` elements of ``dim``; ``x`` itself where it has as many."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.nn.functional.pad(x, [*[0, 0] * (x.dim() - 1 - dim), 0, missing])


def padded_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Pad ``x`` with zeros in every dim, up to ``shape``."""
    for dim, size in enumerate(shape):
        x = padded(x, dim, size)
    return x


def gather(x: torch.Tensor, reshard_step: ReshardStep) -> torch.Tensor:
    """Concatenate the ranks' pieces."""
    x = padded(x, reshard_step.cut.dim, reshard_step.cut.largest(reshard_step.n)).contiguous()
    if compiler_traces():
        out = all_gather_single(x, 0, reshard_step.group).unflatten(0, (reshard_step.n, x.shape[0]))
    else:
        out = x.new_empty(reshard_step.n, *x.shape)
        all_gather_flat(out.flatten(0, 1), x, group=reshard_step.group)
    return _without_padding(unstack(out, reshard_step.cut.dim), reshard_step.cut)


def _without_padding(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    return x if x.shape[cut.dim] == cut.size else x.narrow(cut.dim, 0, cut.size)


def own_part(x: torch.Tensor, cut: Cut, reshard_step: ReshardStep) -> torch.Tensor:
    """Return this rank's shard without its padding."""
    length = cut.piece(reshard_step.n, reshard_step.index)[1]
    return x if x.shape[cut.dim] == length else x.narrow(cut.dim, 0, length)


def of_its_own(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in memory of its own: a copy where it is a part of a larger tensor, else ``x`` itself."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient, as a DTensor requires; a sparse one (``nn.Embedding(sparse=True)``) is filled in."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def unstack(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Merge the first dim into ``dim``: [n, ..., k, ...] -> [..., n * k, ...]."""
    return x.movedim(0, dim).flatten(dim, dim + 1)


def stacked(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Split ``dim``: [..., n * k, ...] -> [n, ..., k, ...], a view if it divides; else padded."""
    x = padded(x, dim, -(-x.shape[dim] // n) * n)
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def apply(kind: str, x: torch.Tensor, reshard_step: ReshardStep, backward: bool = False) -> torch.Tensor:
    """Do one hop and wait for it. Those of values go into the graph of a compiler that traces (functional ones)."""
    from_cut, to_cut = (reshard_step.other, reshard_step.cut) if backward else (reshard_step.cut, reshard_step.other)
    if kind == "gather":
        return gather(x, reshard_step)
    if kind == "slice":
        return x.narrow(reshard_step.cut.dim, *reshard_step.cut.piece(reshard_step.n, reshard_step.index))
    if kind == "all_reduce":
        x = x.contiguous()
        dist.all_reduce(x, group=reshard_step.group)
        return x
    if kind == "reduce_scatter":
        parts = stacked(x, reshard_step.cut.dim, reshard_step.n).contiguous()
        out = torch.empty_like(parts[0])
        reduce_scatter_flat(out, parts.flatten(0, 1), group=reshard_step.group)
        return own_part(out, reshard_step.cut, reshard_step)
    if kind == "swap":
        x = padded(x, from_cut.dim, from_cut.largest(reshard_step.n))
        x = padded(x, to_cut.dim, to_cut.largest(reshard_step.n) * reshard_step.n)
        parts = stacked(x, to_cut.dim, reshard_step.n).contiguous()
        if compiler_traces():
            out = functional_collectives.all_to_all_single(parts, None, None, reshard_step.group)
        else:
            out = torch.empty_like(parts)
            dist.all_to_all_single(out, parts, group=reshard_step.group)
        return own_part(_without_padding(unstack(out, from_cut.dim), from_cut), to_cut, reshard_step)
    return x
