"""Ways in which rows travel to their experts: names, prices, refusals, and the recount of programs that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from skewed_experts import deepseek, mixtral

import autopar
from autopar import planfile
from autopar.certificate.recount import Report, check
from autopar.comparison.program_vs_eager import verify
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.lower.emit import lower
from autopar.lower.steps.nodes import calls_outside
from autopar.planner.intra_op.building.price import pricer
from autopar.plans.plan import Plan
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_in_plan
from autopar.words.exchanges import RowExchange, exchange_of, exchange_written, exchanges_along, without_exchange
from autopar.words.meshes import Mesh
from cost_models.chunked_exchange import ChunkedExchange
from hardware_profiles import load_cluster


def planned(make: Any, mesh: str, pins: dict[str, str]) -> tuple[Any, Plan, Any, dict[str, Any], torch.nn.Module]:
    model, kwargs = make()
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    cluster = load_cluster("local-x4" if "," in mesh else "local-x2")
    constraints = {"*expert_block*": pins} if pins else None
    plan = autopar.plan(
        model, cluster, (), example_kwargs=kwargs, captured=captured, mesh=mesh, constraints=constraints
    )
    return captured, plan, cluster, kwargs, model


def recounted(make: Any, mesh: str, pins: dict[str, str]) -> tuple[Plan, Report]:
    """The plan with these pins, its recount, and its numbers those of one device."""
    captured, plan, cluster, kwargs, model = planned(make, mesh, pins)
    report = check(plan.stages[0], captured.graph, cluster, types=True)
    assert report.ok, report.failures
    assert report.price.seconds == pytest.approx(plan.stages[0].price.seconds, rel=1e-3)
    for row in verify(captured, model, (), kwargs, plan.stages[0].mesh, cluster, plan=plan):
        assert row.worst < 1e-9, row
    return plan, report


def test_names() -> None:
    assert exchange_of("travel+/4@1.5") == (True, RowExchange((), 4, 1.5))
    assert exchange_of("h*2") == (False, RowExchange(()))
    assert without_exchange("travel+/4@max") == "travel" and exchange_written("tensor*64") == ""
    assert exchanges_along(["data", "tensor+/2"]) == [RowExchange(("data", "tensor"), 2)]
    assert exchanges_along(["data", "tensor/2"]) == [RowExchange(("data",)), RowExchange(("tensor",), 2)]
    assert RowExchange((), 2, 1.5).rows_to_each(64, 4) == 12
    assert RowExchange((), 1, float("inf")).rows_to_each(64, 4) == 64


def test_first_and_last_chunk_are_waited_for() -> None:
    """Of exchanges that are shorter than the products one part each; of longer ones all but the products."""
    assert ChunkedExchange(8, 8, 4).forward(100) == 100 + 2 + 2
    assert ChunkedExchange(80, 80, 4).forward(40) == 80 + 80
    assert ChunkedExchange(8, 6, 1).forward(100, 5, 9) == max(8, 5) + 100 + max(6, 9)
    assert ChunkedExchange(8, 6, 2).backward(100) == 100 + 3 + 4
    assert ChunkedExchange(8, 8, 4).forward(100, beside_there=2) == 100 + 2 + 2
    assert ChunkedExchange(8, 8, 4, beyond=5).forward(100, beside_back=3) == 100 + 2 + 2 + 5
    assert ChunkedExchange(8, 8, 4).waits(100) == (2, 2)


@pytest.mark.parametrize(
    ("way", "exchanges"), [("travel/2", 2), ("travel@max", 1), pytest.param("travel/2@2", 2, marks=pytest.mark.slow)]
)
def test_programs_are_recounted(way: str, exchanges: int) -> None:
    """Collectives of a layer: the counts, and for each chunk two tensors there, one back, and gradients of both."""
    _, report = recounted(mixtral, "expert=2", {"expert": way})
    layers, floats = 2, 4
    assert report.collectives["expert", "all_to_all"] == layers * (1 + exchanges * floats)


@pytest.mark.parametrize("way", ["travel+", pytest.param("travel+/2", marks=pytest.mark.slow)])
def test_two_axes_in_one_exchange(way: str) -> None:
    plan, report = recounted(deepseek, "data=2,tensor=2", {"data": "travel", "tensor": way})
    assert {axis for axis, kind in report.collectives if kind == "all_to_all"} == {"data+tensor"}
    gate = next(choice for name, choice in plan.stages[0].params.items() if "experts.gate_up_proj" in name)
    assert gate.used.text == "S0,S0"  # no gradient of an expert is reduced over ranks that all have other experts


def test_chunks_are_chosen_where_they_are_cheaper() -> None:
    """By price: with small tensors latency counts and one exchange is made; with large ones products hide the rest."""
    _, plan, _, _, _ = planned(mixtral, "expert=2", {"expert": "travel"})
    captured, _, _, _, _ = planned(mixtral, "expert=2", {})
    graph, mesh = captured.graph, Mesh.of(expert=2)
    priced = pricer(load_cluster("local-x2"), mesh)
    i, node = next((i, n) for i, n in graph.of_kind("op") if n.target == "autopar.expert_block.default")
    rule = rules_of(graph)[i]
    assert rule is not None
    seconds = {
        way: sum(priced.op(graph, node, rule, strategy_in_plan(graph, node, rule, (way,), mesh)))
        for way in ("travel", "travel/2", "travel@2", "travel@max")
    }
    assert seconds["travel"] < seconds["travel/2"]  # latency
    assert seconds["travel@2"] == seconds["travel@max"] > seconds["travel"]  # of two ranks, twice a half is all
    assert plan.stages[0].ops[node.name] == ("travel",)


@pytest.mark.parametrize(
    ("mesh", "pins", "said"),
    [
        ("expert=2", {"expert": "travel/3"}, "no op there has factor 'travel/3'"),
        ("expert=2", {"expert": "travel+"}, "no strategy"),
        ("data=2,tensor=2", {"data": "travel/2", "tensor": "travel"}, "no strategy"),
        ("data=2,tensor=2", {"data": "travel", "tensor": "travel/2"}, "no strategy"),  # one expert on each rank
        ("data=2,tensor=2", {"data": "travel", "tensor": "travel@2"}, "no strategy"),
    ],
)
def test_what_cannot_be_exchanged_so(mesh: str, pins: dict[str, str], said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        planned(mixtral, mesh, pins)


def test_plan_files_have_the_ways_and_refuse_wrong_ones(tmp_path: Any) -> None:
    captured, plan, _, _, _ = planned(deepseek, "data=2,tensor=2", {"data": "travel", "tensor": "travel+/2"})
    path = tmp_path / "plan.json"
    planfile.save(path, plan, captured.graph)
    (stage,) = planfile.load(path, captured.graph).stages
    assert stage.ops == plan.stages[0].ops
    text = path.read_text().replace("travel+/2", "travel@2")
    assert text != path.read_text()
    path.write_text(text)
    with pytest.raises(PlanError, match=r"of several exchanges none is bounded; make one of them \('travel\+'\)"):
        planfile.load(path, captured.graph)


def test_bounds_need_no_host() -> None:
    """A bounded exchange can be recorded; others not, and compiled programs break at both."""
    for way, n in (("travel", 1), ("travel/2@max", 0)):
        captured, plan, _, _, _ = planned(mixtral, "expert=2", {"expert": way})
        program = lower(captured.graph, plan.stages[0])
        assert len(calls_outside(program, recorded=True)) == 2 * n and len(calls_outside(program)) == 2


def test_nobody_is_given_a_bound_unasked() -> None:
    with pytest.raises(InfeasibleError):
        planned(mixtral, "expert=2", {"expert": "travel+@2"})
    _, plan, _, _, _ = planned(mixtral, "expert=2", {})
    assert not any("@" in name for names in plan.stages[0].ops.values() for name in names)
