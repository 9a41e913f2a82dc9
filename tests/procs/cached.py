"""What one rank does in the tests of models that run forward alone, with caches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from cached_decoder import Sizes, greedy, made, prompt_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

COUNT = 64
"""Tokens that are made."""
HEADS = {"blocks.*.attention.q": {"tensor": "n"}}
"""Cuts heads."""


def ranks_of(mesh: Mapping[str, int] | None) -> Any:
    """Return a mesh of these axes, or the number of ranks."""
    return init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)) if mesh else dist.get_world_size()


def tokens(
    sizes: Mapping[str, Any], mesh: Mapping[str, int] | None, constraints: Any = None, stages: int | None = None
) -> dict[str, Any]:
    """Generate twice with the same caches, with prompts of two lengths, and compare with one device."""
    of = Sizes(**sizes)
    model = made(of)
    alone = copy.deepcopy(model)
    example = prompt_of(of, 10)
    pm = autopar.parallelize(model, ranks_of(mesh), example, mode="inference", constraints=constraints, stages=stages)
    other = prompt_of(of, 7, seed=2)[0]
    same = [torch.equal(greedy(alone, p, COUNT), greedy(pm, p, COUNT)) for p in (example[0], other, example[0])]
    caches = {name: b for name, b in pm.named_buffers() if name.endswith("cache.k")}
    here = {tuple(b.to_local().shape if isinstance(b, DTensor) else b.shape) for b in caches.values()}
    worst = max(
        float((_whole(b) - dict(alone.named_buffers())[name]).abs().max()) for name, b in caches.items()
    )
    return {"same": same, "caches": here, "worst": worst, "captures": pm._autopar.programs.captures}


def _whole(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.full_tensor() if isinstance(buffer, DTensor) else buffer


class Counts(nn.Module):
    """Two layers, each with sums of what it has seen, of which a call without ``both`` leaves one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for name in ("a", "b"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        """Return ``x`` of ``[rows, 8]`` after both layers and what they have seen."""
        x = self.first(x)
        self.a.add_(x.sum(0))
        x = self.second(x + self.a)
        if both:
            self.b.add_(x.sum(0))
            x = x + self.b
        return x


def left_alone() -> list[float]:
    """Call a pipeline with programs that read a buffer, leave it alone, and read it again; the differences."""
    model = Counts().double().eval()
    alone = copy.deepcopy(model)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pm = autopar.parallelize(model, 2, x, mode="inference", stages=2, cuts=["second"])
    calls = [(x, True), (x, False), (x[:2], True), (x[:3], False), (x, True), (x[:3], True)]
    with torch.no_grad():
        return [float((pm(rows, both) - alone(rows, both)).abs().max()) for rows, both in calls]
