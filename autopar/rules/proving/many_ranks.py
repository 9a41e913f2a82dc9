"""Tensors in pieces, and a process group that is none: what proofs and one-process runs stand on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.rules.proving.one_by_one import OneByOne
from autopar.rules.proving.simulation import simulation
from autopar.torch_private import fake_store
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import box_of


def piece(whole: torch.Tensor, state: State, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the slice of ``whole`` on one rank; pending sums put the value on coordinate 0."""
    at = mesh.coordinate(rank)
    for d, (start, length) in enumerate(box_of(whole.shape, state, mesh, at)):
        if length != whole.shape[d]:
            whole = whole.narrow(d, start, length)
    if any(placement.is_pending and c for placement, c in zip(state, at, strict=True)):
        whole = torch.zeros_like(whole)
    return whole.clone()


def join(pieces: Sequence[torch.Tensor], state: State, mesh: Mesh) -> torch.Tensor:
    """Invert :func:`piece` over all ranks: concatenate shards, sum pending values, take the first copy."""
    parts = list(pieces)
    for placement, (_, size) in reversed(list(zip(state, mesh, strict=True))):
        groups = [parts[i : i + size] for i in range(0, len(parts), size)]
        d = placement.dim
        if d is not None:
            parts = [torch.cat(g, d) for g in groups]
        elif placement.is_pending:
            parts = [torch.stack(g).sum(0) for g in groups]
        else:
            parts = [g[0] for g in groups]
    return parts[0]


@contextlib.contextmanager
def many_ranks(mesh: Mesh) -> Iterator[int]:
    """Simulate all ranks of a mesh in this process, on tensors that hold one shard each; yield their number."""
    with fake_world(mesh), simulation(mesh.n_devices), OneByOne():
        yield mesh.n_devices


@contextlib.contextmanager
def fake_world(mesh: Mesh) -> Iterator[DeviceMesh]:
    """Make a fake process group with a device mesh, torn down afterwards.

    Raises:
        MeshError: this process already belongs to a process group.
    """
    if dist.is_initialized():
        raise MeshError("this process is already in a process group; verify in a process of its own")
    n = mesh.n_devices
    dist.init_process_group(backend="fake", rank=0, world_size=n, store=fake_store())
    try:
        device_mesh = init_device_mesh(
            "cpu", mesh.sizes, mesh_dim_names=mesh.names
        )
        with spmd.set_current_mesh(device_mesh):
            yield device_mesh
    finally:
        dist.destroy_process_group()
