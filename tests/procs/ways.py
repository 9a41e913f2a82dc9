"""What one rank does in the tests of branches on data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from procs.habits import said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Clamps(nn.Module):
    """Clamps where something is large, and looks at its labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 6)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 6:
            raise ValueError("labels must be below 6")
        if labels.min() >= 0:
            x = x * 1.5
        h = self.mid(self.up(x).relu()).relu()
        if (h > 1e3).any():
            h = h.clamp(max=1e3)
        return nn.functional.cross_entropy(self.down(h), labels)


def batch(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, dtype=torch.float64, generator=g) * scale
    return x, torch.randint(0, 6, (4,), generator=g)


def taken(**options: Any) -> tuple[float, str, str, float, float]:
    """Of two losses the difference to one process; what is said where a call, and one in eval mode, goes another way;
    the difference of a call after that; and of one of another shape."""
    model = Clamps()
    alone = copy.deepcopy(model)
    devices = 2 if "stages" in options else init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    pm = autopar.parallelize(model, devices, batch(0), **options)

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        if "stages" in options:
            return pm.train_step(*inputs)
        return pm(*inputs)

    def off(*inputs: torch.Tensor) -> float:
        return abs(float(loss(*inputs).detach()) - float(alone(*inputs).detach()))

    first = max(off(*batch(0)), off(*batch(1)))
    train = said(lambda: loss(*batch(2, 1e7)))
    if "stages" in options:  # a pipeline ends with a step that breaks off
        return first, train, train, 0.0, 0.0
    again = off(*batch(3))
    pm.eval()
    evaluated = said(lambda: loss(*batch(2, 1e7)))
    then = off(*batch(3))
    pm.train()
    x, labels = batch(4)
    smaller = said(lambda: loss(x[:2] * 1e7, labels[:2]))  # other shapes go the ways of the example, too
    assert "branches on data in '<model>' at ways.py:" in smaller, smaller
    return first, train, evaluated, max(again, then), max(off(x[:3], labels[:3]), off(x[:2], labels[:2]))


def all_cuts(cuts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {how: taken(**options) for how, options in cuts.items()}
