"""Plans of stages are shared: where a plan that is as good as free of a limit fits, nothing is solved again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.planner.inter_op.exact import stage_plans
from autopar.planner.inter_op.exact.stage_plans import StagePlans
from autopar.planner.intra_op.mesh_plan import Options
from autopar.plans.plan import StagePlan
from autopar.plans.stage_graphs import cut
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


def test_a_plan_that_no_limit_slows_down_serves_wherever_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    graph = capture(model, (torch.zeros(64, 64),)).graph
    solved: list[float | None] = []
    plan_graph = stage_plans.plan_graph

    def counted(*args: object, **kwargs: object) -> StagePlan:
        solved.append(args[3].memory_limit_bytes)  # type: ignore[attr-defined]
        return plan_graph(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_plans, "plan_graph", counted)
    plans = StagePlans(load_cluster("dgx-h100"))
    mesh, devices = Mesh.of(data=2), (0, 1)
    asked = Options(microbatches=8, in_flight=4, memory_limit_bytes=2.0**30)
    free = plans.plan(graph, mesh, asked, devices)
    assert len(solved) == 1
    exactly = float(free.price.memory_bytes)

    for in_flight in (4, 3, 1):
        alike = plans.plan(graph, mesh, replace(asked, in_flight=in_flight, memory_limit_bytes=exactly), (2, 3))
        assert len(solved) == 1, "another limit was solved for what fits it as it is"
        assert alike.price == free.with_in_flight(in_flight).price
        assert alike.in_flight == in_flight and alike.devices == (2, 3)
        assert alike.solution is not None and alike.solution.status == "optimal"

    smaller = plans.plan(graph, mesh, replace(asked, memory_limit_bytes=exactly - 1), devices)
    assert len(solved) == 2 and smaller.price.memory_bytes < exactly


class Twins(nn.Module):
    """Two blocks that differ in their names alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.one, self.other = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.one(self.first(x)))).square().mean()


@pytest.mark.parametrize("factor, programs", [("n", 1), ("k", 2)])
def test_stages_whose_pins_are_alike_are_planned_once(
    monkeypatch: pytest.MonkeyPatch, factor: str, programs: int
) -> None:
    """Pins name modules, and no two stages have the same: what counts is what they pin, and where."""
    graph = capture(Twins(), (torch.zeros(64, 64),)).graph
    ops = [node for _, node in graph.of_kind("op")]
    starts = [next(n.name for n in ops if n.module.startswith(name)) for name in ("one", "other", "last")]
    _, one, other, _ = cut(graph, starts)
    solved: list[str] = []
    plan_graph = stage_plans.plan_graph

    def counted(*args: object, **kwargs: object) -> StagePlan:
        solved.append("a program")
        return plan_graph(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_plans, "plan_graph", counted)
    plans, mesh = StagePlans(load_cluster("dgx-h100")), Mesh.of(tensor=2)
    made = [
        plans.plan(stage.graph, mesh, Options(constraints={f"{name}.0": {"tensor": how}}), (0, 1))
        for stage, name, how in ((one, "one", "n"), (other, "other", factor))
    ]  # fmt: skip
    assert len(solved) == programs
    assert set(made[1].ops) == {n.name for _, n in other.graph.of_kind("op")}
    first = [stage.graph.of_kind("op")[0][1].name for stage in (one, other)]
    assert [plan.ops[name] for plan, name in zip(made, first, strict=True)] == [("n",), (factor,)]
