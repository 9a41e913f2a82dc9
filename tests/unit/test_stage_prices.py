"""Prices of stages are those of their own devices, transfers cost what is sent, stages of a group share its memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar import planfile as files
from autopar.capture import capture
from autopar.errors import ClusterError, MeshError, PlanError
from autopar.planner.inter_op.exact.stage_plans import StagePlans
from autopar.planner.inter_op.replan import Replanner, limit_of_stage
from autopar.planner.inter_op.simulating.phases import Phases, phases
from autopar.planner.inter_op.simulating.timing import stage_edge_seconds, timing_of
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.prices import bytes_together
from autopar.plans.stage_graphs import cut
from autopar.plans.transfer import Side, loads, transfer
from autopar.report.stages import stage_rows
from autopar.runtime.pipelines import wires
from autopar.runtime.pipelines.wires import wires_of
from autopar.words.graph import Graph, Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State, Step
from autopar.words.shards import local_shape
from cost_models.schedules.actions import Action
from hardware_profiles import Cluster, budget_of, load_cluster

CLUSTER = """
name = "two-kinds"
[[node]]
device = "H100-SXM-80GB"
n_devices = 2
[[node.level]]
link = "nvlink4"
[node.uplink]
link = "ib-ndr"
[[node]]
device = "A100-SXM-80GB"
n_devices = 2
[[node.level]]
link = "nvlink3"
[node.uplink]
link = "ib-hdr"
"""


class Net(nn.Module):
    def __init__(self, hidden: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Net(), (torch.ones(8, 64), torch.ones(8, 64)), {}).graph


@pytest.fixture(scope="module")
def made(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A folder with a cluster file and a plan on it, one stage on each kind of device."""
    folder = tmp_path_factory.mktemp("prices")
    (folder / "mine.toml").write_text(CLUSTER)
    second = next(n.name for n in graph.nodes if n.kind == "op" and n.module == "layers.2")
    option = PipelineOptions(4, 2, ("1f1b",), Mesh.of(data=2), [second])
    plan = plan_pipeline(graph, load_cluster(folder / "mine.toml"), 4, option, cluster_name="mine.toml").plan
    assert [s.devices for s in plan.stages] == [(0, 1), (2, 3)]
    (folder / "plan.json").write_text(files.dumps(plan, graph))
    return folder, plan


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    document = json.loads((folder / "plan.json").read_text())
    edit(document)
    (folder / "edited.json").write_text(json.dumps(document))
    return folder / "edited.json"


def phases_on(graph: Graph, choice: StagePlan, cluster: Cluster, devices: tuple[int, ...]) -> Phases:
    return phases(graph, choice, pricer(cluster, choice.mesh, devices))


def check_prices(graph: Graph, plan: Plan, cluster: Cluster) -> None:
    """Every stage costs what its phases take on its own devices, and the step what is simulated."""
    for stage, choice in zip(cut(graph, plan.starts), plan.stages, strict=True):
        found = phases_on(stage.graph, choice, cluster, choice.devices)
        price = choice.price
        assert price.microbatch_seconds == pytest.approx(
            plan.microbatches * (found.forward_seconds + found.backward_seconds), rel=1e-9
        )
    assert plan.seconds == pytest.approx(Replanner(graph, plan, cluster, Options()).simulated()[0].seconds, rel=1e-12)


def test_an_edited_stage_is_priced_on_its_own_devices(graph: Graph, made: tuple[Path, Plan]) -> None:
    folder, before = made
    cluster = load_cluster(folder / "mine.toml")
    assert files.load(folder / "plan.json", graph) == before
    path = edited(folder, lambda d: d["stages"][1]["ops"].update({"layers.3:linear": {"data": "replicate"}}))
    plan = files.load(path, graph)
    check_prices(graph, plan, cluster)
    assert plan.stages[0] == before.stages[0], "what was not edited stays, with what is known of its solution"
    assert plan.seconds > before.seconds
    second = cut(graph, plan.starts)[1].graph
    mine, first = (phases_on(second, plan.stages[1], cluster, d).forward_seconds for d in ((2, 3), (0, 1)))
    assert abs(mine - first) > 0.02 * mine, "the kinds of devices differ enough to be told apart"
    again = files.loads(files.dumps(plan, graph), graph)
    assert again == plan, "what was priced is not priced again: no cluster is needed"


