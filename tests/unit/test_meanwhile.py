"""Shared experts beside rows that travel: the order of a program, what it hides of a price, and the recount of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from skewed_experts import deepseek, mixtral
from written_experts import HIDDEN, LAYERS, ROWS

import autopar
from autopar.certificate.recount import check
from autopar.comparison.program_vs_eager import verify
from autopar.lower import emit
from autopar.lower.emit import lower
from autopar.planner.intra_op.building import hidden_seconds as module
from autopar.rules.experts.expert_block import rows_computed, rows_leave, rows_return, travelling_block
from hardware_profiles import load_cluster

TRAVEL = {"*expert_block*": {"expert": "travel"}}
aten = torch.ops.aten


def written(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    x, y = (torch.randn(4, ROWS // 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    return LAYERS[name]().double(), {"x": x, "y": y}


def planned(model: torch.nn.Module, kwargs: dict[str, Any], mesh: str = "expert=2", **options: Any) -> Any:
    """The captured model, its plan and the cluster; experts of other ranks are reached by rows that travel."""
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    cluster = load_cluster("local-x4" if "," in mesh else "local-x2")
    plan = autopar.plan(
        model, cluster, (), example_kwargs=kwargs, captured=captured, mesh=mesh, constraints=TRAVEL, **options
    )
    return captured, plan, cluster


def events(program: Any) -> list[str]:
    """Products and the parts of blocks, in order."""
    names = {
        rows_leave: "leave", rows_computed: "experts", rows_return: "return", travelling_block: "block",
        aten.linear.default: "product",
    }  # fmt: skip
    return [names[n.target] for n in program.module.graph.nodes if n.target in names]


@pytest.mark.parametrize("name", ["SharedExpert", "SharedExpertFirst"])
def test_products_of_the_shared_expert_stand_between_the_parts(name: str) -> None:
    model, kwargs = written(name)
    captured, plan, cluster = planned(model, kwargs)
    order = events(lower(captured.graph, plan.stages[0]))
    leave, experts, back = (order.index(part) for part in ("leave", "experts", "return"))
    assert "product" in order[leave:experts] and "product" in order[experts:back]
    assert order.index("product") < leave  # the router
    for row in verify(captured, model, (), kwargs, plan.stages[0].mesh, cluster, plan=plan):
        assert row.worst < 1e-9, row


def test_nothing_changes_where_nothing_stands_beside() -> None:
    captured, plan, _ = planned(*mixtral())
    assert "block" in events(lower(captured.graph, plan.stages[0]))


@pytest.mark.parametrize("mesh", ["expert=2", pytest.param("expert=2,tensor=2", marks=pytest.mark.slow)])
def test_the_price_is_less_by_what_is_hidden(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = deepseek()
    captured, plan, cluster = planned(model, kwargs, mesh)
    [stage] = plan.stages
    report = check(stage, captured.graph, cluster, types=True)
    assert report.ok, report.failures
    assert report.price.activation_seconds == pytest.approx(stage.price.activation_seconds, rel=2e-3)
    monkeypatch.setattr(module, "beside", lambda *_: [])
    monkeypatch.setattr(emit, "beside", lambda *_: [])
    _, alone, _ = planned(model, kwargs, mesh)
    recounted = check(alone.stages[0], captured.graph, cluster)
    saved = alone.stages[0].price.seconds - stage.price.seconds
    assert saved > 0.01 * stage.price.seconds
    assert recounted.price.seconds - report.price.seconds == pytest.approx(saved, rel=0.02)
    assert report.kept_bytes == recounted.kept_bytes


@pytest.mark.slow
def test_what_runs_again_takes_its_own_beside_it_alone() -> None:
    """A region under activation checkpointing has the whole layer, and its second forward hides as much as the first;
    where it has the experts alone, the shared one runs at another time."""
    model, kwargs = deepseek()
    captured, whole, cluster = planned(model, kwargs, recompute=["model.layers.1"])
    assert "leave" in events(lower(captured.graph, whole.stages[0]))
    report = check(whole.stages[0], captured.graph, cluster)
    assert report.ok, report.failures
    for row in verify(captured, model, (), kwargs, whole.stages[0].mesh, cluster, plan=whole):
        assert row.worst < 1e-9, row
    captured, part, _ = planned(copy.deepcopy(model), kwargs, recompute=["model.layers.1.mlp.experts"])
    assert "block" in events(lower(captured.graph, part.stages[0]))


def test_what_a_shared_expert_communicates_stands_outside() -> None:
    """Cut along its features, all that it reads is gathered before rows set out, and its sum is made behind them."""
    model, kwargs = deepseek()
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    cluster = load_cluster("local-x2")
    features = {"*shared_experts.gate_proj*": "n", "*shared_experts.up_proj*": "n", "*shared_experts.down_proj*": "k"}
    pins = {**TRAVEL, **{name: {"expert": factor} for name, factor in features.items()}}
    plan = autopar.plan(model, cluster, (), example_kwargs=kwargs, captured=captured, mesh="expert=2", constraints=pins)
    order = events(lower(captured.graph, plan.stages[0]))
    leave, back = order.index("leave"), order.index("return")
    assert order[leave:back].count("product") == 3
    report = check(plan.stages[0], captured.graph, cluster, types=True)
    assert report.ok, report.failures
    for row in verify(captured, model, (), kwargs, plan.stages[0].mesh, cluster, plan=plan):
        assert row.worst < 1e-9, row
