"""One group of all devices goes from a bound to its exact plan; bounds hold, and what they exclude is not planned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from meta_models import gpt2_in_parts
from zoo import ZOO

from autopar.capture import capture
from autopar.comparison import program_vs_eager as V
from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op import stage_search
from autopar.planner.inter_op.candidates import Candidate
from autopar.planner.inter_op.estimating.block_costs import Menus
from autopar.planner.inter_op.exact.memory_shares import counted_in_flight, extra_bytes, share_of
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.inter_op.single_stage import least_seconds
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.within_memory import OutOfReach
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import cut, stage_edges_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import whole_state
from cost_models.schedules import build, live_at_peak, live_per_stage
from hardware_profiles import load_cluster

ROWS, DEVICES = 4, 4


@cache
def graphs() -> dict[int, Graph]:
    """A small GPT-2 with many words, which its head and its embedding share, by number of microbatches."""
    return gpt2_in_parts(ROWS, 128, vocab_size=16384, n_embd=256, n_layer=3, n_head=4)


def test_one_group_goes_from_its_bound_to_the_exact_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, sizes, planned = load_cluster("dgx-h100"), set(), []
    real_ways, real_exact = Menus.of, OneNumber.exact

    def ways(self: Menus, block: Any, mesh: Any, devices: Any) -> Any:
        sizes.add(mesh.n_devices)
        return real_ways(self, block, mesh, devices)

    def exact(self: Any, candidate: Any, *rest: Any, **more: Any) -> Any:
        planned.append((self, candidate.groups, [p.seconds for p in plans]))
        plan = real_exact(self, candidate, *rest, **more)
        plans.extend([plan] if plan is not None else [])
        return plan

    plans: list[Any] = []
    monkeypatch.setattr(Menus, "of", ways)
    monkeypatch.setattr(OneNumber, "exact", exact)
    best = plan_pipeline(graphs(), cluster, DEVICES, PipelineOptions(1)).plan
    assert DEVICES not in sizes, "blocks are estimated for pipelines alone"
    for m, graph in graphs().items():
        for mesh in (Mesh.of(data=4), Mesh.of(data=2, tensor=2), Mesh.of(tensor=4)):
            alone = plan_graph(graph, cluster, mesh, Options(microbatches=m))
            assert best.seconds <= alone.price.seconds * (1 + 1e-6), (m, mesh)
    for search, groups, before in planned:
        if groups == 1 and before:
            assert least_seconds(search) < min(before), "what the bound excludes is not planned"


@pytest.mark.slow
def test_no_plan_is_faster_than_the_bound() -> None:
    cluster = load_cluster("dgx-h100")
    least = []
    for m, graph in graphs().items():
        bound = least_seconds(OneNumber(graph, cluster, DEVICES, PipelineOptions(m), ""))
        for groups in (1, 2):
            try:
                asked = PipelineOptions(m, groups=groups)
                seconds = plan_pipeline(graph, cluster, DEVICES, asked).plan.seconds
            except stage_search.PlanError:
                continue
            assert 0 < bound <= seconds, (m, groups)
        least.append(bound)
    assert least == sorted(least), "smaller microbatches take no less time"


def test_a_stage_leaves_other_outputs_of_the_model_in_pieces() -> None:
    """Logits of a stage whose loss is made by the next one: gathering them takes longer than the stage."""
    case = ZOO["gpt2"]()
    captured = V.promoted(capture(case.model, case.args, case.kwargs))
    graph = captured.graph
    (loss,) = (graph.nodes[graph.outputs[graph.loss].node].name,)  # type: ignore[union-attr,index]
    stages = cut(graph, [loss])
    mesh = Mesh.of(data=2)
    plans = tuple(
        plan_graph(s.graph, load_cluster("local-x4"), mesh, Options(), devices=(2 * s.number, 2 * s.number + 1))
        for s in stages
    )
    assert len(stages[0].outputs) == 1 and plans[0].outputs[-1] != whole_state(mesh, True)
    plan = Plan(graph.fingerprint, "", plans, build("1f1b", 2, 2, 1), stage_edges_of(stages))
    weights, buffers = (V.doubled(values) for values in V.state_of(captured, case.model))
    batches = [V.doubled(V.inputs_of(captured, case.args, case.kwargs))]
    alone = replace(
        plan, stages=(V.one_device(cut(graph, [])[0].graph),), schedule=build("1f1b", 1, 1, 1), stage_edges=()
    )
    mine, reference = (V.train_pipeline(captured, p, weights, buffers, batches, 1) for p in (plan, alone))
    assert V.compare("", mine, reference).worst < 1e-9


def test_stages_that_take_all_of_their_shares_fit_together() -> None:
    """A stage that keeps one microbatch when its group is fullest, and many at another moment, gets no share for the
    one: it would keep so much of it that the group were fullest then."""
    for groups, degree, microbatches in ((16, 2, 64), (8, 2, 32), (4, 3, 16)):
        n_stages = groups * degree
        schedule = build("zb-h1", n_stages, groups, microbatches)
        estimates = ((9.0, 1.4),) * (n_stages - 1) + ((9.2, 1.2),)
        live = live_at_peak(schedule, [kept for _, kept in estimates])
        counted = counted_in_flight(live, live_per_stage(schedule))
        way = Candidate((Mesh.of(data=1),) * groups, ((0,),) * groups, "zb-h1", (), 0.0, estimates)
        for of_group in schedule.stages_of_rank:
            needed = sum(estimates[s][0] + live[s] * estimates[s][1] for s in of_group)
            shares = {s: share_of(s, of_group, live, counted, way) for s in of_group}
            kept = [0.0] * n_stages
            for s in of_group:
                kept[s] = (shares[s] * needed - estimates[s][0]) / counted[s]
            fullest = live_at_peak(schedule, kept)
            total = sum(estimates[s][0] + fullest[s] * kept[s] for s in of_group)
            assert total <= 1.1 * needed, (groups, of_group)


def test_no_stage_gets_less_than_its_estimate_by_more_than_a_part() -> None:
    """Six stages a group, which need nearly the same: shares that were rounded up left half of its need to the last."""
    schedule = build("interleaved-1f1b", 96, 16, 32)
    estimates = ((3.35, 0.35),) + ((3.27, 0.35),) * 95
    live = live_at_peak(schedule, [kept for _, kept in estimates])
    counted = counted_in_flight(live, live_per_stage(schedule))
    way = Candidate((Mesh.of(data=1),) * 16, ((0,),) * 16, "interleaved-1f1b", (), 0.0, estimates)
    for of_group in schedule.stages_of_rank:
        needs = {s: estimates[s][0] + live[s] * estimates[s][1] for s in of_group}
        shares = {s: share_of(s, of_group, live, counted, way) for s in of_group}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(shares[s] > needs[s] / sum(needs.values()) - 1 / 48 for s in of_group), (needs, shares)


def test_what_a_group_needs_once_is_counted_once() -> None:
    """While one of seven stages works, the six others do not: each may fill beside its share what is there only then,
    and together they fit."""
    of_group = tuple(range(7))
    persistent, kept, once, memory = 3.0, 0.1, 4.9, 7 * 4.0 * 2**30
    n_bytes = ((persistent + once / 7, kept),) * 7
    scaled = tuple((static * 2**30, k * 2**30) for static, k in n_bytes)
    way = Candidate(
        (Mesh.of(data=1),), ((0,),), "interleaved-1f1b", (), 0.0, scaled, once_bytes=(once * 2**30,) * 7
    )  # fmt: skip
    live = (3,) * 7
    limits = [share_of(s, of_group, live, live, way) * memory + extra_bytes(s, of_group, way) for s in of_group]
    lasting = [limit - once * 2**30 for limit in limits]
    needed = (persistent + 3 * kept) * 2**30 - EFFORT.memory_step
    assert all(n >= needed for n in lasting), "each has room for what it was estimated to need, but for rounding"
    assert sum(lasting) + once * 2**30 <= memory * (1 + 1e-9), "and all of them, one of which works, fit"
    alone = replace(way, n_bytes=scaled[:1], once_bytes=way.once_bytes[:1])
    assert extra_bytes(0, (0,), alone) == 0.0, "a stage that has its group for itself has all of it in its share"


def test_where_a_search_finds_nothing_it_looks_closer_at_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search takes for hopeless is planned once more, down to the smallest plan, before it says that nothing
    fits; and then the error has what that needs."""
    real = OneNumber.exact

    def exact(self: OneNumber, candidate: Candidate, *rest: Any, explains: bool = False, **more: Any) -> Any:
        if not explains:
            raise OutOfReach("no plan fits")
        return real(self, candidate, *rest, explains=explains, **more)

    monkeypatch.setattr(OneNumber, "exact", exact)
    cluster, asked = load_cluster("dgx-h100"), PipelineOptions(1, groups=1)
    found = plan_pipeline(graphs(), cluster, DEVICES, asked)
    assert found.plan.microbatches == ROWS, "of the most microbatches"
    little = replace(asked, options=Options(memory_limit_bytes=2**20))
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        plan_pipeline({1: graphs()[1]}, cluster, DEVICES, little)
