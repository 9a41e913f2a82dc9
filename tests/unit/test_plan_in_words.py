"""What a plan is in the terms of trainers, what its blocks and parts are called, and what a number of tokens costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import command, plan_all
from torch import nn

import autopar
from autopar.capture import capture
from autopar.cli.common import opened
from autopar.cli.report_layouts import cluster_of
from autopar.errors import ClusterError
from autopar.report.axes_in_words import AxisUse
from autopar.report.block_names import block_title, lists_of, modules_in_words
from autopar.report.layouts import LayoutRow
from autopar.report.parts import layout_of_parts, parts_of
from autopar.report.plan_in_words import layout_in_words, plan_in_words
from autopar.report.rows import BlockRows
from autopar.report.workload import cost_of, grouped, parse_amount, short_count, workload_of
from autopar.words.meshes import Mesh

BY_ROWS = [word for name in ("first", "layers.*") for word in ("--pin", f"{name}:data=b")]
KINDS = {
    "data": ("-c", "local-x4", "--mesh", "data=4", *BY_ROWS, "--keep-replicated", "*"),
    "sharded": ("-c", "local-x4", "--mesh", "data=4", *BY_ROWS, "--pin-param", "*.up.weight=S0",
                "--keep-replicated", "*.down.*"),
    "piped": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b", "--recompute", "layers.*"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_all(tmp_path_factory.mktemp("words"), KINDS)


def words_of(folder: Path, kind: str) -> str:
    captured, asked = opened(folder / f"{kind}.json", trust=True)
    return plan_in_words(captured.graph, asked.plan)


def test_data_ranks_and_their_states(folder: Path) -> None:
    assert words_of(folder, "data") == "DP 4"
    sharded = words_of(folder, "sharded")
    assert sharded.startswith("DP 4, ZeRO-1 (") and sharded.endswith("% of the parameters)")


def test_pipelines_and_recomputation(folder: Path) -> None:
    words = words_of(folder, "piped")
    assert "PP 2 (1f1b)" in words and "full recompute" in words


def test_axes_are_named_by_what_they_shard() -> None:
    """Both axes have the other's name; an axis that does several things says so."""
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    captured = capture(net, (torch.randn(8, 64),), {})
    names = [node.name for _, node in captured.graph.of_kind("op")]
    first, last = names[0], names[-1]
    mesh = Mesh.of(data=2, tensor=4)

    def words(**ops: tuple[str, str]) -> str:
        stage = SimpleNamespace(
            mesh=mesh, ops={first: ops["first"], last: ops["last"]}, params={}, recompute=(), memory={}
        )  # fmt: skip
        schedule = SimpleNamespace(n_ranks=1, name="none")
        plan = SimpleNamespace(stages=(stage,), schedule=schedule, pins=autopar.plans.pins.Pins())
        return plan_in_words(captured.graph, plan)  # type: ignore[arg-type]

    assert words(first=("n", "b"), last=("k", "b")) == "TP 2, DP 4"
    assert words(first=("b", "n"), last=("b", "b")) == "TP 4 (50% along the batch), DP 2"
    assert words(first=("b", "R"), last=("b", "b")) == "DP 2, tensor=4 (50% replicated, 50% along the batch)"
    assert words(first=("b", "R"), last=("b", "R")) == "DP 2, tensor=4 (100% replicated)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=4,pp=8,vp=4,dp=2,zero=1", "TP 4, PP 8 (interleaved 4), DP 2, ZeRO-1"),
        ("dp=8,fsdp", "DP 8, FSDP"),
        ("cp=4:ring,tp=1,dp=2,mbs=1", "CP 4, ring, DP 2, microbatches of 1"),
        ("dp=1", "one device"),
        ("dp=2,something=3", "DP 2, something=3"),
    ],
)
def test_requested_layouts_keep_their_words(text: str, words: str) -> None:
    assert layout_in_words(text) == words


def graph_of(*modules: str) -> SimpleNamespace:
    nodes = [SimpleNamespace(module=module) for module in modules]
    return SimpleNamespace(of_kind=lambda _: list(enumerate(nodes)))


def test_lists_have_the_shortest_names_that_tell_them_apart() -> None:
    one = graph_of("model.embed", "model.layers.0.mlp", "model.layers.1.mlp", "model.norm")
    assert lists_of(one) == {"model.layers": "layers"}
    assert lists_of(graph_of("transformer.h.0.attn")) == {"transformer.h": "blocks"}
    two = graph_of("model.vision.encoder.layers.0", "model.text.layers.0", "model.text.layers.1.experts.3")
    assert lists_of(two) == {"model.vision.encoder.layers": "vision layers", "model.text.layers": "text layers"}
    assert lists_of(graph_of("layer1.0.conv", "layer2.0.conv")) == {"layer1": "layer1", "layer2": "layer2"}


def test_blocks_are_called_by_number() -> None:
    lists = {"model.layers": "layers"}
    assert block_title(lists, BlockRows("model.layers.0 .. model.layers.17", 18, ())) == "layers 0 to 17"
    modules = ["model.embed_tokens", "model", "model.layers.0.mlp", "model.layers.1", "model.layers.3", "model.norm"]
    assert modules_in_words(lists, modules) == "embed_tokens, layers 0 to 1 and 3, norm"
    assert modules_in_words(lists, ["model.layers.4.a", "model.layers.4.b"]) == "layer 4"


