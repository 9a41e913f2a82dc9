"""Plan files: what is written is read back, bytes do not change, edits by hand count, and nothing is executed."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ZOO

from autopar.capture import capture
from autopar.errors import ClusterError, MeshError, PlanError
from autopar.planfile import dumps, load, loads, parse, save
from autopar.planfile.patterns import compress
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.plan_completion import complete
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.pins import Pins
from autopar.plans.plan import VERSION, ParamChoice, Plan, Solution
from autopar.plans.prices import Price
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph
from autopar.words.labels import op_labels
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from hardware_profiles import load_cluster

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_mlp.json"
CLUSTER = "dgx-h100"
MESH = Mesh.of(data=2, tensor=2)


class MLP(nn.Module):
    """Two linear layers, the Megatron way to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.relu(self.up(x))), y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(MLP(), (torch.zeros(8, 16), torch.zeros(8, 16))).graph


def megatron(graph: Graph) -> Plan:
    """Data parallel on one axis, columns then rows on the other; no solver, so that no price can change it."""
    cuts = {"up": ("b", "n"), "relu": ("b", "s"), "down": ("b", "k"), "mse_loss": ("b", "I")}
    rules, labels = rules_of(graph), op_labels(graph)
    decided = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "op":
            wanted = next(v for k, v in cuts.items() if k in labels[node.name])
            decided[i] = strategy_named(graph, node, rules[i], wanted)
    placed = {
        "up.weight": ("S1,S0", "R,S0"), "up.bias": ("I,S0", "R,S0"), "down.weight": ("S0,S1", "R,S1"),
        "down.bias": ("I,I", "R,I"),
    }  # fmt: skip
    states = {name: [State.parse(text, MESH, name) for text in texts] for name, texts in placed.items()}
    params = {
        i: ParamChoice(*states[n.target], "use" if "weight" in n.target else "step")
        for i, n in graph.of_kind("param")
    }
    plan = complete(graph, rules, pricer(load_cluster(CLUSTER), MESH), decided, params, {})
    return Plan.alone(replace(plan, price=Price(1e-3, 2e-4, 3e-4, 1, 2, 3, 4, 5)), CLUSTER)


def with_stage(plan: Plan, **changes: object) -> Plan:
    """A plan of one stage with other decisions."""
    return replace(plan, stages=(replace(plan.only(), **changes),))  # type: ignore[arg-type]


def planned(graph: Graph) -> Plan:
    return Plan.alone(plan_graph(graph, load_cluster(CLUSTER), MESH), CLUSTER)


def test_golden(graph: Graph) -> None:
    """The file of a small plan, byte for byte (prices are made up: they may change)."""
    text = dumps(megatron(graph), graph, {"spec": "mlp.py:make"})
    text = text.replace(graph.fingerprint, "0123456789abcdef")
    assert text == GOLDEN.read_text(), f"after a change on purpose, write this to {GOLDEN.name}:\n{text}"


