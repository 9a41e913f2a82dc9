"""Where a stored tensor is on its mesh, and other tensors that are placed as it is."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.parameters.state import as_dtensor, coordinate_of, local_shard, mesh_of
from autopar.words.placements import REPLICATED, State, shard
from autopar.words.shards import Box, box_of


def state_of(tensor: DTensor) -> State:
    """Return the state of a stored DTensor; placements other than shards are replicated."""
    return State(shard(p.dim) if isinstance(p, Shard) else REPLICATED for p in tensor.placements)


def box_held(tensor: torch.Tensor) -> Box:
    """Return ``(start, length)`` per dim: which part of the whole tensor this rank has."""
    if not isinstance(tensor, DTensor):
        return tuple((0, n) for n in tensor.shape)
    mesh = tensor.device_mesh
    return box_of(tensor.shape, state_of(tensor), mesh_of(mesh), coordinate_of(mesh))


def like(example: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of ``whole``, placed as ``example`` is: a DTensor, or a plain tensor."""
    whole = whole.detach().to(example.device)
    if not isinstance(example, DTensor):
        return whole.contiguous()
    state = state_of(example)
    piece = local_shard(whole, state, example.device_mesh)
    if piece is not whole:  # a share of its own, so that the whole can go
        piece = piece.clone(memory_format=torch.contiguous_format)
    return as_dtensor(piece.contiguous(), state, whole.shape, example.device_mesh)


def placed_as(like_this: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` placed as ``like_this`` is; a plain tensor is replicated."""
    if not isinstance(value, DTensor):
        return like(like_this, value) if isinstance(like_this, DTensor) else value
    if not isinstance(like_this, DTensor):
        return value.full_tensor()
    if value.device_mesh == like_this.device_mesh and value.placements != like_this.placements:
        return value.redistribute(like_this.device_mesh, like_this.placements)
    return value
