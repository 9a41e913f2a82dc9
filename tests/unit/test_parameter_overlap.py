"""Collectives of parameters beside computing: by numbers, in the integer program, in plans and in pipelines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.certificate import check
from autopar.planner.inter_op.replan import Replanner
from autopar.planner.inter_op.simulating.phases import Phases, phases
from autopar.planner.inter_op.simulating.timing import OnceAStep
from autopar.planner.intra_op.building.integer_program import HiddenSeconds, Item, Problem
from autopar.planner.intra_op.building.parameter_load import ParameterLoad, together
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.solving import highs
from autopar.plans.plan import Plan
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, State, shard
from cost_models.parameter_overlap import SLOWDOWN, Computing, ParameterSeconds, Shares, exposed
from cost_models.schedules import Edge, build, simulate, times
from hardware_profiles import load_cluster, software_named

LOST = SLOWDOWN
ALL = Shares(1.0, 1.0)
WIDE, LAYERS, ROWS = 2048, 6, 1 << 16


def test_the_shorter_of_both_is_hidden_but_for_what_both_lose() -> None:
    of_step, nothing = ParameterSeconds(gathers=2.0, reductions=3.0), ParameterSeconds()
    long, short = Computing(10.0, 20.0), Computing(1.0, 2.0)
    assert exposed(of_step, of_step, long, ALL) == pytest.approx((2 * LOST, 3 * LOST, 0, 0))
    assert exposed(of_step, of_step, short, ALL) == pytest.approx((1 + LOST, 1 + 2 * LOST, 0, 0))
    assert exposed(of_step, nothing, long, ALL) == of_step, "read first: nothing is computed before"
    half = exposed(of_step, of_step, Computing(10.0, 4.0), Shares(1.0, 0.5))
    assert half == pytest.approx((2 * LOST, 1 + 2 * LOST, 0, 0)), "beside half of a backward alone"
    each = ParameterSeconds(forward_each=1.5, backward_each=3.0)
    waits = exposed(each, each, Computing(1.0, 5.0), ALL)
    assert waits == pytest.approx((0, 0, 0.5 + LOST, 3 * LOST))
    assert waits.of_step(4) == pytest.approx(4 * (0.5 + 4 * LOST))
    both = exposed(of_step.plus(each), of_step.plus(each), Computing(1.0, 5.0), ALL)
    assert both == pytest.approx((2.0, 1 + 2 * LOST, 0.5 + LOST, 3 * LOST)), "1 s of the first forward"


def test_blocks_of_a_stage_hide_together() -> None:
    def load(reductions: float, backward: float) -> ParameterLoad:
        of_step = ParameterSeconds(reductions=reductions)
        first = ParameterSeconds(reductions=reductions / 4)
        return ParameterLoad((), of_step, of_step, first, Computing(0, backward), ALL)

    stage = together([(3, load(4.0, 1.0)), (1, load(0.0, 20.0))])
    assert stage.collectives.reductions == 12.0 and stage.first.reductions == 1.0, "one block is the first"
    assert stage.exposed().reductions == pytest.approx(1 + 11 * LOST)


# -- the integer program


def _random_problem(rng: random.Random) -> Problem:
    def numbers(n: int, least: int, most: int) -> tuple[float, ...]:
        return tuple(float(rng.randint(least, most)) for _ in range(n))

    sizes = [rng.randint(1, 4) for _ in range(rng.randint(2, 5))]
    items = tuple(Item(f"i{k}", numbers(n, 4, 20), numbers(n, 1, 9)) for k, n in enumerate(sizes))

    def side(of_items: Sequence[int]) -> tuple[tuple[int, tuple[float, ...]], ...]:
        return tuple((k, tuple(rng.uniform(0, s / 2) for s in items[k].seconds)) for k in of_items)

    overlaps = []
    for _ in range(rng.randint(1, 2)):
        order = rng.sample(range(len(items)), len(items))
        at = rng.randint(1, len(items) - 1)
        overlaps.append(HiddenSeconds((side(order[:at]), side(order[at:]))))
    limit = float(rng.randint(2 * len(items), 8 * len(items))) if rng.random() < 0.5 else None
    return Problem(items, (), limit_bytes=limit, overlaps=tuple(overlaps))


def _seconds(problem: Problem, picked: Sequence[int]) -> float:
    total = sum(item.seconds[s] for item, s in zip(problem.items, picked, strict=True))
    return total - sum(min(sum(of[picked[i]] for i, of in side) for side in o.sides) for o in problem.overlaps)


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_the_program_hides_what_brute_force_does(gap: float) -> None:
    rng, feasible = random.Random(5), 0
    for _ in range(150):
        problem = _random_problem(rng)
        every = itertools.product(*(range(len(item.seconds)) for item in problem.items))
        fitting = [
            picked for picked in every
            if problem.limit_bytes is None
            or sum(i.n_bytes[s] for i, s in zip(problem.items, picked, strict=True)) <= problem.limit_bytes
        ]  # fmt: skip
        if not fitting:
            continue
        feasible += 1
        least = min(_seconds(problem, picked) for picked in fitting)
        choice = highs.program(problem).solve(gap)
        assert choice.objective == pytest.approx(_seconds(problem, choice.picked), rel=1e-6)
        assert choice.bound <= least + 1e-5
        assert least - 1e-5 <= choice.objective <= least * (1 + (0.02 if gap else 0.0)) + 1e-5
    assert feasible > 100


# -- plans


class Deep(nn.Module):
    """Layers that are much alike, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().pow(2).mean()


@cache
def graph() -> Graph:
    with torch.device("meta"):
        return capture(Deep().bfloat16(), (torch.empty(ROWS, WIDE, dtype=torch.bfloat16),), {}).graph


