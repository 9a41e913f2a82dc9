"""Cuts over many devices: simulated before they are planned, looked for with the commonest blocks first."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import meta_models
import pytest
import torch

from autopar.capture.microbatches import resized
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.estimating.block_costs import BlockPlans, Menus, evenly_cut
from autopar.planner.inter_op.estimating.equal import Equal
from autopar.planner.inter_op.estimating.estimates import EstimatedCut, Group
from autopar.planner.inter_op.estimating.filling import Filled, Fillers
from autopar.planner.inter_op.estimating.simulated_estimate import best, simulated
from autopar.planner.inter_op.exact import stage_plans
from autopar.planner.inter_op.exact.exact_stages import spread_out
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.inter_op.simulating.timing import OnceAStep
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.building.integer_program import Beaten
from autopar.planner.intra_op.mesh_plan import Options, PlansByMemory, repriced
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.schedules import Edge, Fill, build, fill_of, simulate, times
from hardware_profiles import load_cluster

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-1f1b:3", "zb-h1", "zb-h1:4", "zb-v")


@cache
def llama(rows: int = 4) -> Graph:
    return meta_models.llama(
        rows, 512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, vocab_size=4096
    )


def wide_llama(rows: int) -> Graph:
    """Of long rows, so that devices do more than launch operators."""
    return meta_models.llama(
        rows, 2048, torch.bfloat16, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
        num_attention_heads=32, vocab_size=4096,
    )  # fmt: skip


def random_cut(rng: random.Random, schedule: str, groups: int) -> EstimatedCut:
    chunks = fill_of(schedule).chunks
    stages = []
    for _ in range(groups * chunks):
        forward, inputs, weights = (rng.uniform(0.9, 1.3) for _ in range(3))
        once = {f"{what}_seconds": rng.uniform(0, 1) for what in ("gather", "reduction", "optimizer")}
        stages.append(Filled(forward + inputs + weights, 1.0, 0, forward, weights, **once))
    places = tuple(Group(Mesh.of(data=1), (g,)) for g in range(groups))
    stage_edge = tuple(rng.uniform(0, 0.2) for _ in stages[1:])
    return EstimatedCut(places, fill_of(schedule), tuple(range(1, len(stages))), tuple(stages), stage_edge, 0.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_microbatches_are_carried_on_from_fewer(schedule: str) -> None:
    rng = random.Random(0)
    for groups, microbatches in ((2, 6), (4, 12), (4, 64), (6, 48), (8, 128)):
        cut = random_cut(rng, schedule, groups)
        stages = cut.stages
        timing = times(
            len(stages), [s.forward_seconds for s in stages],
            [s.seconds - s.forward_seconds - s.weight_seconds for s in stages], [s.weight_seconds for s in stages],
            edges=[Edge(k, k + 1, wire, wire) for k, wire in enumerate(cut.stage_edge)],
        )  # fmt: skip
        every = build(fill_of(schedule).name, len(stages), groups, microbatches)
        timeline = simulate(every, timing)
        whole, step = timeline.makespan_seconds, OnceAStep.of(stages, every.stages_of_rank).more(timeline)
        exact = microbatches <= (EFFORT.steady_microbatches + 1) * groups
        assert simulated(cut, microbatches) == pytest.approx(whole + step, rel=1e-9 if exact else 0.02)
    assert [s for s, _ in best([cut, random_cut(rng, schedule, 8)], 16, 1)] == [simulated(cut, 16)]


@pytest.mark.slow
def test_filling_the_commonest_blocks_first_finds_the_same_cut() -> None:
    graph, cluster, microbatches = llama(), load_cluster("dgx-h100-x4"), 32
    found = []
    for thorough in (True, False):
        search = OneNumber(graph, cluster, 32, PipelineOptions(microbatches), "")
        limits = [2.0 * 2**30] * len(search._pools)
        equal = Equal(
            cluster, search._pools, search.blocks, Fillers(search.menus, search.blocks, microbatches), search.shapes,
            ("1f1b", "zb-v"), microbatches, limits, groups=8, thorough=thorough,
        )  # fmt: skip
        found.append(equal.cuts())
    every, fewer = found
    assert fewer[0] == every[0]
    assert set(fewer) <= set(every), "what is not near is not planned"


def test_fastest_ways_alone_find_the_cut_that_all_ways_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ways of blocks are looked for only where the fastest need more memory than there is."""
    graph, cluster, microbatches = llama(), load_cluster("dgx-h100-x4"), 32
    search = OneNumber(graph, cluster, 32, PipelineOptions(microbatches), "")
    every: list[bool] = []
    ways = Menus.of
    monkeypatch.setattr(Menus, "of", lambda *args: every.append(True) or ways(*args))

    def all_ways(self: Equal, groups: list[Group], fill: Fill, near: float, only: int | None) -> EstimatedCut | None:
        found = self._filled(groups, fill, near, only, fastest=False)
        return found[0] if found is not None else None

    def cuts(n_bytes: float) -> list[EstimatedCut]:
        equal = Equal(
            cluster, search._pools, search.blocks, Fillers(search.menus, search.blocks, microbatches),
            lambda size: [Mesh.of(data=2, tensor=2)] if size == 4 else [], ("1f1b",), microbatches,
            [n_bytes] * len(search._pools), groups=8, thorough=True,
        )  # fmt: skip
        return equal.cuts()

    (free,) = cuts(80.0 * 2**30)
    assert not every
    limit = 0.9 * max(stage.n_bytes for stage in free.stages)
    (tight,) = cuts(limit)
    assert every and tight.seconds > free.seconds
    monkeypatch.setattr(Equal, "_cut", all_ways)
    for found, n_bytes in ((free, 80.0 * 2**30), (tight, limit)):
        (alike,) = cuts(n_bytes)
        assert alike.bounds == found.bounds and alike.seconds == pytest.approx(found.seconds, rel=1e-9)


