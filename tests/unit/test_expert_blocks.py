"""Routed experts as one operator: rows that travel to their experts, on many ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo_wide import WIDE

import autopar
from autopar.certificate.recount import check
from autopar.verify import verify
from hardware_profiles import load_cluster


def skewed(name: str) -> Any:
    """A model of the zoo whose router prefers one expert, so that others have no rows."""
    case = WIDE[name]()
    with torch.no_grad():
        for path, param in case.model.named_parameters():
            if "router" in path or path.endswith("gate.weight"):
                param[0] *= 30
                param[1:3] *= 0.01
    return case


@pytest.mark.parametrize("mesh", [
    pytest.param("expert=2", marks=pytest.mark.slow), pytest.param("expert=4", marks=pytest.mark.slow),
    pytest.param("data=2,expert=2", id="2x2"),
])
def test_rows_travel(mesh: str) -> None:
    case = skewed("mixtral_batched")
    captured = autopar.capture(case.model, case.args, example_kwargs=case.kwargs)
    ranks = 4 if mesh != "expert=2" else 2
    cluster = load_cluster(f"local-x{ranks}")
    plan = autopar.plan(
        case.model, cluster, case.args, example_kwargs=case.kwargs, captured=captured, mesh=mesh,
        constraints={"*:expert_block*": {"expert": "travel"}},
    )  # fmt: skip
    [stage] = plan.stages
    report = check(stage, captured.graph, cluster, types=True)
    assert report.ok, report.failures
    assert report.collectives["expert", "all_to_all"] == 2 * 5  # counts, rows there and back, and their gradients
    for row in verify(captured, case.model, case.args, case.kwargs, stage.mesh, cluster, plan=plan):
        assert row.worst < 1e-9, row
