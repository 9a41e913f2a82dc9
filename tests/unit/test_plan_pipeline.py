"""Planning pipelines: cuts against brute force, textbook decisions, files, the price of a stage's phases."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from meta_models import gpt2
from zoo import ZOO

from autopar import plan
from autopar import planfile as files
from autopar.capture import capture
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.inter_op.blocks import blocks
from autopar.planner.inter_op.estimating.block_costs import BlockOption
from autopar.planner.inter_op.estimating.filling import Filler, Places
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.stage_graphs import hot_ops
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.schedules import fill_of, simulate
from hardware_profiles import load_cluster

MESH = Mesh.of(data=2, tensor=2)
ALIKE = "llama", "t5"
"""Models whose phases are those of the others."""


def graph_of(name: str) -> Graph:
    case = ZOO[name]()
    return capture(case.model, case.args, case.kwargs).graph


def gpt(layers: int, hidden: int, heads: int, batch: int, seq: int) -> Graph:
    return gpt2(batch, seq, torch.float16, vocab_size=51200, n_embd=hidden, n_layer=layers, n_head=heads)


def random_way(rng: random.Random) -> BlockOption:
    forward, kept = rng.uniform(1, 4), rng.uniform(2, 6)
    step = rng.uniform(0, 2)
    way = BlockOption(forward, 2 * forward, step, rng.uniform(1, 8), kept, optimizer_seconds=step)
    if rng.random() < 0.4:
        way = replace(
            way, backward_seconds=3 * forward, kept_bytes=kept / 4, recompute_peak_bytes=kept, recomputed=True,
        )  # fmt: skip
    return way


def random_filler(rng: random.Random) -> Filler:
    n = rng.randint(3, 8)
    kinds = [rng.randrange(2) for _ in range(n)]
    menus = {k: tuple(random_way(rng) for _ in range(rng.randint(1, 3))) for k in set(kinds)}
    return Filler(kinds, menus, rng.randint(1, 6))


def test_stages_are_filled_within_memory_and_near_the_best_choice_of_ways() -> None:
    rng = random.Random(0)
    fitting = 0
    for _ in range(300):
        filler, in_flight = random_filler(rng), rng.choice([1.0, 2.0, 5.5])
        end = rng.randint(1, min(5, len(filler.kinds)))
        memory = rng.uniform(3, 25) * end

        def bytes_of(ways: tuple[BlockOption, ...], in_flight: float = in_flight) -> float:
            again = max(w.recompute_peak_bytes for w in ways)
            return again + sum(w.static_bytes + in_flight * w.kept_bytes for w in ways)

        def total_of(ways: tuple[BlockOption, ...], filler: Filler = filler) -> float:
            return sum(filler.microbatches * w.seconds + w.step_seconds for w in ways)

        every = itertools.product(*(filler.menus[k] for k in filler.kinds[:end]))
        possible = [ways for ways in every if bytes_of(ways) <= memory]
        filled = filler.stage(0, end, in_flight, memory)
        if filled is None:
            continue
        fitting += 1
        assert filled.n_bytes <= memory * (1 + 1e-9)
        total = filler.microbatches * filled.seconds + filled.step_seconds
        assert possible, "what was filled fits, so some choice does"
        least = min(map(total_of, possible))
        dearest = max(total_of((w,)) for k in filler.kinds[:end] for w in filler.menus[k])
        assert least - 1e-9 <= total <= least + 2 * dearest, "off by what the last steps leave over at most"
    assert fitting > 100


def test_the_pace_equals_that_of_the_best_of_all_cuts() -> None:
    rng = random.Random(1)
    compared = 0
    for _ in range(200):
        filler = random_filler(rng)
        n, groups = len(filler.kinds), rng.randint(2, 3)
        name = rng.choice(["gpipe", "1f1b", "zb-h1"])
        memory = rng.uniform(10, 60) * n / groups
        places = Places(fill_of(name), filler.microbatches, [memory] * groups, [filler] * groups, n)
        paces = []
        for cuts in itertools.combinations(range(1, n), groups - 1):
            stages = [
                filler.stage(a, b, places.in_flight[s], memory)
                for s, (a, b) in enumerate(itertools.pairwise((0, *cuts, n)))
            ]
            if all(s is not None for s in stages):
                paces.append(max(s.seconds for s in stages if s is not None))
        found = places.best()
        assert (found is None) == (not paces)
        if found is not None:
            compared += 1
            assert found[0][0] == 0 and len(found) == groups
            assert min(paces) - 1e-9 <= max(s.seconds for _, s in found) <= min(paces) * 1.01 + 1e-9
    assert compared > 60


@pytest.mark.parametrize("name", ["gpt2", "resnet", *(pytest.param(n, marks=pytest.mark.slow) for n in ALIKE)])
def test_phases_add_up_to_the_price(name: str) -> None:
    graph, cluster = graph_of(name), load_cluster("local-x4")
    plan = plan_graph(graph, cluster, MESH)
    found = phases(graph, plan, pricer(cluster, MESH))
    assert found.weight_seconds > 0 and found.forward_seconds < found.backward_seconds + 1
    total = found.forward_seconds + found.backward_seconds + found.step_seconds
    assert total == pytest.approx(plan.price.seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "unet", "t5", "resnet"])
def test_blocks_cover_the_model(name: str) -> None:
    graph = graph_of(name)
    found = blocks(graph, fold(graph), rules_of(graph))
    assert [b.first for b in found] == [0, *(b.end for b in found[:-1])]
    assert found[-1].end == len(hot_ops(graph)) and len(found) > 4


def test_layers_are_blocks_of_one_kind() -> None:
    graph = gpt(12, 64, 4, 2, 32)
    folding = fold(graph)
    found = blocks(graph, folding, rules_of(graph, folding.representative))
    kinds = [b.kind for b in found]
    repeated = max(kinds, key=kinds.count)
    assert 10 <= kinds.count(repeated) <= 12, "the layers are the blocks, but for the ends"
    inside = [b.stage_edge_bytes for b in found if b.kind == repeated]
    assert set(inside[1:]) == {2 * 32 * 64 * 2}, "cut where only the residual stream crosses"


@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_file_gives_the_same_plan(microbatches: int) -> None:
    graph = graph_of("gpt2")
    plan = plan_pipeline(graph, load_cluster("local-x4"), 4, PipelineOptions(microbatches, groups=2)).plan
    text = files.dumps(plan, graph, {"spec": "gpt.py:make"})
    again = files.loads(text, graph)
    assert again == plan
    assert files.dumps(again, graph, {"spec": "gpt.py:make"}) == text


def test_bad_files() -> None:
    graph = graph_of("gpt2")
    plan = plan_pipeline(graph, load_cluster("local-x2"), 2, PipelineOptions(4, groups=2, schedules=("1f1b",))).plan
    good = json.loads(files.dumps(plan, graph))

    def error(**changes: object) -> str:
        with pytest.raises(PlanError) as caught:
            files.loads(json.dumps({**good, **changes}), graph, where="p.json")
        return str(caught.value)

    assert "p.json: no valid JSON" in _error(lambda: files.loads("{", graph, where="p.json"))
    assert "stagez: unknown key; did you mean 'stages'?" in error(stagez=1)
    assert "'autopar_pipeline' is 2, of which this autopar reads 1" in error(autopar_pipeline=2)
    assert f"this one has {graph.fingerprint}" in error(fingerprint="0" * 16)
    assert "stages: got 3; expected a list" in error(stages=3)
    assert "is on no rank" in error(schedule=[line.replace("holds 1:", "holds:") for line in good["schedule"]])
    second = {**good["stages"][1], "first": "nothing"}
    assert "stage begins at 'nothing'" in error(stages=[good["stages"][0], second])
    second = {**good["stages"][1], "devices": [0]}
    assert "device 0 is in group 0 and in group 1" in error(stages=[good["stages"][0], second])
    second = {**good["stages"][1], "devices": [1, 2]}
    assert "stage 1 is planned for 1 devices and placed on 2" in error(stages=[good["stages"][0], second])


def _error(call) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


def test_what_cannot_be() -> None:
    graph, cluster = graph_of("mlp"), load_cluster("local-x4")
    with pytest.raises(PlanError, match="4 devices cannot be cut into 5 groups; use 1 to 4"):
        plan_pipeline(graph, cluster, 4, PipelineOptions(4, groups=5))
    with pytest.raises(PlanError, match="no schedule 'fifo'; use gpipe"):
        plan_pipeline(graph, cluster, 4, PipelineOptions(4, schedules=("fifo",)))
    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan_pipeline(graph, cluster, 4, PipelineOptions(4, options=Options(memory_limit_bytes=1000)))


def test_asynchronous_schedules_are_planned_where_they_are_named() -> None:
    graph, cluster = graph_of("mlp"), load_cluster("local-x4")
    plain = plan_pipeline(graph, cluster, 4, PipelineOptions(8, groups=4, schedules=("1f1b",))).plan
    assert not plain.notes and all(stage.price.version_bytes == 0 for stage in plain.stages)
    for name, versions in (("pipedream", [4, 3, 2, 1]), ("pipedream-2bw", [2, 2, 2, 2])):
        request = PipelineOptions(8, groups=4, schedules=(name,), starts=plain.starts)
        planned = plan_pipeline(graph, cluster, 4, request)
        plan = planned.plan
        assert [stage.versions.number for stage in plan.stages] == versions
        assert [s.price.version_bytes for s in plan.stages] == [
            (n - 1) * s.price.parameter_bytes for n, s in zip(versions, plan.stages, strict=True)
        ]
        assert "changes the training result" in plan.notes[0]
        assert plan.seconds == planned.timeline.makespan_seconds
        limit = max(stage.price.memory_bytes for stage in plan.stages)
        room = replace(request, options=Options(memory_limit_bytes=limit))
        assert plan_pipeline(graph, cluster, 4, room).plan.memory_bytes <= limit
        with pytest.raises(InfeasibleError, match="weight versions"):
            plan_pipeline(graph, cluster, 4, replace(request, options=Options(memory_limit_bytes=1000)))
        text = files.dumps(plan, graph)
        again = files.loads(text, graph, cluster)
        assert again == plan and [s.versions for s in again.stages] == [s.versions for s in plan.stages]
        renamed = files.loads(text.replace(f"schedule {name} ", "schedule 1f1b "), graph, cluster)  # by hand
        assert all(stage.price.version_bytes == 0 for stage in renamed.stages)
        assert renamed.seconds == pytest.approx(plain.seconds, rel=0.05)


def test_activations_in_flight_count() -> None:
    graph = graph_of("gpt2")
    plan = plan_pipeline(graph, load_cluster("local-x4"), 4, PipelineOptions(8, groups=4, schedules=("1f1b",))).plan
    live = simulate_live(plan)
    assert live == [4, 3, 2, 1]
    same = PipelineOptions(8, groups=4, schedules=("gpipe",), starts=plan.starts)
    one = plan_pipeline(graph, load_cluster("local-x4"), 4, same).plan
    for a, b, n in zip(plan.stages, one.stages, live, strict=True):
        assert a.price.activation_bytes / n == b.price.activation_bytes / 8


def test_recompute_shrinks_what_is_in_flight() -> None:
    """The price of every stage has the inputs of its blocks for each microbatch, and the largest block once."""
    graph, cluster = graph_of("gpt2"), load_cluster("local-x4")

    def planned(schedule: str, *patterns: str):  # type: ignore[no-untyped-def]
        starts = tuple(n.name for n in graph.nodes if n.name == "layer_norm_2")  # the second block
        options = Options(recompute=patterns)
        asked = PipelineOptions(8, groups=2, schedules=(schedule,), starts=starts, options=options)
        return plan_pipeline(graph, cluster, 4, asked)

    for schedule in ("1f1b", "zb-h1", "gpipe"):
        free, again = planned(schedule), planned(schedule, "*.h.*")
        live = simulate_live(again.plan)
        for a, b, n in zip(free.plan.stages, again.plan.stages, live, strict=True):
            price = b.price
            assert b.in_flight == n and len(b.recompute) == 1
            assert price.activation_bytes == n * b.kept_bytes + price.again_bytes
            assert 0 < b.kept_bytes < 0.6 * a.kept_bytes
        for mine, other, n in zip(again.timeline.peak_bytes, free.timeline.peak_bytes, live, strict=True):
            assert mine < other or n == 1, "of the only microbatch, the only block lives again"
        t, u = again.timeline.times, free.timeline.times
        assert all(x > y for x, y in zip(t.backward_seconds, u.backward_seconds, strict=True))
        assert t.weight_seconds == (0, 0) and t.input_seconds == t.backward_seconds, "it is not split"
        assert files.loads(files.dumps(again.plan, graph), graph) == again.plan
    with pytest.raises(PlanError, match="recompute 'blocks' matches no module"):
        planned("1f1b", "blocks")


@pytest.mark.slow
def test_searched_schedules() -> None:
    """The quickest of all on the same stages; less memory leaves fewer microbatches in flight."""
    graph, cluster = graph_of("gpt2"), load_cluster("local-x4")
    asked = PipelineOptions(8, groups=4, schedules=("1f1b", "zb-h1", "gpipe", "searched"))
    found = plan_pipeline(graph, cluster, 4, asked)
    assert found.plan.schedule.name == "searched" and found.tried[0][1] < 0.8 * found.tried[-1][1]
    assert files.loads(files.dumps(found.plan, graph), graph) == found.plan
    free = plan_pipeline(graph, cluster, 4, replace(asked, schedules=("searched",)))
    peak = max(s.price.memory_bytes for s in free.plan.stages)
    assert peak <= max(free.timeline.peak_bytes), "the search counts no less than there is"
    options = Options(memory_limit_bytes=0.9 * peak)
    tight = plan_pipeline(graph, cluster, 4, replace(asked, schedules=("searched",), options=options))
    assert max(s.price.memory_bytes for s in tight.plan.stages) <= 0.9 * peak
    assert sum(simulate_live(tight.plan)) < sum(simulate_live(free.plan))
    assert tight.plan.seconds >= free.plan.seconds


def test_rows_edited_by_hand_change_what_is_in_flight() -> None:
    graph = graph_of("mlp")
    plan = plan_pipeline(graph, load_cluster("local-x2"), 2, PipelineOptions(4, groups=2, schedules=("1f1b",))).plan
    document = json.loads(files.dumps(plan, graph))
    document["schedule"][1] = "rank 0 holds 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    edited = files.loads(json.dumps(document), graph)
    assert [s.in_flight for s in edited.stages] == [4, 1]
    assert edited.stages[0].price.activation_bytes == 2 * plan.stages[0].price.activation_bytes


def simulate_live(plan) -> list[int]:  # type: ignore[no-untyped-def]
    from cost_models.schedules import times

    return list(simulate(plan.schedule, times(len(plan.stages))).live_per_stage)


CLUSTERS = Path(__file__).parents[2] / "examples/clusters"


def test_devices_of_two_types_get_unequal_stages() -> None:
    """Four H100 and two A100: no group holds both, and the slow group has less to do."""
    graph, cluster = gpt(12, 1024, 16, 8, 512), load_cluster(CLUSTERS / "mixed.toml")
    found = plan_pipeline(graph, cluster, 6, PipelineOptions(8, schedules=("1f1b",)))
    kinds = [{cluster.device(d).name for d in stage.devices} for stage in found.plan.stages]
    assert all(len(k) == 1 for k in kinds) and len(set(map(tuple, kinds))) == 2
    assert sorted(d for s in found.plan.stages for d in s.devices) == list(range(6))
    layers = [sum(n.startswith("linear") for n in stage.ops) for stage in found.plan.stages]
    slow = [n for n, k in zip(layers, kinds, strict=True) if "A100" in next(iter(k))]
    fast = [n for n, k in zip(layers, kinds, strict=True) if "H100" in next(iter(k))]
    assert sum(slow) / 2 < sum(fast) / 4, "operators a device"


def test_three_devices_make_two_unequal_groups() -> None:
    graph = graph_of("gpt2")
    plan = plan_pipeline(graph, load_cluster("local-x3"), 3, PipelineOptions(4, groups=2, schedules=("1f1b",))).plan
    assert sorted(len(s.devices) for s in plan.stages) == [1, 2]
    again = files.loads(files.dumps(plan, graph), graph)
    assert again == plan


@pytest.mark.slow
def test_pipelines_cross_slow_links() -> None:
    """GPT-39B (Alpa's shape) on 8 nodes of 8 V100: stages lie inside nodes where 25 Gb/s join them. Where all links are
    NVLink and microbatches are large, so that a pipeline would have a bubble, there is none."""
    slow = load_cluster(CLUSTERS / "v100-8x8-25g.toml")
    fast = load_cluster(Path(__file__).parents[2] / "benchmarks/clusters/v100-8x8-nvlink.toml")
    small = gpt(48, 8192, 64, 4, 1024)
    plan = plan_pipeline(small, slow, 64, PipelineOptions(64, schedules=("1f1b",))).plan
    assert plan.schedule.n_ranks >= 8, "no stage spans two nodes"
    assert all(stage.mesh.size_of["tensor"] > 1 for stage in plan.stages)
    large = gpt(48, 8192, 64, 256, 1024)
    asked = PipelineOptions(4, schedules=("1f1b",))
    assert plan_pipeline(large, slow, 64, asked).plan.schedule.n_ranks > 1
    assert plan_pipeline(large, fast, 64, asked).plan.schedule.n_ranks == 1


def test_a_backward_that_is_all_of_weights_takes_no_less_than_nothing_for_its_inputs() -> None:
    """Seconds of inputs are a difference of sums: it was -8e-22 here, which a simulator cannot be given."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (self.down(torch.relu(self.up(part))) for part in (x.abs(), -x))
            return (first + x - second).pow(2).mean()

    batch = torch.randn(8, 6, 8, dtype=torch.float64)
    made = plan(Twice().double(), "local-x2", batch, stages=2, microbatches=2)
    assert len(made.stages) == 2
