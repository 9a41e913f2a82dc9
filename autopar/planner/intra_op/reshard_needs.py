"""What steps of reshards need in memory beside the tensors that they lead from and to, and what reductions of gradients
need, which are such steps."""

from __future__ import annotations

from math import prod

from autopar.graph import Spec
from autopar.meshes import Mesh
from autopar.pieces import cut_extent, local_shape
from autopar.placements import INVARIANT, PENDING, Placement, State, Step, path
from autopar.plan import ParamChoice


def reduction_needs(spec: Spec, choice: ParamChoice, mesh: Mesh, accumulates: bool) -> int:
    """The most that is there, beside the gradient as the parameter is used, while that is reduced to where the
    parameter is stored: the result included, unless it is added to what is there."""
    needs = reduced = 0
    for axis, src, dst in reversed(path(choice.stored, choice.used) or ()):
        if mesh.size(axis) == 1 or (accumulates and choice.lifetime != "use"):
            continue
        _, beside, is_alias = step_extra(spec, src, dst, mesh)
        result = 0 if is_alias else prod(local_shape(spec.shape, src, mesh)) * spec.item_bytes
        needs, reduced = max(needs, reduced + beside + result), result
    if not accumulates and not needs:
        return prod(local_shape(spec.shape, choice.stored, mesh)) * spec.item_bytes
    return needs


def step_extra(spec: Spec, src: State, dst: State, mesh: Mesh) -> tuple[int, int, bool]:
    """``(bytes beside both tensors in the forward, in the backward, whether the gradient goes on in its memory)`` of a
    step of one axis."""
    axis = Step.between(src, dst).axis
    if mesh.size(axis) == 1:
        return 0, 0, True
    n_src, n_dst = (prod(local_shape(spec.shape, s, mesh)) * spec.item_bytes for s in (src, dst))
    kinds = src[axis], dst[axis]
    if kinds in ((PENDING, INVARIANT), (INVARIANT, PENDING)):
        return 0, 0, True
    forward = _move_extra(*kinds, n_src, n_dst)
    backward = _move_extra(kinds[1].adjoint, kinds[0].adjoint, n_dst, n_src)
    if not all(cut_extent(spec.shape, s, mesh, axis)[2] for s in (src, dst) if s[axis].is_shard):
        # pieces are padded to the largest: in the forward what is cut into pieces, in the backward what is gathered
        forward += n_src if kinds[1].is_shard and not kinds[0].is_shard else n_dst if kinds[1].is_pending else 0
        backward = backward or min(n_src, n_dst)
    return forward, backward, False


def copies_first(src: State, dst: State, mesh: Mesh) -> bool:
    """Whether a step of one axis copies what is not contiguous before anything else: collectives of one tensor take no
    other. What is no collective takes a tensor as it lies, and an all-to-all takes it apart in any case."""
    axis = Step.between(src, dst).axis
    given, wanted = src[axis], dst[axis]
    reduces = given.is_pending and (wanted.is_shard or wanted.is_whole)
    return mesh.size(axis) > 1 and (reduces or (given.is_shard and wanted.is_whole))


def _move_extra(src: Placement, dst: Placement, n_src: int, n_dst: int) -> int:
    """What a collective needs beside its input and its result: those along a dim that is not the first are made of
    pieces that lie one behind the other."""
    src_dim, dst_dim = src.dim, dst.dim
    if src_dim is not None and dst_dim is not None:
        return n_src + (n_src if dst_dim else 0)
    if src_dim is not None and dst.is_whole:
        return n_dst if src_dim else 0
    if src.is_pending and dst_dim is not None:
        return n_src if dst_dim else 0
    return 0


__all__ = ["copies_first", "reduction_needs", "step_extra"]