def test_recomputed_segments() -> None:
    """Written by label, read back, part of the decisions; what does not fit is named."""
    case = ZOO["gpt2"]()
    graph, cluster = capture(case.model, case.args, case.kwargs).graph, load_cluster(CLUSTER)
    rules = rules_of(graph)
    again = segments_of(graph, rules, ["*.h.*"])
    plan = Plan.alone(
        random_plan(graph, rules, pricer(cluster, MESH), 1, recompute=again), CLUSTER, Pins(recompute=("*.h.*",))
    )
    text = dumps(plan, graph)
    assert loads(text, graph) == plan and dumps(loads(text, graph), graph) == text
    raw = json.loads(text)
    assert raw["stages"][0]["memory"]["recompute"][0][0] == "transformer.h.0.ln_1:layer_norm"
    plain = Plan.alone(random_plan(graph, rules, pricer(cluster, MESH), 1))
    assert "memory" not in json.loads(dumps(plain, graph))["stages"][0]

    def read(segments: object) -> Plan:
        stage = {**raw["stages"][0], "memory": {"recompute": segments}}
        return loads(json.dumps({**raw, "stages": [stage]}), graph, cluster)

    first, second = raw["stages"][0]["memory"]["recompute"]
    assert read([]).price.seconds == pytest.approx(plain.price.seconds)
    assert read([first]).recompute == again[:1]
    assert read([list(again[0]), second]) == plan, "node names are fine too"
    assert plain.price.seconds < read([first]).price.seconds < plan.price.seconds
    for wrong, words in (
        ([["nothing", first[1]]], r"recompute\[0\]: 'nothing' is no op"),
        ([first[::-1]], r"recompute\[0\]: .* runs before"),
        ([first, [first[1], second[1]]], r"recompute\[1\]: .* does not come after"),
        ([second, first], r"recompute\[1\]: .* does not come after"),
        ([[first[0]]], r"recompute\[0\]: .* first and its last"),
        ({"a": "b"}, "recompute: .* a list"),
    ):
        with pytest.raises(PlanError, match=words):
            read(wrong)
    apart = {key: value for key, value in raw["stages"][0].items() if key != "memory"}
    before = {**apart, "recompute": [first, second]}
    assert loads(json.dumps({**raw, "stages": [before]}), graph) == plan, "as it was written before there was one table"
    for stage, words in (
        ({**before, "memory": {"recompute": [first]}}, r"recompute: unknown key"),
        ({**apart, "memory": {"swapped": []}}, r"memory: swapped: .*recompute"),
        ({**apart, "memory": {"keep": []}}, r"memory: keep: .*recompute"),
    ):
        with pytest.raises(PlanError, match=words):
            loads(json.dumps({**raw, "stages": [stage]}), graph)
    with pytest.raises(PlanError, match=r"pins.recompute\[0\]: .*matches no module"):
        loads(json.dumps({**raw, "pins": {"recompute": ["*.block"]}}), graph, cluster)


MESHES = ("data=2,tensor=2", "a=1,b=4", "data=2,tensor=2,context=2")
SLOW_TRIPS = {
    ("llama", MESHES[2]), ("t5", MESHES[0]), ("t5", MESHES[1]), ("t5", MESHES[2]), ("resnet", MESHES[0]),
    ("resnet", MESHES[2]),
}  # fmt: skip


@functools.cache
def graph_of(name: str) -> Graph:
    case = ZOO[name]()
    return capture(case.model, case.args, case.kwargs).graph


@pytest.mark.parametrize("name, mesh", [
    pytest.param(name, mesh, marks=pytest.mark.slow if (name, mesh) in SLOW_TRIPS else ())
    for name in ("mlp", "gpt2", "llama", "t5", "resnet") for mesh in MESHES
])  # fmt: skip
def test_round_trip(name: str, mesh: str) -> None:
    """Plans come back equal, and are written to the same bytes again; drawn at random, they differ in every entry."""
    graph = graph_of(name)
    cluster, shape = load_cluster(CLUSTER), Mesh.parse(mesh)
    rules, priced = rules_of(graph), pricer(cluster, shape)
    stages = [random_plan(graph, rules, priced, seed) for seed in range(3)]
    if name in ("mlp", "gpt2") and len(shape) == 2:
        stages.append(plan_graph(graph, cluster, shape))
    for stage in stages:
        plan = Plan.alone(stage, "absent.toml")  # reading needs no cluster
        text = dumps(plan, graph)
        again = loads(text, graph)
        assert again == plan
        assert dumps(again, graph) == text


def test_layers_share_entries() -> None:
    """The file of a deep model is as short as that of a shallow one."""
    lines = []
    for layers in (4, 12):
        case = ZOO["gpt2"](layers=layers)
        graph = capture(case.model, case.args, case.kwargs).graph
        lines.append(len(dumps(planned(graph), graph).splitlines()))
    assert lines[0] == lines[1] < 120


def test_save_and_load(graph: Graph, tmp_path: Path) -> None:
    plan = megatron(graph)
    save(tmp_path / "plan.json", plan, graph)
    assert load(tmp_path / "plan.json", graph) == plan


