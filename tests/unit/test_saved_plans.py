"""Plans of ``autopar.plan`` are saved with the graph that they are for, which they remember."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import planfile
from autopar.capture import Captured
from autopar.errors import PlanError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - x).square().mean()


BATCH = (torch.zeros(8, 8),)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return autopar.capture(Net(), BATCH)


@pytest.mark.parametrize("how", [{"like": "tp=2,m=4"}, {"mesh": "data=2", "microbatches": 4}], ids=["layout", "mesh"])
def test_a_plan_of_microbatches_is_saved_with_its_own_graph(
    captured: Captured, how: dict[str, Any], tmp_path: Path
) -> None:
    """The whole batch's graph was taken for a microbatch's: a KeyError, or the names of other options."""
    plan = autopar.plan(Net(), "local-x2", BATCH, captured=captured, **how)
    assert plan.microbatches == 4 and plan.graph is not None and plan.graph is not captured.graph
    planfile.save(tmp_path / "plan.json", plan, captured.graph)
    assert planfile.dumps(plan) == (tmp_path / "plan.json").read_text(encoding="utf-8")
    again = planfile.load(tmp_path / "plan.json", plan.graph)
    assert again == plan and planfile.dumps(again) == planfile.dumps(plan)
    with pytest.raises(PlanError, match=f"a microbatch, 4 of which make up a step, .*{captured.graph.fingerprint}"):
        planfile.load(tmp_path / "plan.json", captured.graph)


def test_a_plan_without_its_graph_is_refused(captured: Captured) -> None:
    plan = autopar.plan(Net(), "local-x2", BATCH, captured=captured, mesh="data=2", microbatches=2)
    elsewhere = pickle.loads(pickle.dumps(plan))
    assert elsewhere == plan and elsewhere.graph is None
    for given, text in ((captured.graph, captured.graph.fingerprint), (None, "no graph is given")):
        with pytest.raises(PlanError, match=f"{plan.fingerprint}, one of 2 microbatches.*{text}"):
            planfile.dumps(elsewhere, given)
