"""Integers that a histogram counts: what models write for GPUs, and on the meta device, has no kernel on CPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.certificate import check
from autopar.rules.families.histogram import HISTC_OF_INTEGERS
from hardware_profiles import load_cluster


class Balanced(nn.Module):
    """A router with a loss that balances it, as transformers' mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        picked = shares.topk(2, dim=-1).indices.reshape(-1)
        dtype = torch.float32 if x.device.type == "cpu" else torch.int32
        counts = torch.zeros(4, device=x.device) + torch.histc(picked.to(dtype), bins=4, min=0, max=4)
        return (counts * shares.sum(0)).sum()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_counted_on_cpus(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0, 3, 1, 3, 2, 7], dtype=dtype)
    counted = torch.ops.autopar.histc_of_integers(numbers, 4, 0, 3)
    assert counted.dtype == dtype and counted.tolist() == [1, 1, 1, 2]


def test_a_plan_of_a_model_without_memory_is_certified() -> None:
    with torch.device("meta"):
        model, x = Balanced(), torch.empty(16, 8)
    captured = autopar.capture(model, (x,))
    assert HISTC_OF_INTEGERS in {node.target for node in captured.graph.nodes}
    plan = autopar.plan(model, "local-x2", (x,), mesh="data=2", constraints={"*:histc*": {"data": "b"}})
    assert check(plan.stages[0], captured.graph, load_cluster("local-x2"), types=True).ok