def test_pins_are_kept(graph: Graph) -> None:
    """What was asked for comes back, in the order in which later patterns override earlier ones."""
    pins = Pins(
        ops={"up": {"tensor": "n", "data": "b"}, "*": {"data": "b"}},
        params={"*.weight": "S0,I use", "up.bias": "replicate"}, inputs={"x": State.of("S0", "R")},
        outputs={0: State.of("I", "I")},
        memory_limit_bytes=70 * 2**30,
    )  # fmt: skip
    plan = with_stage(replace(megatron(graph), pins=pins), solution=Solution("highs", "optimal", 1.0, 0.0))
    text = dumps(plan, graph)
    again = loads(text, graph)
    assert again == plan and list(again.pins.ops) == ["up", "*"]
    assert dumps(again, graph) == text
    wider = loads(text.replace(str(70 * 2**30), str(80 * 2**30)), graph)
    assert wider.pins.memory_limit_bytes == 80 * 2**30
    assert wider.solution is None  # what was proven is the best answer to another question


def test_pins_are_read_strictly(graph: Graph) -> None:
    wrong = {
        "ops": {"upp": {"data": "b"}, "up": {"rows": "b"}}, "params": {"*.gamma": "replicate", "up.weight": "S0,I zig"},
        "inputs": {"z": "S0,R", "x": "S7,R"}, "outputs": {"3": "I,I"}, "limit": 3,
    }  # fmt: skip
    with pytest.raises(PlanError, match=r"pins\.limit: unknown key"):
        loads(edited(megatron(graph), graph, pins=wrong), graph)
    del wrong["limit"]
    with pytest.raises(PlanError) as error:
        loads(edited(megatron(graph), graph, pins=wrong), graph)
    text = str(error.value)
    assert "7 problems" in text
    for part in (
        'pins.ops["upp"]: matches no op', "the mesh has no axis 'rows'", 'pins.params["*.gamma"]: matches no parameter',
        "'zig' is no lifetime; write 'S0,I step'", 'pins.inputs["z"]: no input', 'pins.inputs["x"]', "the 1 outputs",
    ):  # fmt: skip
        assert part in text


# --- edits by hand ---------------------------------------------------------------------------------------------------


def edited(plan: Plan, graph: Graph, **changes: object) -> str:
    document = json.loads(dumps(plan, graph))
    for key, value in changes.items():
        at = document["stages"][0] if key in document["stages"][0] else document
        if value is None:
            del at[key]
        else:
            at[key] = {**at[key], **value} if isinstance(value, dict) else value
    return json.dumps(document)


def test_an_edit_counts(graph: Graph) -> None:
    """After an edit, routes and price are those of the edited decisions, and the solver's proof is gone."""
    plan = planned(graph)
    assert plan.solution is not None
    other = loads(edited(plan, graph, ops={"up:linear": {"data": "b", "tensor": "n"}}), graph)
    up = next(n.name for n in graph.nodes if n.kind == "op" and n.module == "up")
    assert other.ops[up] == ("b", "n")
    assert other.solution is None
    assert other.price.seconds > plan.price.seconds
    assert loads(dumps(other, graph), graph) == other


def test_a_module_names_its_ops(graph: Graph) -> None:
    """``up`` stands for the ops of that module; an axis that is not named is whole."""
    other = loads(edited(megatron(graph), graph, ops={"up": {"tensor": "n"}}), graph)
    up = next(n.name for n in graph.nodes if n.kind == "op" and n.module == "up")
    assert other.ops[up] == ("I", "n")


def test_later_entries_override(graph: Graph) -> None:
    text = edited(megatron(graph), graph, ops={"*:linear": {"data": "b"}, "down:linear": {"tensor": "replicate"}})
    found = loads(text, graph)
    by_module = {n.module: found.ops[n.name] for n in graph.nodes if n.kind == "op" and n.module}
    assert by_module["up"] == ("b", "I")
    assert by_module["down"] == ("b", "I")  # the new pattern came last
    document = json.loads(dumps(megatron(graph), graph))
    document["stages"][0]["ops"] = {"*:linear": {"data": "b"}, "down:linear": {"tensor": "k"}}
    found = loads(json.dumps(document), graph)
    by_module = {n.module: found.ops[n.name] for n in graph.nodes if n.kind == "op" and n.module}
    assert by_module == {"up": ("b", "I"), "down": ("I", "k")}


def test_routes_may_be_left_out(graph: Graph) -> None:
    plan = planned(graph)
    found = loads(edited(plan, graph, routes=None), graph)
    assert found.reshard_paths == plan.reshard_paths
    assert found.price == plan.price


