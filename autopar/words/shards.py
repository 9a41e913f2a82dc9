"""Shards: the part of a tensor that each rank of a mesh has in a state.

Shards are those of ``torch.chunk``, as in DTensor: equal where the axis divides the dim, else the later ones are
smaller or empty. With a block size they consist of whole blocks. Prices and memory count the largest shard, which is
the first rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.errors import MeshError
from autopar.words.meshes import Mesh
from autopar.words.placements import State, changed_axis


def shard_of(n: int, size: int, at: int, unit: int = 1) -> tuple[int, int]:
    """Return ``(start, length)`` of shard number ``at`` of ``n`` elements over ``size`` ranks, as of ``torch.chunk``.

    All shards have ``ceil(n / size)`` elements, but for later ones, which are smaller or empty if ``size`` does not
    divide ``n``. With a block size ``unit``, which divides ``n``, the same is true of blocks.
    """
    length = largest_shard(n, size, unit)
    start = min(at * length, n)
    return start, min(length, n - start)


def nested_shard_of(n: int, cuts: Sequence[tuple[int, int]], at: Sequence[int]) -> tuple[int, int]:
    """Return ``(start, length)`` of the shard of ``n`` elements after nested cuts by axes of ``(size, unit)``.

    ``at`` is its number on each axis.
    """
    start = 0
    for (size, unit), number in zip(cuts, at, strict=True):
        before, n = shard_of(n, size, number, unit)
        start += before
    return start, n


def largest_shard(n: int, size: int, unit: int = 1) -> int:
    """Return the elements of the first shard (:func:`shard_of`), which is the largest."""
    return -(-n // (size * unit)) * unit


def lengths_of(n: int, cuts: Sequence[tuple[int, int]]) -> set[int]:
    """Return the lengths of all shards of ``n`` elements after nested cuts by axes of ``(size, unit)``."""
    lengths = {n}
    for size, unit in cuts:
        shorter = set()
        for length in lengths:
            largest = largest_shard(length, size, unit)
            full = length // largest if largest else 0
            shorter |= {largest, *([length - full * largest] if full < size else []), *([0] if full + 1 < size else [])}
        lengths = shorter
    return lengths


def local_shape(shape: Sequence[int], state: State, mesh: Mesh, at: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the shape on one rank of a tensor of global ``shape`` in ``state``.

    Without the rank's coordinate ``at`` it is the first rank's, whose shard is the largest.

    Raises:
        MeshError: a placement names a dim that the tensor does not have.
    """
    local = list(shape)
    for axis, (placement, (name, size)) in enumerate(zip(state, mesh, strict=True)):
        d = placement.dim
        if d is None:
            continue
        if d >= len(local):
            raise MeshError(f"placement {placement} on axis '{name}' names dim {d} of a tensor with {len(local)} dims")
        unit = placement.unit
        local[d] = largest_shard(local[d], size, unit) if at is None else shard_of(local[d], size, at[axis], unit)[1]
    return tuple(local)


Box = tuple[tuple[int, int], ...]
"""``(start, length)`` per dim: a part of a tensor."""


def box_of(shape: Sequence[int], state: State, mesh: Mesh, at: Sequence[int]) -> Box:
    """Return the part of a tensor of global ``shape`` in ``state`` that the rank at coordinate ``at`` holds."""
    box = [(0, n) for n in shape]
    for placement, size, c in zip(state, mesh.sizes, at, strict=True):
        d = placement.dim
        if d is not None:
            start, length = box[d]
            inner, n = shard_of(length, size, c, placement.unit)
            box[d] = (start + inner, n)
    return tuple(box)


def cut_extent(shape: Sequence[int], state: State, mesh: Mesh, axis: int) -> tuple[int, tuple[int, ...], bool]:
    """Return ``(elements on all ranks, earlier axes that cut the same dim, shards are equal)`` of an axis."""
    d = state[axis].dim
    assert d is not None
    earlier = tuple(a for a in range(axis) if state[a].dim == d and mesh.size(a) > 1)
    pieces = prod(mesh.size(a) * state[a].unit for a in (*earlier, axis))
    return shape[d], earlier, shape[d] % pieces == 0


def elements_moved(shape: Sequence[int], src: State, dst: State, mesh: Mesh) -> int:
    """Return the buffer size of a step's collective on one rank, in elements of shards padded to the largest.

    Of a gather or a reduce-scatter that is the whole of the axis, of an all-to-all what one rank sends.
    """
    axis = changed_axis(src, dst)
    size, d, from_shard = mesh.size(axis), dst[axis].dim, src[axis].is_shard
    before = local_shape(shape, src, mesh)
    if d is None:
        return prod(before) * (size if from_shard else 1)
    after = local_shape(shape, dst, mesh)
    if not from_shard:
        return prod(after) * size
    return prod(before[:d]) * prod(before[d + 1 :]) * after[d] * size


def fits(shape: Sequence[int], state: State, mesh: Mesh) -> bool:
    """Return whether a state is possible: its dims exist, and have at least as many elements as shards.

    Shards need not be equal, and the last ones may be empty (6 elements over 4 ranks are 2, 2, 2 and 0). An operator's
    rule says whether it may run on an empty one (``Rule.needs_some``).
    """
    local = list(shape)
    units = False
    for placement, (_, size) in zip(state, mesh, strict=True):
        d = placement.dim
        if d is not None:
            unit = placement.unit
            if d >= len(local) or local[d] < size * unit:
                return False
            local[d] = -(-local[d] // (size * unit)) * unit
            units = units or unit > 1
    return not units or _units_are_needed(shape, state, mesh)


def _units_are_needed(shape: Sequence[int], state: State, mesh: Mesh) -> bool:
    """Return whether the block sizes of a state are possible and make a difference."""
    for axis, (placement, size) in enumerate(zip(state, mesh.sizes, strict=True)):
        d, unit = placement.dim, placement.unit
        if d is not None and unit > 1:
            before = [(mesh.size(a), state[a].unit) for a in range(axis) if state[a].dim == d]
            lengths = lengths_of(shape[d], before)
            if any(n % unit for n in lengths) or all(n % (size * unit) == 0 for n in lengths):
                return False
    return True


def divides(shape: Sequence[int], state: State, mesh: Mesh) -> bool:
    """Return whether every dim divides by the axes that shard it, so that all shards are equal."""
    local = list(shape)
    for placement, size in zip(state, mesh.sizes, strict=True):
        d, unit = placement.dim, placement.unit
        if d is not None:
            if d >= len(local) or local[d] % (size * unit):
                return False
            local[d] //= size
    return True
