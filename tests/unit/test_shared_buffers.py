"""A buffer that stages on the same devices read is stored in one way there, by plans of the planner and of files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar import planfile
from autopar.capture import Captured, capture
from autopar.errors import PlanError
from autopar.planner import planning
from autopar.plans.plan import Plan
from autopar.plans.request import request_of
from autopar.runtime.pipelines.schedule_check import check_buffers
from autopar.words.placements import State
from hardware_profiles import load_cluster


class Scaled(nn.Module):
    """Four layers that read one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8, 16))
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return x.square().mean()


@pytest.fixture(scope="module")
def planned() -> tuple[Captured, Plan]:
    captured, cluster = capture(Scaled(), (torch.rand(8, 16),), {}), load_cluster("local-x4")
    plan_options = request_of(
        {
            "microbatches": 4, "schedule": "interleaved-1f1b", "stages": 2, "mesh": "d=2",
            "cuts": ["layers.1", "layers.2", "layers.3"],
            "constraints": {"layers.0": {"d": "b"}, "layers.1": {"d": "b"}, "layers.2": {"d": "n"}},
        }
    )  # fmt: skip
    return captured, planning.find(nn.Identity(), captured, tuple, cluster, 4, plan_options).plan


def test_the_planner_has_stages_on_the_same_devices_agree(planned: tuple[Captured, Plan]) -> None:
    captured, plan = planned
    assert plan.schedule.stages_of_rank == ((0, 2), (1, 3))
    cuts = [plan.stages[s].ops[captured.graph.nodes[captured.graph.index[mul]].name]
            for s, mul in ((0, "mul"), (2, "mul_2"))]  # fmt: skip
    assert cuts[0] != cuts[1], "one reads rows of the buffer, the other columns"
    for of_group in plan.schedule.stages_of_rank:
        assert len({plan.stages[s].buffers["scale"] for s in of_group}) == 1
    check_buffers(plan, {"scale"})
    assert planfile.loads(planfile.dumps(plan, captured.graph), captured.graph) == plan


def test_stages_that_differ_are_refused(planned: tuple[Captured, Plan]) -> None:
    plan = planned[1]
    in_rows = replace(plan.stages[2], buffers={"scale": State.of("S0")})
    differing = replace(plan, stages=(*plan.stages[:2], in_rows, plan.stages[3]))
    with pytest.raises(PlanError, match=r"buffer 'scale' .* stage 0 as R, stage 2 as S0; .* 'buffers'"):
        check_buffers(differing, {"scale"})
    check_buffers(differing, set())  # a tensor that the model's code makes is each stage's own
