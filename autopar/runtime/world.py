"""Many ranks in one process: a program with real numbers, without processes.

``LocalTensorMode`` of torch runs every operation once per rank on a fake process group, with working collectives and
autograd. It is slow and exact: what ``autopar verify`` and most tests use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.graph import Graph
from autopar.lower.collectives import step
from autopar.lower.emit import Program
from autopar.placements import Mesh, State
from autopar.plan import ParamChoice, Plan
from autopar.planner.params import path


def coordinates(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Row-major coordinate of a rank."""
    found = []
    for _, size in reversed(mesh):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def piece(whole: torch.Tensor, state: State, mesh: Mesh, rank: int) -> torch.Tensor:
    """The slice of ``whole`` on one rank; pending sums put the value on coordinate 0."""
    for placement, (_, size), at in zip(state, mesh, coordinates(rank, mesh), strict=True):
        if placement[0] == "S":
            d = int(placement[1:])
            n = whole.shape[d] // size
            whole = whole.narrow(d, at * n, n)
        elif placement == "P" and at:
            whole = torch.zeros_like(whole)
    return whole.clone()


def join(pieces: Sequence[torch.Tensor], state: State, mesh: Mesh) -> torch.Tensor:
    """Inverse of :func:`piece` over all ranks: concatenates shards, sums pending values, takes the first copy."""
    parts = list(pieces)
    for placement, (_, size) in reversed(list(zip(state, mesh, strict=True))):
        groups = [parts[i : i + size] for i in range(0, len(parts), size)]
        if placement[0] == "S":
            parts = [torch.cat(g, int(placement[1:])) for g in groups]
        elif placement == "P":
            parts = [torch.stack(g).sum(0) for g in groups]
        else:
            parts = [g[0] for g in groups]
    return parts[0]


@contextlib.contextmanager
def fake_world(mesh: Mesh) -> Iterator[DeviceMesh]:
    """A fake process group with a device mesh, torn down afterwards.

    Raises:
        MeshError: this process already belongs to a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise MeshError("this process is already in a process group; verify in a process of its own")
    n = prod(size for _, size in mesh)
    dist.init_process_group(backend="fake", rank=0, world_size=n, store=FakeStore())
    try:
        device_mesh = init_device_mesh(
            "cpu", tuple(size for _, size in mesh), mesh_dim_names=tuple(name for name, _ in mesh)
        )
        with spmd.set_current_mesh(device_mesh):
            yield device_mesh
    finally:
        dist.destroy_process_group()


def along(x: torch.Tensor, src: State, dst: State, mesh: Mesh) -> torch.Tensor:
    """The differentiable steps that bring a parameter from its stored to its used placement."""
    steps = path(src, dst)
    assert steps is not None, f"no path from {src} to {dst}"
    for axis, a, b in steps:
        name, size = mesh[axis]
        if size > 1:
            fn, args = step(a[axis], b[axis])
            x = fn(x, name, *args)  # type: ignore[operator]
    return x


@dataclass
class WorldStep:
    """What one training step of a program gives, joined from all ranks."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def run_step(
    graph: Graph,
    plan: Plan,
    program: Program,
    weights: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    seed: int = 0,
    backward: bool = True,
) -> WorldStep:
    """Forward and backward of a program on all ranks of its mesh, in this process.

    Args:
        weights, buffers, inputs: whole tensors by name.

    Returns:
        outputs, gradients by parameter and new buffers, all whole. Every rank's copy of a replicated value is
        checked to be the same; a difference is an AssertionError.
    """
    mesh = plan.mesh
    n = prod(size for _, size in mesh)
    with fake_world(mesh), LocalTensorMode(n):

        def spread(value: torch.Tensor, state: State) -> LocalTensor:
            return LocalTensor({r: piece(value, state, mesh, r) for r in range(n)})

        stored: dict[str, LocalTensor] = {}
        held: dict[str, tuple[LocalTensor, State]] = {}
        values: list[Any] = []
        for slot in program.slots:
            if slot.kind == "param":
                choice: ParamChoice = plan.params[slot.name]
                leaf = spread(weights[slot.name].detach(), choice.stored)
                if weights[slot.name].requires_grad:
                    leaf.requires_grad_()
                stored[slot.name] = leaf
                values.append(along(leaf, choice.stored, choice.used, mesh))
            elif slot.kind == "buffer":
                held[slot.name] = (spread(buffers[slot.name], slot.state), slot.state)
                values.append(held[slot.name][0])
            elif slot.kind == "input":
                values.append(spread(inputs[slot.name], slot.state))
            else:
                values.append(spread(torch.tensor(seed, dtype=torch.int64), slot.state))
        flat = program.module(*values)
        results, updates = flat[: len(program.outputs)], flat[len(program.outputs) :]
        if backward and graph.loss is not None:
            results[graph.loss].backward()

    def whole(x: Any, state: State, name: str) -> torch.Tensor:
        if not isinstance(x, LocalTensor):
            return x
        pieces = [x._local_tensors[r].detach() for r in range(n)]
        _same_copies(pieces, state, mesh, name)
        return join(pieces, state, mesh)

    outputs = [
        out if state is None else whole(out, state, f"output {i}")
        for i, (out, state) in enumerate(zip(results, program.outputs, strict=True))
    ]
    gradients = {
        name: whole(leaf.grad, plan.params[name].stored, f"gradient of {name}")
        for name, leaf in stored.items()
        if leaf.grad is not None
    }
    new = {name: whole(x, state, name) for name, (x, state) in held.items()}
    for name, x in zip(program.updates, updates, strict=True):
        new[name] = whole(x, plan.buffers[name], name)
    return WorldStep(outputs, gradients, new)


def _same_copies(pieces: Sequence[torch.Tensor], state: State, mesh: Mesh, name: str) -> None:
    for rank, value in enumerate(pieces):
        at = coordinates(rank, mesh)
        first = 0
        for placement, (_, size), c in zip(state, mesh, at, strict=True):
            first = first * size + (c if placement[0] in "SP" else 0)
        other = pieces[first]
        if not torch.allclose(value, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            worst = (value - other).abs().max().item()
            raise AssertionError(f"{name} ({','.join(state)}) differs between ranks {first} and {rank} by {worst:.3e}")
