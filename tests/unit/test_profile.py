"""Measured profiles: read strictly, priced where they know an op and corrected elsewhere, made by the command line."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import command
from torch import nn
from unit.test_bad_input import put

import autopar
from autopar.certificate import check
from autopar.cli.common import UsageError
from autopar.cli.profiling import on_device_of
from autopar.errors import ClusterError
from autopar.planner.inter_op.replan import Replanner
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.building.price import key_of, pricer
from autopar.planner.intra_op.building.space import strategies
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans import detection
from autopar.plans.clusters import profile_of
from autopar.profiling.document import dumps
from autopar.profiling.ops import passes_of
from autopar.profiling.quiet import quietest
from autopar.report.coverage import coverage
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.costs import costs_of
from cost_models.measured import between, corrected, fit_correction
from hardware_profiles import Cluster, ProfileError, load_cluster
from hardware_profiles.measurements import tensor_text

ONE = Mesh.of(data=1)


class Net(nn.Module):
    """Two layers that are alike but for their width, a residual, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.norm = nn.Linear(16, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        return self.norm(y + self.mid(y)).square().mean()


def graph_of() -> Graph:
    return autopar.capture(Net(), (torch.ones(8, 16),)).graph


DOCUMENT: dict[str, Any] = {
    "autopar_profile": 1, "cluster": "local-x2",
    "provenance": {
        "date": "2026-01-31", "torch": "2.13.0", "processor": "a core", "threads": 1, "processes": 2, "rounds": 6,
        "load": 0.1, "others": 0.0, "model": "net.py:make", "meshes": [], "left_out": [],
    },
    "corrections": {
        "matmul": {"forward": [1e-3, 2.0], "backward": [0.0, 3.0]},
        "other": {"forward": [2e-3, 0.0], "backward": [4e-3, 0.0]},
    },
    "overheads": {
        "forward_seconds": 0.01, "backward_seconds": 0.02, "input_seconds": 0.03, "weight_seconds": 0.04,
        "input_op_seconds": 0.001, "weight_op_seconds": 0.002, "step_seconds": 0.5,
    },
    "accumulate": [[64, 1e-4], [1024, 2e-4]], "accumulate_new": [[64, 3e-4]],
    "transfers": {"send_recv": [[1024, 0.25], [2048, 0.5]]},
    "optimizers": {"adamw": {"tensor_seconds": 0.1, "byte_seconds": 1e-3}},
    "ops": {
        "aten.relu.default(float32[8 32]*)": {
            "kind": "pointwise", "forward_seconds": 0.125, "backward_seconds": 0.25, "input_seconds": 0.25,
            "weight_seconds": 0.0,
        },
        "aten.linear.default(float32[8 32]*, float32[32 32]*, float32[32]*)": {
            "kind": "matmul", "forward_seconds": 1.0, "backward_seconds": 2.0, "input_seconds": 1.25,
            "weight_seconds": 1.0,
        },
    },
}  # fmt: skip


def loaded(tmp_path: Path, document: Any = DOCUMENT) -> Cluster:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    return load_cluster(path)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_profile_is_a_cluster(tmp_path: Path) -> None:
    cluster = loaded(tmp_path)
    assert cluster.n_devices == 2 and cluster.name == "profile" and cluster.measured is not None
    assert cluster.measured.ops["aten.relu.default(float32[8 32]*)"].backward_seconds == 0.25
    assert load_cluster("local-x2").measured is None


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("autopar_profile",), 2, "got 2, this autopar reads version 1"),
        (("speed",), 3, "speed: is an unknown key"),
        (("provenance", "date"), None, "provenance.date: is missing"),
        (("provenance", "mood"), 1, "provenance.mood: is an unknown key"),
        (("accumulate",), None, "accumulate: is missing"),
        (("accumulate",), [[64, 1e-4], [32, 1e-4]], "accumulate: expected sizes that rise"),
        (("accumulate",), [[64, -1.0]], "accumulate: expected a list of [bytes, seconds]"),
        (("transfers", "send_recv"), [[64, None]], "transfers.send_recv: expected a list"),
        (("transfers", "send_recv"), [[64, float("inf")]], "Infinity is no number of JSON"),
        (("transfers", "teleport"), [[64, 1.0]], "transfers.teleport: is no collective"),
        (("corrections", "other"), None, "corrections.other: is missing"),
        (("corrections", "matmul", "forward"), [1.0], "corrections.matmul.forward: got [1.0], expected"),
        (("corrections", "magic"), {"forward": [0, 1], "backward": [0, 1]}, "corrections.magic: is no kind of op"),
        (("overheads", "step_seconds"), float("nan"), "NaN is no number of JSON"),
        (("overheads", "step_seconds"), -1, "overheads.step_seconds: got -1, expected a number >= 0"),
        (("optimizers", "adamw", "byte_seconds"), "1", "optimizers.adamw.byte_seconds: got str '1', expected a number"),
        (("ops", "aten.relu.default(float32[8 32]*)", "forward_seconds"), -1.0, "got -1.0, expected a number >= 0"),
        (("ops", "aten.relu.default(float32[8 32]*)", "kind"), "odd", "got 'odd': known are matmul"),
        (("cluster",), "local-y2", "unknown cluster 'local-y2'"),
    ],
)  # fmt: skip
def test_reading_is_strict(tmp_path: Path, path: tuple[str, ...], value: Any, said: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    put(document, path, value)
    with pytest.raises(ProfileError) as error:
        loaded(tmp_path, document)
    assert said in str(error.value)


def test_all_failures_are_told_at_once(tmp_path: Path) -> None:
    document = {**DOCUMENT, "speed": 1, "accumulate": []}
    with pytest.raises(ProfileError, match="2 problems"):
        loaded(tmp_path, document)


def test_a_profile_of_a_profile(tmp_path: Path) -> None:
    loaded(tmp_path)
    (tmp_path / "second.json").write_text(json.dumps({**DOCUMENT, "cluster": "profile.json"}))
    with pytest.raises(ProfileError, match="is a profile itself"):
        load_cluster(tmp_path / "second.json")


def test_writing_is_deterministic(tmp_path: Path) -> None:
    text = dumps(DOCUMENT)
    assert dumps(json.loads(text)) == text
    shuffled = {**DOCUMENT, "ops": dict(reversed(DOCUMENT["ops"].items()))}
    assert dumps(shuffled) == text
    (tmp_path / "p.json").write_text(text)
    assert load_cluster(tmp_path / "p.json").measured is not None


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_between_measured_sizes() -> None:
    points = ((64.0, 1.0), (128.0, 2.0), (256.0, 3.0))
    assert [between(points, n) for n in (1, 64, 96, 128, 192, 256, 512)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0]
    assert between(((64.0, 1.0),), 1e9) == 1.0


def test_fits() -> None:
    assert fit_correction([1.0, 2.0, 4.0], [5.0, 7.0, 11.0]) == pytest.approx((3.0, 2.0))
    base, factor = fit_correction([1.0, 2.0], [1.0, 4.0])  # a line through these has a negative base
    assert base == 0.0 and 1.0 < factor < 2.0
    assert fit_correction([0.0, 0.0], [2.0, 2.0]) == (2.0, 0.0)
    assert fit_correction([], []) == (0.0, 1.0)


def test_transfers_are_those_measured(tmp_path: Path) -> None:
    cluster, plain = loaded(tmp_path), load_cluster("local-x2")
    axis, formula = (costs_of(c).axes({"data": 2}, (0, 1))["data"] for c in (cluster, plain))
    assert axis.seconds("send_recv", 1536) == 0.375
    assert axis.seconds("all_reduce", 1536) == formula.seconds("all_reduce", 1536)  # not measured


def test_ops_are_priced_as_measured_or_corrected(tmp_path: Path) -> None:
    graph, cluster = graph_of(), loaded(tmp_path)
    priced, plain = pricer(cluster, ONE), pricer(load_cluster("local-x2"), ONE)
    rules = rules_of(graph)
    seen = set()
    for node, rule in zip(graph.nodes, rules, strict=True):
        if node.kind != "op":
            continue
        assert rule is not None
        whole = strategies(graph, node, rule, ONE)[0]
        got = priced.op(graph, node, rule, whole)[0]
        forward = plain.forward(graph, node, rule, whole)[0]
        formula = plain.op(graph, node, rule, whole)[0]
        seconds = priced.compute(graph, node, rule, whole)
        assert seconds.total == got
        if node.target == "aten.relu.default":
            assert got == 0.375 and seconds.from_profile
        elif node.target == "aten.linear.default" and node.module == "mid":
            assert got == 3.0 and priced.forward(graph, node, rule, whole)[0] == 1.0
            assert priced.phases(graph, node, rule, whole) == (1.0, 3.0, 1.0, 0.25, True)
        elif node.target == "aten.linear.default":
            assert got == pytest.approx(1e-3 + 2 * forward + 3 * (formula - forward))
        else:
            assert got == pytest.approx(6e-3) and not seconds.from_profile
        seen.add(node.target)
    assert len(seen) >= 4
    assert corrected(cluster.measured, "conv", 1.0, 1.0, False) == (2e-3, 0.0)  # type: ignore[arg-type]


def test_the_checker_finds_the_same_prices(tmp_path: Path) -> None:
    """It takes its keys from the tensors that the emitted program really gets."""
    graph, cluster = graph_of(), loaded(tmp_path)
    plan = plan_graph(graph, cluster, ONE, Options())
    assert check(plan, graph, cluster).failures == []
    assert plan.price.seconds > 3.0
    found = coverage([graph], [plan], cluster)
    assert found is not None and found["measured_seconds"] == pytest.approx(3.375)


def test_overheads_of_a_stage(tmp_path: Path) -> None:
    graph, cluster = graph_of(), loaded(tmp_path)
    plan = plan_graph(graph, cluster, ONE, replace(Options(), microbatches=2))
    priced, plain = pricer(cluster, ONE), pricer(replace(cluster, measured=None), ONE)
    own = phases(graph, plan, priced)
    assert phases(graph, plan, plain).split_seconds == 0.0
    bytes_of = [node.out.n_bytes for _, node in graph.of_kind("param")]
    assert own.step_seconds == pytest.approx(0.5 + 0.1 * len(bytes_of) + 1e-3 * sum(bytes_of))
    ops = sum(node.kind == "op" for node in graph.nodes)
    assert own.input_seconds == pytest.approx(0.03 + 0.001 * ops)  # nobody waits for gradients of this model's input
    summed = between(((64, 1e-4), (1024, 2e-4)), 8 * 32 * 4)  # y is read twice
    backward = sum(
        sum(priced.op(graph, n, r, s := strategies(graph, n, r, ONE)[0])) - sum(priced.forward(graph, n, r, s))
        for n, r in zip(graph.nodes, rules_of(graph), strict=True) if n.kind == "op" and r is not None
    )  # fmt: skip
    added = sum(between(((64, 1e-4), (1024, 2e-4)), n) for n in bytes_of) / 2
    assert own.backward_seconds == pytest.approx(backward + summed + added + 0.02)


def test_a_plan_remembers_its_profile(tmp_path: Path) -> None:
    graph, cluster = graph_of(), loaded(tmp_path)
    asked = PipelineOptions(2, 2, ("1f1b",), ONE, may_recompute=False)
    found = plan_pipeline(graph, cluster, 2, asked, cluster_name=str(tmp_path / "profile.json"))
    again, _ = Replanner(graph, found.plan, load_cluster(found.plan.cluster), Options()).simulated()
    assert again.seconds == found.plan.seconds
    without, _ = Replanner(graph, found.plan, load_cluster("local-x2"), Options()).simulated()
    assert without.seconds < found.plan.seconds / 10


def test_python_takes_a_profile(tmp_path: Path) -> None:
    loaded(tmp_path)
    path = tmp_path / "profile.json"
    plan = autopar.plan(Net(), None, (torch.ones(8, 16),), mesh="data=1", profile=path)
    assert plan.cluster == path.as_posix()
    with pytest.raises(ClusterError, match="of 2 devices"):
        autopar.plan(Net(), "local-x4", (torch.ones(8, 16),), mesh="data=1", profile=path)
    with pytest.raises(ClusterError, match="without measurements"):
        profile_of("local-x2")


# --- measuring -------------------------------------------------------------------------------------------------------


def test_ops_that_strategies_can_produce() -> None:
    graph, cluster = graph_of(), load_cluster("local-x2")
    alone = passes_of(graph, cluster, (), 1000, 1e9)
    assert len(alone.passes) == 1 and not alone.left_out
    linears = [op for op in alone.passes[0] if op.key.startswith("aten.linear")]
    assert [op.key for op in linears][1] == list(DOCUMENT["ops"])[1]
    assert [t.param for t in linears[0].ins] == [False, True, True]
    cut = passes_of(graph, cluster, (Mesh.of(data=2),), 1000, 1e9)
    keys = {op.key for one in cut.passes for op in one}
    assert {op.key for op in alone.passes[0]} < keys
    for shape in ((4, 32), (8, 16)):  # the batch and the features halved
        assert f"aten.relu.default({tensor_text('float32', shape, True)})" in keys
    few = passes_of(graph, cluster, (Mesh.of(data=2),), 3, 1e9)
    assert len({op.key for one in few.passes for op in one}) == 3 and "beyond the first 3" in few.left_out[-1]


def test_keys_need_no_communication_inside() -> None:
    graph = graph_of()
    rules = rules_of(graph)
    i = next(i for i, n in enumerate(graph.nodes) if n.target == "aten.layer_norm.default")
    rule = rules[i]
    assert rule is not None
    node, mesh = graph.nodes[i], Mesh.of(data=2)
    keys = [key_of(graph, node, rule, s, mesh) for s in strategies(graph, node, rule, mesh)]
    assert None in keys  # the normalized dim cut: sums over ranks


def test_quiet_rounds_are_taken() -> None:
    assert quietest([0.5, 0.0, 0.05, 0.9], lambda x: x, 1) == [0.0, 0.05]
    assert quietest([0.5, 0.7, 0.9], lambda x: x, 2) == [0.5, 0.7]


NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


def make():
    return Net(), (torch.ones(4, 16), torch.zeros(4, dtype=torch.long))
"""


def test_profile_then_plan(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    code, out, err = command(
        "profile", tmp_path / "net.py:make", "--microbatches", 2, "-o", profile, "--seconds", 0.1, "--json"
    )
    assert code == 0, err
    said = json.loads(out)
    assert said["ops"] == 6 and said["kinds"]["matmul"]["ops"] == 3 and said["provenance"]["processes"] == 2
    assert dumps(json.loads(profile.read_text())) == profile.read_text()
    words = ("--stages", 2, "--microbatches", 2, "--schedule", "1f1b", "-o", plan)
    code, out, err = command("plan", tmp_path / "net.py:make", "--cluster", profile, *words)
    assert code == 0, err
    assert "priced from measurements: 100.0% of their seconds" in out
    assert json.loads(plan.read_text())["cluster"] == "profile.json"
    seconds = json.loads(plan.read_text())["seconds"]
    for what in ("show", "simulate"):
        code, out, err = command(what, plan, "--json", "--trust")
        assert code == 0 and json.loads(out)["seconds"] == pytest.approx(seconds), err
        assert json.loads(out)["profile"]["computed_seconds"] == 0
    code, _, err = command("plan", tmp_path / "net.py:make", "--profile", profile, "--cluster", "local-x4")
    assert code == 2 and "leave the cluster out" in err


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    model = tmp_path / "net.py:make"
    for words, said in (
        (("-o", tmp_path / "p.toml"), "ends in .json"),
        (("-o", tmp_path / "no" / "p.json"), "there is no folder"),
        (("-o", tmp_path / "p.json", "--processes", 3), "--processes is 3; give a number from 1 to 2"),
        (("-o", tmp_path / "p.json", "--seconds", 0), "--seconds is 0.0; give a number from 0.001"),
        (("-o", tmp_path / "p.json", "--cluster", "dgx-h100"), "name a cluster of this machine's devices"),
        (("-o", tmp_path / "p.json", "--device", "cuda"), "local-x2 has CPUs"),
    ):
        code, out, err = command("profile", model, *words)
        assert code == 2 and not out and said in " ".join(err.split()), (words, err)
    code, _, err = command("plan", model)
    assert code == 2 and "--cluster" in err


@pytest.mark.parametrize(
    ("cluster", "asked", "product", "says"),
    [
        ("dgx-h100", "auto", "NVIDIA H100 80GB HBM3", "cuda"),
        ("dgx-h100", "cuda", "NVIDIA H100 80GB HBM3", "cuda"),
        ("dgx-h100", "auto", "NVIDIA A100-SXM4-80GB", "here is NVIDIA A100-SXM4-80GB"),
        ("dgx-h100", "cpu", "NVIDIA H100 80GB HBM3", "2 processes on the CPU"),
        ("local-x2", "auto", "NVIDIA H100 80GB HBM3", "cpu"),
        ("local-x2", "cuda", "NVIDIA H100 80GB HBM3", "has CPUs"),
    ],
)
def test_a_profile_measures_the_devices_of_its_cluster(
    cluster: str, asked: str, product: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = detection.RankRecord("host", product, 80e9)
    monkeypatch.setattr(detection, "record_here", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: product)
    try:
        measured = on_device_of(cluster, load_cluster(cluster), asked, 2)
    except UsageError as error:
        measured = str(error)
    assert says in measured