def test_stages_on_other_devices_are_priced_there(graph: Graph, made: tuple[Path, Plan]) -> None:
    folder, before = made

    def swap(document: dict[str, Any]) -> None:
        a, b = document["stages"]
        a["devices"], b["devices"] = b["devices"], a["devices"]

    plan = files.load(edited(folder, swap), graph)
    assert [s.devices for s in plan.stages] == [(2, 3), (0, 1)]
    check_prices(graph, plan, load_cluster(folder / "mine.toml"))
    assert plan.stages[0].price != before.stages[0].price
    path = edited(folder, lambda d: d["stages"][1].update(devices=[2, 4]))
    with pytest.raises(MeshError, match=r"stage 1 is on rank 4, 4 devices are in cluster 'mine.toml': 0 to 3"):
        files.load(path, graph)
    path = edited(folder, lambda d: d["stages"][1].update(devices=[1, 2]))
    with pytest.raises(PlanError, match="device 1 is in group 0 and in group 1"):
        files.load(path, graph)


def test_another_cluster_prices_all_stages(graph: Graph, made: tuple[Path, Plan]) -> None:
    folder, before = made
    plan = files.load(edited(folder, lambda d: d.update(cluster="dgx-v100")), graph)
    check_prices(graph, plan, load_cluster("dgx-v100"))
    assert all(a.price != b.price for a, b in zip(plan.stages, before.stages, strict=True))
    with pytest.raises(ClusterError, match=r"gone\.toml"):
        files.load(edited(folder, lambda d: d.update(cluster="gone.toml")), graph)


# -- transfers

ONE = Mesh.of(a=1)
TWO = Mesh.of(a=2)
FOUR = Mesh.of(a=4)
GRID = Mesh.of(a=2, b=2)
CASES: list[tuple[tuple[int, ...], tuple[str, ...], Mesh, tuple[str, ...], Mesh]] = [
    ((8, 4), State.of("I"), ONE, State.of("I"), ONE),
    ((8, 4), State.of("S0"), TWO, State.of("S0"), TWO),
    ((8, 4), State.of("S0"), TWO, State.of("S1"), TWO),
    ((8, 4), State.of("S0"), TWO, State.of("I"), TWO),  # arrives in slices, is gathered
    ((8, 4), State.of("I"), TWO, State.of("I"), TWO),
    ((5, 3), State.of("I"), TWO, State.of("I"), TWO),  # does not divide: sent whole, to everyone
    ((5, 3), State.of("R"), TWO, State.of("R"), FOUR),
    ((), State.of("I"), TWO, State.of("I"), TWO),
    ((5, 3), State.of("I"), FOUR, State.of("I"), ONE),
    ((8, 4), State.of("I"), ONE, State.of("I"), FOUR),
    ((8, 4), State.of("S0", "I"), GRID, State.of("I", "S1"), GRID),
    ((8, 4), State.of("I", "I"), GRID, State.of("I", "I"), GRID),
    ((8, 5), State.of("S0", "S0"), GRID, State.of("I", "I"), GRID),
    ((6, 5), State.of("S0"), TWO, State.of("I", "I"), GRID),
]