def test_another_way_for_a_tensor_is_priced(graph: Graph) -> None:
    """A detour that a person writes into ``routes`` is kept, and costs what it costs."""
    plan = megatron(graph)
    found = loads(edited(plan, graph, routes=None), graph)  # priced as it is
    document = json.loads(dumps(found, graph))
    assert document["stages"][0]["routes"]["down:linear"] == ["S0,P -> S0,I"]
    document["stages"][0]["routes"]["down:linear"] = ["S0,P -> S0,S1", "S0,S1 -> S0,I"]
    other = loads(json.dumps(document), graph)
    assert len(other.reshard_paths["linear_1"]) == 2
    assert other.price.activation_seconds != found.price.activation_seconds
    assert other.price.compute_seconds == found.price.compute_seconds


def test_a_stale_price_is_not_believed(graph: Graph) -> None:
    plan = planned(graph)
    document = json.loads(dumps(plan, graph))
    document["stages"][0]["price"]["compute_seconds"] = 1e-9
    assert loads(json.dumps(document), graph).price == plan.price
    document["cluster"] = "pcie-l40s"
    assert loads(json.dumps(document), graph).price.seconds > plan.price.seconds


def test_a_route_that_leads_elsewhere_is_an_error(graph: Graph) -> None:
    document = json.loads(dumps(megatron(graph), graph))
    document["stages"][0]["routes"]["down:linear"] = ["S0,P -> S0,S1"]
    with pytest.raises(PlanError, match=r"does not reach S0,I, as which the tensor is wanted; remove the entry"):
        loads(json.dumps(document), graph)
    document["stages"][0]["routes"]["down:linear"] = ["S0,P -> S0,I"]
    document["stages"][0]["routes"]["up:linear"] = ["S0,S1 -> S0,I"]
    found = loads(json.dumps(document), graph)  # brought somewhere where nobody wants it: harmless, and priced
    assert found.price.seconds > 0


def test_pricing_an_edit_needs_the_cluster(graph: Graph) -> None:
    plan = replace(megatron(graph), cluster="absent.toml")
    assert loads(dumps(plan, graph), graph) == plan
    with pytest.raises(ClusterError, match=r"absent\.toml"):
        loads(edited(plan, graph, ops={"up:linear": {}}), graph)
    assert loads(edited(plan, graph, ops={"up:linear": {}}), graph, load_cluster(CLUSTER)).price.seconds > 0


# --- strict reading --------------------------------------------------------------------------------------------------


def test_all_failures_at_once(graph: Graph) -> None:
    document = json.loads(dumps(megatron(graph), graph))
    document["stages"][0]["ops"] = {"nothing:linear": {"data": "b"}, "up:linear": {"rows": "n", "data": "q"}}
    document["stages"][0]["params"]["up.weight"]["stored"] = "S7,I"
    document["stages"][0]["outputs"] = []
    with pytest.raises(PlanError) as error:
        loads(json.dumps(document), graph)
    text = str(error.value)
    assert "5 problems" in text
    for part in ('ops["nothing:linear"]', 'ops["up:linear"].rows', 'ops["up:linear"].data', "S7,I", "outputs: has 0"):
        assert part in text


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_passes_unseen(graph: Graph, seed: int) -> None:
    """Any value replaced by one of another kind is a PlanError (or MeshError), never another exception."""
    rng = random.Random(seed)
    document = json.loads(dumps(megatron(graph), graph))
    at = document
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))  # type: ignore[arg-type]
        if isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        damaged = [v for v in (None, True, -3, 2.5, "?", [], {}, [1], {"?": 1}) if type(v) is not type(at[key])]
        if key in ("solution", "model", "price", "checksum"):
            damaged.remove(None) if None in damaged else None
        at[key] = rng.choice(damaged)
        break
    try:
        loads(json.dumps(document), graph)
    except (PlanError, MeshError):
        return
    assert key.endswith("seconds") or at[key] in ({}, None, [])


def test_loading_executes_nothing(graph: Graph, tmp_path: Path) -> None:
    """A file that names a model does not make the loader import it."""
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    text = dumps(megatron(graph), graph, {"spec": "evil.py:make"})
    (tmp_path / "plan.json").write_text(text)
    load(tmp_path / "plan.json", graph)
    parse(text)
    assert not marker.exists()


