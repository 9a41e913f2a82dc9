"""Prices of stages with fused kernels are those of the programs, though blocks that are alike start other kernels."""

import torch
from torch import nn

import autopar
from autopar.certificate import check
from autopar.plans.stage_graphs import cut
from hardware_profiles import load_cluster


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_stage_begins_with_a_norm() -> None:
    model, x = nn.Sequential(*(Block() for _ in range(6))), torch.randn(16, 32)
    captured = autopar.capture(model, (x,), loss_fn=lambda out: out.square().mean())
    cluster = load_cluster("dgx-h100@0-1 as nemo")
    plan = autopar.plan(
        model, cluster, (x,), captured=captured, stages=2, microbatches=1, cuts=["2"], schedule="1f1b", mesh={"data": 1}
    )
    for stage, part in zip(plan.stages, cut(captured.graph, plan.starts), strict=True):
        report = check(stage, part.graph, cluster, tolerance=1e-4)
        assert report.ok, report.failures