def test_stages_of_a_group_share_its_memory() -> None:
    """ZB-V keeps many more microbatches of a group's first stage than of its last."""
    graph, cluster = llama(), load_cluster("dgx-h100-x4")
    asked = PipelineOptions(32, groups=8, schedules=("zb-v",), mesh=Mesh.of(data=4))
    free = plan_pipeline(graph, cluster, 32, asked).plan
    limit = 0.8 * max(sum(free.stages[s].price.memory_bytes for s in own) for own in free.schedule.stages_of_rank)
    asked = replace(asked, options=Options(memory_limit_bytes=limit))
    tight = plan_pipeline(graph, cluster, 32, asked).plan
    for own in tight.schedule.stages_of_rank:
        assert sum(tight.stages[s].price.memory_bytes for s in own) <= limit
    first, last = tight.schedule.stages_of_rank[0]
    assert tight.stages[first].in_flight > 4 * tight.stages[last].in_flight


def test_plans_priced_at_another_size_run_the_same_again() -> None:
    """At the same size they are the same plans; at another, the same operators run again."""
    cluster, mesh = load_cluster("dgx-h100-x4"), Mesh.of(data=4, tensor=2)
    search = OneNumber(llama(), cluster, 32, PipelineOptions(8), "")
    graph = search._graph_of(search.blocks[4])
    options = search.menus._options(graph)
    plans = PlansByMemory(graph, cluster, mesh, options, devices=range(8)).every()
    assert any(plan.recompute for plan in plans)
    same = repriced(graph, cluster, mesh, options, plans, devices=range(8))
    assert same is not None
    for plan, again in zip(plans, same, strict=True):
        assert (again.recompute, again.make_again, again.kept_bytes) == (
            plan.recompute, plan.make_again, plan.kept_bytes,
        )  # fmt: skip
        assert again.price.seconds == pytest.approx(plan.price.seconds, rel=1e-9)


