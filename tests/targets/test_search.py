"""What trainers can say, the search among it, and the way from a plan to files and back."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.capture import capture
from autopar.cli import app
from autopar.errors import InfeasibleError, PlanError
from autopar.frontends.models import load_model
from autopar.planner.layouts.layout_words import parse_layout, words_of
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.plans.clusters import get_cluster
from autopar.report.memory_contents import memory_of_devices
from autopar.targets import target_named, targets
from autopar.targets.exporting import Exporter, is_of_words
from autopar.targets.pricing import best_changes, changed, layout_words, where_time_goes
from autopar.targets.space import can_say, refusal, shapes, storages, text_of
from autopar.targets.target import Config, ConfigError, Export, Target, WrittenFiles

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
ROWS, SEQ, CLUSTER = 8, 16, "local-x4"


def written(export: Export) -> WrittenFiles:
    return WrittenFiles({"words.txt": export.layout.text}, ("train.py",))


PLAIN = Target(
    "plain", "Plain 1.0", "autopar",
    {"dp": None, "tp": None, "sp": ("",), "pp": None, "vp": ("1", "2"), "zero": ("0", "1"),
     "recompute": ("none", "full"), "schedule": ("1f1b", "gpipe")},
    written, lambda layout, model: "Plain 1.0 has at most tp=2, tp=4 is asked for" if layout.sizes["tp"] > 2 else "",
)  # fmt: skip


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(TINY))
    loaded = load_model(f"hf:{file}", ROWS, SEQ)
    captured = capture(loaded.model, loaded.args, loaded.kwargs)
    layouts = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs))
    return Exporter(PLAIN, loaded, captured, layouts, CLUSTER, ROWS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp=4", ""), ("tp=2,sp,pp=2,zero=0", ""), ("dp=4,zero=1,mbs=2,recompute=full", ""), ("dp=4,cp=1", ""),
        ("pp=4,schedule=gpipe", ""), ("pp=2,dp=2,schedule=1f1b", ""),
        ("dp=2,cp=2", "has no cp, cp=2"), ("dp=4,zero=3", "has zero 0 or 1, 3"), ("dp=4,fsdp", "has no fsdp"),
        ("tp=4", "at most tp=2"), ("pp=4,schedule=zb-h1", "schedule 1f1b or gpipe"),
        ("pp=2,dp=2,vp=2", "schedules 1f1b, gpipe, interleaved-1f1b"),
        ("dp=4,recompute=full:1", "has recompute none or full"),
    ],
)  # fmt: skip
def test_refusals_name_the_word_and_what_there_is(exporter: Exporter, text: str, why: str) -> None:
    found = refusal(PLAIN, parse_layout(text), exporter.model)
    assert (why in found) if why else not found


def test_words_have_one_text() -> None:
    assert text_of(words_of("sp,zero=1,tp=2,dp=1,pp=2")) == "tp=2,sp,pp=2,zero=1"
    assert text_of({"dp": "1", "vp": None}) == "dp=1"


def test_patterns_allow_values_that_are_not_tried() -> None:
    target = replace(PLAIN, words={**PLAIN.words, "recompute": ("none", "full", "selective:*"), "fsdp": ("", "*")})
    assert can_say(target, "recompute", "selective:self_attn")
    assert storages(target, 8)[:4] == [{"zero": "1"}, {"fsdp": ""}, {"fsdp": "keep"}, {"fsdp": "8"}]


def test_shapes_fill_the_cluster_and_divide_heads(exporter: Exporter) -> None:
    found = list(shapes(PLAIN, exporter.model, get_cluster("dgx-h100-x2"), SEQ))
    assert all(int(s["tp"]) * int(s["pp"]) * int(s["cp"]) * int(s["dp"]) == 16 for s in found)
    assert {s["tp"] for s in found} == {"1", "2", "4"}  # of 4 heads
    assert {s["pp"] for s in found} == {"1", "2", "4"}  # of 4 blocks


def test_search_finds_no_slower_layout_than_any_other(exporter: Exporter) -> None:
    search = exporter.search()
    best = search.find().best
    others = ["dp=4", "dp=4,zero=1,mbs=2", "tp=2,dp=2", "tp=2,sp,dp=2,mbs=4", "pp=2,dp=2,mbs=2", "pp=4,mbs=2", "pp=4"]
    for text in others:
        assert best.seconds <= exporter.layouts.price(exporter.where, text).seconds * (1 + 1e-9), text
    assert not refusal(PLAIN, best.layout, exporter.model)


def test_search_keeps_reasons(exporter: Exporter) -> None:
    def unwritable(found: object) -> None:
        raise PlanError("no such stage")

    search = exporter.search()
    search.check = unwritable
    with pytest.raises(InfeasibleError, match=r"Plain 1.0 has no layout of this model.*no such stage"):
        search.find()
    assert "no such stage" in search._reasons.values()


def test_a_layout_is_exported_as_it_is(exporter: Exporter) -> None:
    found = exporter.of_words("tp=2,sp,dp=2,zero=1,mbs=2")
    export, files = exporter.export(found)
    assert files.files["words.txt"] == "tp=2,sp,dp=2,zero=1,mbs=2"
    assert (export.rows_of_rank, export.microbatches) == (2, 2)
    assert export.priced.plan.pins.target == "plain"
    with pytest.raises(PlanError, match="at most tp=2"):
        exporter.of_words("tp=4")


def test_the_nearest_layout_says_what_differs_and_costs(exporter: Exporter) -> None:
    plan = exporter.layouts.price(exporter.where, "pp=2,dp=2,mbs=2,schedule=zb-h1").plan
    cost = exporter.nearest(plan)
    what = {d.what: (d.of_plan, d.written) for d in cost.differences}
    assert "schedule" in what and what["schedule"][1] in ("1f1b", "gpipe")
    assert cost.found.seconds - cost.seconds == pytest.approx(cost.facts()["seconds"])
    assert "on the fullest device" in cost.lines()[-1]


def test_edited_plans_are_seen(exporter: Exporter) -> None:
    plan, other = (exporter.layouts.price(exporter.where, text).plan for text in ("tp=2,dp=2", "tp=2,dp=2,zero=1"))
    assert is_of_words(plan, plan)
    assert not is_of_words(plan, other)


def test_time_adds_up(exporter: Exporter) -> None:
    plan = exporter.layouts.price(exporter.where, "pp=2,dp=2,zero=1,mbs=2").plan
    assert sum(where_time_goes(plan).values()) == pytest.approx(plan.seconds)


@pytest.mark.parametrize("text", ["pp=4,m=2", "pp=2,dp=2,m=4,schedule=gpipe", "pp=2,dp=2,zero=1,m=4", "pp=4"])
def test_memory_adds_up(exporter: Exporter, text: str) -> None:
    found = exporter.layouts.price(exporter.where, text)
    devices = memory_of_devices(found.pinned.graph, found.plan, exporter.hardware)
    assert max(device.n_bytes for device in devices) == found.memory_bytes


def test_changes_help(exporter: Exporter) -> None:
    search = exporter.search()
    found = exporter.layouts.price(search.where, "tp=2,dp=2,mbs=1,recompute=full")
    for change in best_changes(search, found):
        assert change.seconds == pytest.approx(found.seconds - change.found.seconds) and change.seconds > 0
        assert not refusal(PLAIN, change.found.layout, exporter.model)
    assert changed(words_of("tp=2,sp,dp=2"), words_of("tp=2,dp=2,zero=1")) == "without sp, zero=1"


def test_dp_follows_from_the_devices() -> None:
    assert layout_words(Config({"tp": "2", "mbs": "1"}), 8, 16, "x") == "tp=2,dp=4,mbs=1"
    with pytest.raises(ConfigError, match="tp 3 do not divide the cluster's 8 devices"):
        layout_words(Config({"tp": "3"}), 8, 16, "x")
    with pytest.raises(ConfigError, match="16 devices, the cluster has 8"):
        layout_words(Config({}, devices=16), 8, 16, "x")
    with pytest.raises(ConfigError, match="batch of 10 rows is no multiple of 4 data ranks x 1 rows"):
        layout_words(Config({"tp": "2", "mbs": "1"}), 8, 10, "x")


def test_unknown_trainers_are_named() -> None:
    with pytest.raises(PlanError, match="did you mean 'megatron'"):
        target_named("megatorn")
    for name, target in targets().items():
        assert target.name == name and target.write is not None
        get_cluster(f"dgx-h100 as {target.software}")  # its record of software is there


def run(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("megatron", "arguments.txt"),
        pytest.param("fsdp2", "parallelize.py", marks=pytest.mark.slow),
        pytest.param("torchtitan", "torchtitan_plan.py", marks=pytest.mark.slow),
        pytest.param("deepspeed", "ds_config.json", marks=pytest.mark.slow),
        pytest.param("accelerate", "accelerate.yaml", marks=pytest.mark.slow),
    ],
)
def test_plan_export_price_agree(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    said = run(["plan", "hf:config.json", "--batch", "8", "--seq", "16", "-c", CLUSTER, "--for", name, "-o", "p.json"],
               tmp_path, monkeypatch)  # fmt: skip
    assert said.exit_code == 0, said.output
    plan = json.loads((tmp_path / "p.json").read_text())
    assert plan["pins"]["target"] == name and plan["pins"]["layout"]
    said = run(["export", "p.json", "--to", name, "-o", "out", "--json"], tmp_path, monkeypatch)
    assert said.exit_code == 0, said.output
    record = json.loads((tmp_path / "out" / "autopar.json").read_text())
    assert record["seconds"] == plan["seconds"] and record["not_said"] is None
    for script in ("launch.sh", "launch.slurm"):
        subprocess.run(["bash", "-n", script], cwd=tmp_path / "out", check=True)
    said = run(["price", f"out/{file}", "--model", "hf:config.json", "-c", CLUSTER, "--of", name, "--json"],
               tmp_path, monkeypatch)  # fmt: skip
    assert said.exit_code == 0, said.output
    again = json.loads(said.stdout)
    assert again["seconds"] == pytest.approx(plan["seconds"], rel=1e-9)
    assert again["memory_bytes"] == record["memory_bytes"]
