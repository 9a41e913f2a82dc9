"""Working memory of reshard steps, and of reductions of gradients, which are such steps.

A step is what :mod:`autopar.lower.collectives` makes of it: shards that are not equal are padded to the largest, a
collective runs, and a copy cuts off what was added. Each of these makes its result from that of the one before, which
is freed then; the backward makes them in the reverse order. All counts are those of the first rank, whose shard is the
largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from autopar.plans.plan import ParamChoice
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, PENDING, Placement, State, Step, path
from autopar.words.shards import largest_shard, local_shape


def reduction_needs(spec: Spec, choice: ParamChoice, mesh: Mesh, accumulates: bool) -> int:
    """Return the most bytes, besides the gradient as used, while it is reduced to where its parameter is stored.

    The result counts unless it is added to what is there.
    """
    needs = reduced = 0
    for axis, src, dst in reversed(path(choice.stored, choice.used) or ()):
        if mesh.size(axis) == 1 or (accumulates and choice.lifetime != "use"):
            continue
        beside = step_back_needs(spec, src, dst, mesh, is_strided=False, stays=not reduced)
        result = 0 if is_alias(src, dst, mesh) else prod(local_shape(spec.shape, src, mesh)) * spec.item_bytes
        needs, reduced = max(needs, reduced + beside + result), result
    if not accumulates and not needs and not choice.on_host:
        return prod(local_shape(spec.shape, choice.stored, mesh)) * spec.item_bytes
    return needs


def is_alias(src: State, dst: State, mesh: Mesh) -> bool:
    """Return whether the gradient of a step's result goes on, in its memory, as that of its input."""
    axis = Step.between(src, dst).axis
    return mesh.size(axis) == 1 or {src[axis], dst[axis]} == {PENDING, INVARIANT}


def copies_gradient(src: State, dst: State) -> bool:
    """Return whether the backward of a step copies the gradient into the same layout: one rank has it, others zeros."""
    axis = Step.between(src, dst).axis
    return dst[axis].adjoint.is_replicated and src[axis].adjoint.is_pending


@lru_cache(maxsize=4096)
def step_needs(spec: Spec, src: State, dst: State, mesh: Mesh, is_strided: bool) -> int:
    """Return the most bytes that the forward of a step has at once, besides its input and its result.

    ``is_strided``: its input is not contiguous.
    """
    axis = Step.between(src, dst).axis
    if mesh.size(axis) == 1:
        return 0
    padded, moved = _padded_shapes(spec.shape, src, dst, mesh)
    given, wanted = local_shape(spec.shape, src, mesh), local_shape(spec.shape, dst, mesh)
    links = [_Link(prod(padded), 0)] if padded != given else []
    links.append(_moved(padded, moved, src[axis], dst[axis], is_strided and not links))
    if moved != wanted and not _is_view(moved, wanted):
        links.append(_Link(prod(wanted), 0))
    return _most_beside(links) * spec.item_bytes


@lru_cache(maxsize=4096)
def step_back_needs(spec: Spec, src: State, dst: State, mesh: Mesh, is_strided: bool, stays: bool) -> int:
    """Return the same of its backward, besides the gradient of its result and that of its input.

    ``is_strided``: the gradient that arrives is not contiguous; ``stays``: it outlives the step, as somebody else has
    it.
    """
    if is_alias(src, dst, mesh):
        return 0
    padded, moved = _padded_shapes(spec.shape, src, dst, mesh)
    given, wanted = local_shape(spec.shape, src, mesh), local_shape(spec.shape, dst, mesh)
    axis = Step.between(src, dst).axis
    links = [_Link(prod(moved), 0)] if moved != wanted else []
    links.append(_moved(moved, padded, dst[axis].adjoint, src[axis].adjoint, is_strided and not links))
    if padded != given:
        links.append(_Link(prod(given), 0))
    return _most_beside(links, 0 if stays else prod(wanted)) * spec.item_bytes


class _Link(NamedTuple):
    """One operator of a step: elements of its result, and of its working memory."""

    made: int
    beside: int


def _most_beside(links: Sequence[_Link], let_go: int = 0) -> int:
    """Return the most elements that a chain of operators has at once, besides its input and its result.

    ``let_go`` are elements of the input that are freed when the first one has run.
    """
    most = before = 0
    for number, link in enumerate(links):
        most = max(most, before + link.beside + link.made - (let_go if number else 0))
        before = link.made
    return most - links[-1].made


def _padded_shapes(
    shape: Sequence[int], src: State, dst: State, mesh: Mesh
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the local shapes of the input and the result of a step's collective: shards as large as the largest."""
    axis = Step.between(src, dst).axis
    size = mesh.size(axis)
    read, result = list(local_shape(shape, src, mesh)), list(local_shape(shape, dst, mesh))
    for state, pieces, wholes in ((src, read, result), (dst, result, read)):
        dim = state[axis].dim
        if dim is not None:
            pieces[dim] = largest_shard(wholes[dim], size, state[axis].unit)
            wholes[dim] = pieces[dim] * size
    return tuple(read), tuple(result)


def shape_in_memory(shape: Sequence[int], src: State, dst: State, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the memory in which a step's result is on one rank.

    Where padding can be cut off without a copy, the result is a view, which keeps all of it.
    """
    _, padded = _padded_shapes(shape, src, dst, mesh)
    wanted = local_shape(shape, dst, mesh)
    return padded if padded != wanted and _is_view(padded, wanted) else wanted


def _is_view(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether the rest of a contiguous tensor is contiguous, so that cutting off its padding makes no copy."""
    dims = [d for d, (n, rest) in enumerate(zip(shape, wanted, strict=True)) if n != rest]
    return all(n == 1 for n in shape[: dims[-1]])


def _moved(read: Sequence[int], made: Sequence[int], src: Placement, dst: Placement, is_strided: bool) -> _Link:
    """Return a collective of one tensor; a strided one is copied first, except for steps without a collective."""
    before, after = src.dim, dst.dim
    if before is not None and after is not None:  # its pieces are copied, unless they are contiguous, and put together
        return _Link(prod(made), prod(made) + (prod(read) if is_strided or not _leads(read, after) else 0))
    copied = prod(read) if is_strided else 0
    if before is not None and dst.is_replicated:
        return _Link(prod(made), copied + (0 if _leads(made, before) else prod(made)))
    if src.is_pending and after is not None:
        return _Link(prod(made), copied + (prod(read) if after else 0))
    return _Link(prod(made), copied if src.is_pending and dst.is_replicated else 0)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Return whether a dim is the first that has more than one element, so that parts along it are contiguous."""
    return all(n == 1 for n in shape[:dim])
