"""A constraint that names one expert of a loop is told of the op that the loop became."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import PlanError


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, k = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            out[rows] += share[rows, k, None] * expert(x[rows])
        return out.square().mean()


def test_the_op_is_named() -> None:
    with pytest.raises(PlanError, match=r"'experts\.\*\.up' matches no op; .* a loop over experts is one op: .*expert"):
        autopar.plan(Experts(), "local-x2", torch.randn(16, 8), mesh={"t": 2}, constraints={"experts.*.up": {"t": "n"}})