@pytest.mark.slow
def test_plans_of_few_rows_do_not_serve_where_more_rows_can_be_cut() -> None:
    """Four rows cannot be cut over 32 devices; what is best for them says nothing of 32 rows, which can."""
    cluster, mesh, decided = load_cluster("dgx-h100-x4"), Mesh.of(data=32), BlockPlans()
    whole, half = llama(32), llama(16)
    of_rows = {rows: resized(whole, half, 32, 16, rows) for rows in (4, 8, 32)}

    def search(rows: int, known: BlockPlans) -> OneNumber:
        return OneNumber(of_rows[rows], cluster, 32, PipelineOptions(32 // rows), "", decided=known)

    for rows in (4, 8, 32):
        one, fresh = search(rows, decided), search(rows, BlockPlans())
        block = next(block for block in one.blocks if block.kind == one.menus.common)
        assert evenly_cut(one.menus._graph(block), mesh).count(frozenset([32])) > 0
        before = dict(decided.fastest)
        least = fresh.menus.fastest(block, mesh, range(32))
        assert one.menus.fastest(block, mesh, range(32)) <= 1.001 * least
        fastest_way = min(way.seconds for way in fresh.menus.of(block, mesh, range(32)))
        assert min(way.seconds for way in one.menus.of(block, mesh, range(32))) <= 1.001 * fastest_way
        assert (decided.fastest == before) == (rows == 8)  # that of 4 rows serves: neither can be cut in 32


@pytest.mark.slow
def test_a_search_that_starts_from_few_rows_finds_the_plan_that_cuts_many() -> None:
    """The least microbatches cannot be cut over all devices; a step of one microbatch, which can, is the fastest."""
    cluster, whole, half = load_cluster("dgx-h100-x4"), wide_llama(64), wide_llama(32)
    graphs = {m: resized(whole, half, 64, 32, 64 // m) for m in (1, 2, 4, 8, 16, 32)}
    asked = PipelineOptions(1, groups=1, mesh=Mesh.of(data=32))
    pinned = plan_pipeline(graphs[1], cluster, 32, asked).plan.seconds
    searched = plan_pipeline(graphs, cluster, 32, PipelineOptions(1, schedules=("1f1b",))).plan.seconds
    assert searched <= 1.001 * pinned


def test_blocks_beside_the_commonest_are_priced_with_two_axes_as_one() -> None:
    """Of a mesh of three axes only the commonest block's program is solved on many devices."""
    cluster, mesh = load_cluster("dgx-h100-x4"), Mesh.of(data=4, tensor=2, context=2)
    menus = OneNumber(llama(), cluster, 32, PipelineOptions(8), "").menus
    blocks = OneNumber(llama(), cluster, 32, PipelineOptions(8), "").blocks
    rare = next(block for block in blocks if block.kind != menus.common)
    devices = range(16)
    merged = [Mesh.of(data=8, tensor=2), Mesh.of(data=4, tensor=4)]
    assert mesh.merged() == merged
    assert menus.of(rare, mesh, devices) == tuple(w for fewer in merged for w in menus.of(rare, fewer, devices))
    assert not any(len(key[1]) > 2 for key in menus.decided.every)


def test_the_first_few_groups_are_spread_over_all() -> None:
    assert spread_out(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert spread_out([7]) == [7] and sorted(spread_out(range(12))) == list(range(12))


def test_a_way_to_cut_is_given_up_before_its_last_stage_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = PipelineOptions(8, groups=4, mesh=Mesh.of(data=8), schedules=("zb-h1",))
    search = OneNumber(llama(), load_cluster("dgx-h100-x4"), 32, asked, "")
    candidate = search.candidates()[0]
    planned: list[str] = []
    real = stage_plans.plan_graph
    monkeypatch.setattr(
        stage_plans, "plan_graph", lambda graph, *a, **k: (planned.append(graph.fingerprint), real(graph, *a, **k))[1]
    )
    with pytest.raises(Beaten):
        search.exact(candidate, candidate.seconds / 1.2)
    given_up = len(planned)
    whole = OneNumber(llama(), load_cluster("dgx-h100-x4"), 32, asked, "")
    assert whole.exact(candidate) is not None
    assert given_up < len(planned) - given_up