def test_parts_are_next_to_the_lists() -> None:
    two = graph_of(
        "model.vision_tower.encoder.layers.0", "model.projector.linear", "model", "model.language_model.layers.0",
        "model.language_model.norm", "lm_head",
    )  # fmt: skip
    assert parts_of(two) == ["model.vision_tower", "model.projector", "model.language_model", "lm_head"]  # type: ignore[arg-type]
    assert parts_of(graph_of("model.layers.0", "lm_head")) == []  # type: ignore[arg-type]
    assert parts_of(graph_of("layer1.0", "layer2.0", "fc")) == []  # type: ignore[arg-type]


def test_each_part_has_its_own_layout(tmp_path: Path) -> None:
    """The encoder is cut along its features and the decoder along the batch, as the pins say."""
    (tmp_path / "two.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.encoder = nn.ModuleDict({'layers': nn.ModuleList(nn.Linear(64, 64, "
        "bias=False) for _ in range(2))})\n        self.decoder = nn.ModuleDict({'layers': nn.ModuleList(nn.Linear(64, "
        "64, bias=False) for _ in range(2))})\n\n    def forward(self, x):\n        for part in (self.encoder, "
        "self.decoder):\n            for layer in part['layers']:\n                x = layer(x).relu()\n"
        "        return x.square().mean()\n\n\ndef make():\n    return Net(), (torch.randn(8, 64),)\n"
    )
    code, _, err = command(
        "plan", tmp_path / "two.py:make", "-c", "local-x4", "--mesh", "a=4", "--microbatches", 1, "--pin",
        "encoder.layers.*:a=n", "--pin", "decoder.layers.*:a=b", "-o", tmp_path / "two.json",
    )  # fmt: skip
    assert code == 0, err
    captured, asked = opened(tmp_path / "two.json", trust=True)
    encoder, decoder = layout_of_parts(captured.graph, asked.plan, AxisUse(captured.graph))
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert encoder.layout.startswith("TP 4") and decoder.layout.startswith("DP 4")
    assert encoder.share == decoder.share == 0.5 and encoder.parameters == 2 * 64 * 64
    code, _, err = command("report", tmp_path / "two.json", "-o", tmp_path / "two.html", "--trust")
    assert code == 0, err
    page = (tmp_path / "two.html").read_text()
    assert "Its parts" in page and encoder.layout in page and "encoder layers 0 to 1" in page


def test_what_tokens_cost() -> None:
    row = LayoutRow("x", 2.0, 0.0, 1.0, 1e6, 0.5, devices=8)
    cost = cost_of(row, 3.6e12, 2.5)
    assert cost.seconds == 3.6e6 and cost.device_hours == 8000.0 and cost.money == 20000.0
    assert cost.time == "41.67 days" and cost.words == "8,000 device-hours, price 20,000"
    assert cost_of(row, 3.6e12).money is None
    assert parse_amount("1.5T") == 1.5e12 and parse_amount("300b") == 3e11 and parse_amount("1_000") == 1000
    assert [parse_amount(text) for text in ("", "T", "-1T", "0", "nan", "one", "1e99")] == [None] * 7
    assert [short_count(n) for n in (8.03e9, 124e6, 912, 999.9e6)] == ["8.03B", "124M", "912", "1B"]
    assert [grouped(n) for n in (37123.0, 12.345, 999999)] == ["37,100", "12.3", "1,000,000"]


def test_what_a_step_trains(folder: Path) -> None:
    captured, asked = opened(folder / "piped.json", trust=True)
    work = workload_of(captured.graph, asked.plan)
    assert (work.rows, work.sequence, work.precision, work.unit) == (8, None, "float32", "samples")
    assert work.parameters == sum(p.numel() for p in _net(folder).parameters())
    assert workload_of(captured.graph, replace(asked.plan)).words.endswith("parameters, batch 8, float32")


def _net(folder: Path) -> nn.Module:
    space: dict[str, object] = {"__name__": "net"}
    exec((folder / "net.py").read_text(), space)
    return space["make"]()[0]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "n", "other"),
    [
        ("dgx-h100-x8", 64, "dgx-h100-x8"),
        ("dgx-h100-x8", 16, "dgx-h100-x8@0-15"),
        ("dgx-h100-x8", 128, "dgx-h100-x16"),
        ("dgx-h100 as nemo", 16, "dgx-h100-x2 as nemo"),
        ("dgx-h100 as nemo", 1, "dgx-h100@0 as nemo"),
    ],
)
def test_clusters_of_other_sizes(name: str, n: int, other: str) -> None:
    assert cluster_of(name, n) == other


def test_what_is_no_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="20 are no whole number of machines; ask for 16 or 24"):
        cluster_of("dgx-h100", 20)
    with pytest.raises(ClusterError, match="has 4 devices, and 8 were asked for"):
        cluster_of("dgx-h100@0-3", 8)


@pytest.mark.parametrize("option", [("--tokens", "many"), ("--devices", "2,x"), ("--devices", "0")])
def test_wrong_numbers_are_refused(folder: Path, option: tuple[str, str]) -> None:
    code, _, err = command("report", folder / "piped.json", *option, "-o", folder / "never.html", "--trust")
    assert code == 2 and f"{option[0]} is {option[1]}" in err and not (folder / "never.html").exists()


def test_other_numbers_of_devices_are_planned(folder: Path) -> None:
    """Each has a point and a row, and a number that cannot be had says why; without a request there is none."""
    code, _, err = command(
        "report", folder / "data.json", "-o", folder / "devices.html", "--trust", "--devices", "2,4", "--tokens", "1M",
        "--price-per-hour", "2",
    )  # fmt: skip
    assert code == 0, err
    page = (folder / "devices.html").read_text()
    assert page.count('class="dot ') == 2 and 'id="devices-0"' in page and "2 devices" in page
    assert "price of 1M samples" in page and "device-hours for 1M samples" in page