class Sent:
    """The messages and gathers of one transfer, as the runtime does them, with all ranks in this process."""

    def __init__(self, shape: tuple[int, ...], source: Side, target: Side, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[int, int, int]] = []
        self.gathers: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.made: dict[int, torch.Tensor] = {}
        values: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        posted: dict[tuple[int, int], int] = defaultdict(int)
        rank = -1

        def isend(value: torch.Tensor, dst: int, group: object) -> object:
            self.messages.append((rank, dst, value.nbytes))
            values[rank, dst].append(value.clone())
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        def irecv(value: torch.Tensor, src: int, group: object) -> object:
            pair = src, rank
            number = posted[pair]
            posted[pair] += 1
            return SimpleNamespace(wait=lambda: value.copy_(values[pair][number]))

        def step(
            shape: tuple[int, ...], src: State, dst: State, mesh: Mesh
        ) -> tuple[Callable[..., torch.Tensor], tuple[str]]:
            number = Step.between(src, dst).axis
            dim = src[number].dim
            assert dim is not None and not dst[number].is_shard

            def gather(x: torch.Tensor, axis: str) -> torch.Tensor:
                whole = torch.cat([x] * mesh.size_of[axis], dim)
                self.gathers[rank].append((axis, whole.nbytes))
                return whole

            return gather, (mesh.name(number),)

        monkeypatch.setattr(wires.dist, "isend", isend)
        monkeypatch.setattr(wires.dist, "irecv", irecv)
        monkeypatch.setattr(wires, "state_step", step)
        wire = wires.Wire(0, "x", 0, 1, transfer(Spec(shape, "float32"), source, target), None)
        ranks = sorted({*source.devices, *target.devices})
        rows = {r: [Action(0, "F", 0)] if r in source.devices else [] for r in ranks}
        no_groups = dict.fromkeys(wires.pairs_of([wire]))
        posts = {r: wires.Post.of(r, torch.device("cpu"), (wire,), rows, 1, no_groups) for r in ranks}
        for rank in ranks:
            posts[rank].begin()
        for number, rank in enumerate(source.devices):
            at = source.mesh.coordinate(number)
            posts[rank].send(wire, False, 0, torch.ones(local_shape(shape, source.state, source.mesh, at)))
        for rank in target.devices:
            self.made[rank] = posts[rank].take(wire, False, 0)
        for rank in ranks:
            posts[rank].end()


