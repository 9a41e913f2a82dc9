"""Programs run under ``torch.compile``, with the same loss and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from procs.cases import whole
from torch.distributed.device_mesh import init_device_mesh
from zoo import ZOO

import autopar
from autopar.runtime.launch import run_local


def compiled(name: str) -> tuple[float, float]:
    """Differences of loss and worst gradient between the compiled program and the program."""
    case = ZOO[name]()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    pins = {"model.0": {"tensor": "n"}, "model.2": {"tensor": "k"}} if dist.get_world_size() > 1 else None
    model = autopar.parallelize(case.model, mesh, case.args, constraints=pins)
    losses, gradients = [], []
    for backend in (None, "aot_eager"):
        if backend:
            model.compile(backend=backend)
        loss = model(*case.args)
        loss.backward()
        losses.append(loss.item())
        gradients.append([whole(p.grad).clone() for p in model.parameters()])
        model.zero_grad()
    worst = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    return abs(losses[0] - losses[1]), worst


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_program(ranks: int) -> None:
    torch.manual_seed(0)
    for loss, gradient in run_local(compiled, ranks, "mlp", timeout=300):
        assert loss < 1e-6 and gradient < 1e-6