def test_reductions_are_hidden_in_the_price_of_a_plan_and_its_certificate() -> None:
    cluster = load_cluster("dgx-h100")
    plan = plan_graph(graph(), cluster, Mesh.of(data=8), Options(params={"*": "I"}))
    price = plan.price
    assert {(c.stored.text, c.used.text) for c in plan.params.values()} == {("I", "R")}, "data parallelism"
    assert price.parameter_seconds > 0 and price.compute_seconds > 2 * price.parameter_seconds
    one_bucket = -(-(25 << 20) // (2 * WIDE * WIDE))  # parameters that begin within the first bucket
    hidden = (1 - SLOWDOWN) * price.parameter_seconds * (LAYERS - one_bucket) / LAYERS
    assert price.hidden_seconds == pytest.approx(hidden, rel=1e-6)
    assert check(plan, graph(), cluster).failures == []
    damaged = replace(plan, price=replace(price, hidden_seconds=0.0))
    assert any("hidden" in text for text in check(damaged, graph(), cluster, tolerance=1e-4).failures)


def test_the_program_hides_what_the_price_does() -> None:
    cluster, mesh = load_cluster("dgx-h100"), Mesh.of(data=8)
    for microbatches in (1, 4):
        options = Options(microbatches=microbatches)
        problem, _ = MeshProblem(graph(), cluster, mesh, options, None).problem(False)
        picked = highs.program(problem).solve().picked
        hidden = sum(item.seconds[s] for item, s in zip(problem.items, picked, strict=True)) - _seconds(problem, picked)
        price = plan_graph(graph(), cluster, mesh, options).price
        assert price.hidden_seconds > 0 and hidden == pytest.approx(price.hidden_seconds, rel=1e-6)


@pytest.mark.parametrize("what", ["software", "cores"])
def test_what_hides_nothing_is_priced_one_after_the_other(what: str) -> None:
    cluster = load_cluster("dgx-h100")
    none = replace(software_named("autopar"), name="none", hides_reductions=0.0, hides_gathers=0.0)
    other = replace(cluster, software=none) if what == "software" else replace(cluster, overlap=False)
    plan = plan_graph(graph(), cluster, Mesh.of(data=8), Options())
    slower = plan_graph(graph(), other, Mesh.of(data=8), Options())
    assert plan.price.hidden_seconds > 0 and slower.price.hidden_seconds == 0
    assert slower.price.seconds > plan.price.seconds
    assert check(slower, graph(), other).failures == []


def test_phases_add_up_and_one_plan_has_one_price() -> None:
    cluster = load_cluster("dgx-h100")
    for microbatches in (1, 4):
        for limit in (None, 0.75):
            options = Options(microbatches=microbatches)
            plan = plan_graph(graph(), cluster, Mesh.of(data=8), options)
            if limit is not None:
                options = replace(options, memory_limit_bytes=limit * plan.price.memory_bytes)
                plan = plan_graph(graph(), cluster, Mesh.of(data=8), options)
            parts = phases(graph(), plan, pricer(cluster, plan.mesh))
            total = microbatches * (parts.forward_seconds + parts.backward_seconds) + parts.step_seconds
            assert total == pytest.approx(plan.price.seconds, rel=1e-9)
            whole = Plan.alone(plan, cluster.name)
            again, _ = Replanner(graph(), whole, cluster, options).simulated()
            assert again.seconds == pytest.approx(whole.seconds, rel=1e-9)


def test_collectives_of_tensor_parallelism_are_hidden_where_the_software_says_so() -> None:
    cluster, mesh = load_cluster("dgx-h100"), Mesh.of(tensor=8)
    half = replace(cluster, software=replace(software_named("autopar"), name="half", hides_tensor=0.5))
    spec = graph().nodes[7].out
    plain, hides = pricer(cluster, mesh), pricer(half, mesh)
    whole, pieces = State([INVARIANT]), State([shard(0)])
    there, _ = plain.step_parts(spec, True, pieces, whole)
    assert there > 0 and hides.step_parts(spec, True, pieces, whole)[0] == pytest.approx(
        there * (1 - 0.5 * (1 - SLOWDOWN))
    )
    for other in (cluster, half):
        plan = plan_graph(graph(), other, mesh, Options())
        assert check(plan, graph(), other).failures == []


# -- pipelines


def test_what_a_group_does_once_passes_while_it_waits() -> None:
    """Of three groups the first waits for nobody, and the last is done with its backwards before the others."""
    timing = times(3, [1.0] * 3, [2.0] * 3, [0.0] * 3, edges=[Edge(0, 1, 0.0, 0.0), Edge(1, 2, 0.0, 0.0)])
    timeline = simulate(build("1f1b", 3, 3, 6), timing)

    def more(gathers: Sequence[float], reductions: Sequence[float], optimizer: Sequence[float]) -> float:
        stages = [
            Phases(1.0, 2.0, 0.0, *once) for once in zip(gathers, reductions, optimizer, strict=True)
        ]  # fmt: skip
        return OnceAStep.of(stages, [[0], [1], [2]]).more(timeline)

    none = (0.0, 0.0, 0.0)
    assert more((0.5, 1.0, 2.0), none, none) == pytest.approx(0.5), "later groups gather before their first microbatch"
    assert more((0.0, 1.5, 0.0), none, none) == pytest.approx(0.5)
    assert more(none, (0.0, 2.0, 4.0), none) == pytest.approx(0.0), "the first group is the last to be done"
    assert more(none, (1.0, 2.0, 5.0), none) == pytest.approx(1.0)
    assert more(none, none, (0.5, 1.0, 0.25)) == pytest.approx(1.0), "all wait for the slowest"