# --- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_patterns_say_what_was_said(seed: int) -> None:
    """Whatever names and values: read with 'later entries override', the patterns give every name its value."""
    rng = random.Random(seed)
    parts = ["layers", "attn", "0", "1", "2", "10", "x[y]", "a*", "mlp"]
    names = sorted({".".join(rng.choices(parts, k=rng.randint(1, 4))) + rng.choice([":add", ":add.1", ":mul"])
                    for _ in range(rng.randint(1, 60))})  # fmt: skip
    values = {n: rng.randint(0, rng.choice([0, 1, 3])) for n in names}
    needed = {n for n in names if rng.random() < 0.7}
    found: dict[str, int] = {}
    for pattern, value in compress(names, values.__getitem__, needed):
        found.update((n, value) for n in names if fnmatchcase(n, pattern))
    assert needed <= set(found)
    assert all(values[n] == v for n, v in found.items())


def test_equal_layers_are_one_pattern() -> None:
    names = [f"layers.{i}.{part}.weight" for i in range(32) for part in ("up", "down")]
    assert compress(names, lambda n: n.split(".")[2]) == [
        ("layers.*.up.weight", "up"),
        ("layers.*.down.weight", "down"),
    ]
    odd = compress(names, lambda n: "odd" if n == "layers.7.up.weight" else "")
    assert odd == [("layers.*.up.weight", ""), ("layers.7.up.weight", "odd"), ("layers.*.down.weight", "")]


def test_meshes_as_text() -> None:
    assert Mesh.parse(" data = 2, tensor=4") == Mesh.of(data=2, tensor=4)
    for text in ("", "data", "data=2,,tensor=2", "2=data", "data=2.5"):
        with pytest.raises(MeshError):
            Mesh.parse(text)


def test_a_key_that_stands_twice_is_refused() -> None:
    """All but the last would be lost."""
    text = f'{{"autopar_plan": {VERSION}, "cluster": "local-x2", "cluster": "local-x4"}}'
    with pytest.raises(PlanError, match="cluster: is repeated in one table; remove one of them"):
        parse(text, "plan.json")


class ReadAround(nn.Module):
    """Running statistics that are read on both sides of the norm that moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.norm.running_mean * 2
        return (self.norm(self.linear(x)) + before + self.norm.running_mean * 3).square().mean()


def test_random_plans_of_a_buffer_that_is_read_around_its_writer_survive_a_file() -> None:
    graph = capture(ReadAround(), (torch.zeros(4, 8),)).graph
    priced, rules = pricer(load_cluster("local-x2"), Mesh.of(data=2)), rules_of(graph)
    plans = [Plan.alone(random_plan(graph, rules, priced, seed), "local-x2") for seed in range(12)]
    assert any(plan.ops["batch_norm"] == ("c",) for plan in plans)  # where the draws had raised when written
    for plan in plans:
        assert loads(dumps(plan, graph), graph) == plan


# --- the version before ----------------------------------------------------------------------------------------------


def test_a_file_of_version_1_keeps_its_decisions(graph: Graph) -> None:
    """Its price is computed anew; what no file of that version has is refused as ever."""
    plan = planned(graph)
    now = json.loads(dumps(plan, graph))
    stage = now["stages"][0]
    sections = ("mesh", "ops", "params", "buffers", "inputs", "outputs", "routes", "price", "solution", "checksum")
    old = {
        "autopar_plan": 1, "model": None, "fingerprint": graph.fingerprint, "cluster": CLUSTER, "optimizer": "adamw",
        "microbatches": 4, "pipeline": {"stages": 1}, "pins": {"ops": {"up": {"data": "b"}}}, "notes": ["a note"],
        **{key: stage[key] for key in sections},
    }  # fmt: skip
    read = loads(json.dumps(old), graph)
    assert read.only().ops == plan.ops and read.params == plan.params and read.reshard_paths == plan.reshard_paths
    assert read.microbatches == 4 and read.price.compute_seconds == pytest.approx(4 * plan.price.compute_seconds)
    assert read.solution is None and read.notes == ("a note",) and read.pins == Pins(ops={"up": {"data": "b"}})
    with pytest.raises(PlanError, match="colour: unknown key"):
        loads(json.dumps({**old, "colour": "green"}), graph)
    with pytest.raises(PlanError, match="version 1 that cannot be read"):
        loads(json.dumps({"autopar_plan": 1}), graph)