@pytest.mark.parametrize("within", [False, True], ids=["between groups", "within a group"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[1]} {c[2]} to {c[3]} {c[4]}")
def test_a_transfer_is_priced_as_it_is_sent(case: Any, within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, src, src_mesh, dst, dst_mesh = case
    n, m = (prod(size for size in mesh.sizes) for mesh in (src_mesh, dst_mesh))
    if within and n != m:
        pytest.skip("stages of a group are on the same devices")
    source = Side(src, src_mesh, tuple(range(n)))
    target = Side(dst, dst_mesh, source.devices if within else tuple(range(n, n + m)))
    sent = Sent(shape, source, target, monkeypatch)
    for value in sent.made.values():
        assert value.shape == local_shape(shape, dst, dst_mesh) and bool((value == 1).all())
    cluster = load_cluster("dgx-h100")
    expected = 0.0
    if sent.messages:
        wire = pricer(cluster, Mesh.of(pair=2), (0, 1)).axes["pair"]
        ends = [[b for s, _, b in sent.messages if s == rank] for rank in source.devices]
        ends += [[b for _, t, b in sent.messages if t == rank] for rank in target.devices]
        expected = max(sum(wire.seconds("send_recv", b) for b in own) for own in ends)
        counted = {(load.n_messages, load.n_bytes) for load in loads(transfer(Spec(shape, "float32"), source, target))}
        assert counted == {(len(own), sum(own)) for own in ends if own}
    axes = pricer(cluster, dst_mesh, target.devices).axes
    gathers = [sum(axes[a].seconds("all_gather", b) for a, b in sent.gathers[r]) for r in target.devices]
    assert len({*gathers}) == 1, "all ranks gather alike"
    found = stage_edge_seconds(Spec(shape, "float32"), source, target, cluster)
    assert found == pytest.approx(expected + gathers[0], rel=1e-9, abs=1e-15)
    if within and (src, src_mesh) == (dst, dst_mesh):
        assert not sent.messages and not any(sent.gathers.values()), "it is there already"


@pytest.mark.parametrize("rows", [2, 3, 4, 7])
def test_ranks_that_have_nothing_take_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows over 3 ranks are 2, 2 and 0: no message goes to the last rank or comes from it."""
    three, five = Mesh.of(a=3), Mesh.of(a=5)
    for a, b in ((ONE, three), (three, ONE), (three, five), (five, three)):
        ends = a.n_devices, a.n_devices + b.n_devices
        source = Side(State.of("S0"), a, tuple(range(ends[0])))
        target = Side(State.of("S0"), b, tuple(range(*ends)))
        made = Sent((rows, 2), source, target, monkeypatch).made
        for number, rank in enumerate(target.devices):
            assert made[rank].shape == local_shape((rows, 2), target.state, b, b.coordinate(number))
            assert made[rank].dtype == torch.float32 and bool((made[rank] == 1).all())


def test_what_is_sent_whole_costs_the_whole() -> None:
    """Half of a tensor each, where it divides; else all of it to each."""
    cluster = load_cluster("dgx-h100")
    here, there = Side(State.of("I"), TWO, (0, 1)), Side(State.of("I"), TWO, (2, 3))
    whole, parts = (
        [load.n_bytes for load in loads(transfer(Spec((n, 1001), "float32"), here, there))] for n in (2049, 2048)
    )
    assert set(whole) == {2049 * 1001 * 4} and set(parts) == {1024 * 1001 * 4}
    wire = pricer(cluster, Mesh.of(pair=2), (0, 2)).axes["pair"]
    assert stage_edge_seconds(Spec((2049, 1001), "float32"), here, there, cluster) == pytest.approx(
        wire.seconds("send_recv", 2049 * 1001 * 4)
    )


def test_edges_are_the_wires_of_the_runtime(graph: Graph, made: tuple[Path, Plan]) -> None:
    folder, plan = made
    cluster = load_cluster(folder / "mine.toml")
    graphs = cut(graph, plan.starts)
    expected: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for wire in wires_of(graphs, plan):
        for k, way in enumerate((wire.there, wire.back)):
            if way is not None:
                seconds = stage_edge_seconds(way.spec, way.source, way.target, cluster)
                expected[wire.source, wire.target][k] += seconds
    timing, _ = timing_of(graphs, plan.stages, plan.schedule, cluster)
    assert {(e.source, e.target): [e.forward_seconds, e.backward_seconds] for e in timing.edges} == dict(expected)
    assert min(min(row) for row in expected.values()) > 0


# -- memory


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[float]]]:
    """Limits under which stages were planned, by fingerprint."""
    found: dict[str, set[float]] = defaultdict(set)
    plan_of = StagePlans.plan

    def spy(self: StagePlans, graph: Graph, mesh: Mesh, options: Options, *rest: Any) -> Any:
        found[graph.fingerprint].add(options.memory_limit_bytes or 0.0)
        return plan_of(self, graph, mesh, options, *rest)

    monkeypatch.setattr(StagePlans, "plan", spy)
    yield found


def test_one_split_of_a_groups_memory(graph: Graph, shares: dict[str, set[float]]) -> None:
    """What planning gives a stage, what "what if" may fill, and what the report says fit each other and the group."""
    cluster = load_cluster("local-x2")
    free = PipelineOptions(4, 2, ("interleaved-1f1b",), may_recompute=False)
    loose = plan_pipeline(graph, cluster, 2, free).plan
    held = loose.schedule.stages_of_rank
    assert {len(own) for own in held} == {2}
    need = 2 * max(s.price.memory_bytes for s in loose.stages)
    for limit in (1.3 * need, 4 * need, None):
        shares.clear()
        option = replace(free, options=Options(memory_limit_bytes=limit))
        planned = plan_pipeline(graph, cluster, 2, option)
        plan, asked = planned.plan, replace(planned.plan.pins, memory_limit_bytes=limit)
        plan = replace(plan, pins=asked)
        device = limit if limit is not None else budget_of(cluster, cluster.device(0)).limit_bytes
        rows = stage_rows(graph, plan, planned.timeline, cluster)
        again = Replanner(graph, plan, cluster, option.options)
        for own in plan.schedule.stages_of_rank:
            fingerprints = [plan.stages[s].fingerprint for s in own]
            assert bytes_together([plan.stages[s].price for s in own]) <= device * (1 + 1e-9)
            for s, fingerprint in zip(own, fingerprints, strict=True):
                prices = [plan.stages[t].price for t in own if t != s]
                others = sum(p.memory_bytes - p.transient_bytes for p in prices)
                own_limit = limit_of_stage(plan, s, cluster, limit)
                assert own_limit == again.limit_bytes(s) == rows[s]["limit_bytes"] == pytest.approx(device - others)
                assert min(shares[fingerprint]) <= own_limit * (1 + 1e-9), "never less than it was planned for"
                new = again.solved(s).price
                assert new.memory_bytes + others <= device * (1 + 1e-9), "the group fits whatever one stage grows to"
                assert new.seconds <= plan.stages[s].price.seconds * (1 + 1e-6)
