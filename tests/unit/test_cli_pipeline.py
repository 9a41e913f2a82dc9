"""Pipelines on the command line: plan, show, simulate, run, traces, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command_line import command
from unit.test_cli import MODEL

from autopar.certificate import Peak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a pipelined plan of it."""
    path = tmp_path_factory.mktemp("pipeline")
    (path / "net.py").write_text(MODEL)
    code, out, err = command(
        "plan", path / "net.py:make", "--cluster", "local-x2", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b",
        "-o", path / "plan.json",
    )  # fmt: skip
    assert code == 0, err
    assert "2 groups of devices on local-x2, schedule 1f1b, 4 microbatches" in out
    assert "tried:" in out and "idle" in out
    return path


def test_the_file_is_the_same_again(folder: Path) -> None:
    code, out, _ = command(
        "plan", folder / "net.py:make", "--cluster", "local-x2", "--stages", 2, "--microbatches", 4, "--json",
        "--schedule", "1f1b",
    )  # fmt: skip
    mine, other = json.loads(out), json.loads((folder / "plan.json").read_text())
    assert code == 0
    assert {k: v for k, v in mine.items() if k != "model"} == {k: v for k, v in other.items() if k != "model"}


def test_show(folder: Path) -> None:
    _, out, _ = command("show", "--trust", folder / "plan.json")
    assert "1B3" in out and "in flight" in out
    _, out, _ = command("show", "--trust", folder / "plan.json", "--json")
    facts: dict[str, Any] = json.loads(out)
    assert [s["in_flight"] for s in facts["stages"]] == [2, 1]
    assert facts["transfers"][0]["source"] == 0 and facts["transfers"][0]["forward_seconds"] > 0
    _, out, _ = command("show", "--trust", folder / "plan.json", "--code")
    assert out.count("def forward") == 2 and "# stage 1" in out


def test_certificate(folder: Path) -> None:
    code, out, err = command("check", "--trust", folder / "plan.json")
    assert code == 0 and "certified" in out, err
    code, out, _ = command("check", "--trust", folder / "plan.json", "--json")
    facts = json.loads(out)
    stages, said = facts["stages"], json.loads((folder / "plan.json").read_text())["stages"]
    assert [s["failures"] for s in stages] == [[], []] and all(s["seconds"] > 0 for s in stages)
    fullest = max(sum(n for name, n in s["price"].items() if name.endswith("_bytes")) for s in said)
    assert 0.95 < facts["peak_bytes"] / fullest <= 1.02  # without what is on its way
    with mock.patch("autopar.certificate.peak_of", lambda *_: Peak(2**40, "backward: aten.mm")):
        code, out, _ = command("check", "--trust", folder / "plan.json")
    assert code == 1 and "1.00 TiB at once (backward: aten.mm)" in out
    with mock.patch("autopar.certificate.stored_parameters.optimizer_state_bytes", lambda *_: 1):
        code, out, _ = command("check", "--trust", folder / "plan.json")
    assert code == 1 and "stage 1: optimizer_bytes: the plan says" in out and "certified" not in out


def test_simulate_and_run_write_one_trace(folder: Path) -> None:
    trace = folder / "trace.json"
    code, out, err = command("simulate", "--trust", folder / "plan.json", "--trace", trace, "--json")
    assert code == 0, err
    facts = json.loads(out)
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events} >= {"0F0", "1B3", "F0", "B3"}
    assert max(e["ts"] + e["dur"] for e in events if e["tid"] < 1000) == pytest.approx(facts["makespan_seconds"] * 1e6)
    code, out, err = command("run", folder / "plan.json", "--steps", 3, "--trace", trace, "--json")
    assert code == 0, err
    losses = json.loads(out)["losses"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {1, 2}, "predicted and measured in one file"
    assert {e["name"] for e in events if e["pid"] == 2} == {
        f"{s}{k}{m}" for s in (0, 1) for k in "FB" for m in range(4)
    }


def test_why_the_cut(folder: Path) -> None:
    """The parts of a step and of a device's memory add up, and are in the tables."""
    _, out, _ = command("show", "--trust", folder / "plan.json", "--json")
    facts: dict[str, Any] = json.loads(out)
    step = facts["step"]
    parts = [step[f"{part}_seconds"] for part in ("even", "uneven", "waiting", "once")]
    assert sum(parts) == pytest.approx(facts["seconds"]) and min(parts) >= 0
    assert step["busy_seconds"][step["busiest_group"]] == max(step["busy_seconds"])
    for s in facts["stages"]:
        kept = ("parameter", "gradient", "optimizer", "gathered", "activation", "working")
        assert s["memory_bytes"] == sum(s[f"{part}_bytes"] for part in kept) <= s["limit_bytes"]
        assert s["activation_bytes"] == s["in_flight"] * s["microbatch_bytes"]
    assert facts["pins"]["stages"] == 2 and facts["pins"]["schedules"] == ["1f1b"]
    _, out, _ = command("show", "--trust", folder / "plan.json")
    for part in ("requested: 2 groups; schedule 1f1b; 4 microbatches", "slowest: group", "fullest: stage", "2 x "):
        assert part in out


def test_plan_with_cuts(folder: Path) -> None:
    words = ("plan", folder / "net.py:make", "-c", "local-x2", "--microbatches", 4, "--schedule", "1f1b")
    code, out, err = command(*words, "--cut", "layers.2", "-o", folder / "cut.json")
    assert code == 0, err
    assert "layers.2.norm:layer_norm" in out and "requested: cut at layers.2" in out
    _, out, _ = command("plan", folder / "net.py:make", "-c", "local-x2", "--microbatches", 4, "--stages", 2)
    assert "tried:" in out
    _, out, _ = command(*words, "--stages", "auto", "-o", folder / "auto.json")
    _, out, _ = command("show", "--trust", folder / "auto.json")
    assert "next best: " in out


def test_explain_an_op(folder: Path) -> None:
    """Its own stage is solved again, and the step simulated with it: that is what planning with the pin gives."""
    words = ("explain", "--trust", folder / "wide.json", "layers.0.up", "--instead", "data=n")
    four = ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b", "--cut", "layers.1")
    command("plan", folder / "net.py:make", *four, "--mesh", "data=2", "-o", folder / "wide.json")
    _, out, _ = command(*words)
    assert "layers.0.up:linear, stage 0" in out and "the best plan of stage 0 takes" in out and "the whole step" in out
    code, out, err = command(*words, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert [(o["op"], o["stage"]) for o in facts["ops"]] == [("layers.0.up:linear", 0)]
    found = facts["instead"]
    assert found["seconds"] > found["plan_seconds"] and found["ops"] == 1
    pin = ("--mesh", "data=2", "--pin", "layers.0.up:data=n", "-o", folder / "other.json")
    command("plan", folder / "net.py:make", *four, *pin)
    assert json.loads((folder / "other.json").read_text())["seconds"] == pytest.approx(found["seconds"], rel=1e-9)
    words = ("layers.0.up", "--instead", "data=replicate", "--json")
    _, out, _ = command("explain", "--trust", folder / "other.json", *words)
    assert json.loads(out)["instead"]["seconds"] == pytest.approx(found["plan_seconds"], rel=1e-9), "overrides a pin"


def test_explain_a_cut(folder: Path) -> None:
    """What moving it costs is what planning with that cut gives."""
    code, out, err = command("explain", "--trust", folder / "plan.json", "stage:1", "--json")
    assert code == 0, err
    cut = json.loads(out)["cut"]
    assert [o["blocks"] for o in cut["instead"]] == [-1, 1] and cut["arriving_bytes"] > 0
    words = ("plan", folder / "net.py:make", "-c", "local-x2", "--microbatches", 4, "--schedule", "1f1b", "--json")
    for other in cut["instead"]:
        if other["seconds"] is not None:
            _, out, _ = command(*words, "--stages", 2, "--cut", other["begins_at"])
            assert json.loads(out)["seconds"] == pytest.approx(other["seconds"], rel=1e-9)
    assert any(o["seconds"] is not None for o in cut["instead"])
    _, out, _ = command("explain", "--trust", folder / "plan.json", "stage:1")
    assert f"stage 1 begins at {cut['begins_at']}" in out and "with the cut one block earlier" in out


def test_diff(folder: Path) -> None:
    plan = folder / "plan.json"
    assert "the plans are the same" in command("diff", "--trust", plan, plan)[1]
    words = ("plan", folder / "net.py:make", "-c", "local-x2", "--microbatches", 8, "--schedule", "zb-h1")
    command(*words, "--stages", 2, "--cut", "layers.0", "-o", folder / "b.json")
    code, out, err = command("diff", "--trust", plan, folder / "b.json", "--json")
    assert code == 0, err
    rows = {r["what"]: (r["a"], r["b"]) for r in json.loads(out)["differences"]}
    assert rows["schedule"] == ("1f1b", "zb-h1") and rows["microbatches"] == (4, 8)
    assert "earlier" in rows["stage 1 begins at"][1] and rows["asked for"][1].startswith("2 groups; cut at layers.0")
    assert rows["price.seconds"][0] == pytest.approx(json.loads(plan.read_text())["seconds"])
    assert "stage 0 memory_bytes" in rows and "stages" not in rows
    command("plan", folder / "net.py:make", "-c", "local-x2", "--mesh", "tensor=2", "-o", folder / "mesh2.json")
    _, out, _ = command("diff", "--trust", plan, folder / "mesh2.json", "--json")
    rows = {r["what"]: (r["a"], r["b"]) for r in json.loads(out)["differences"]}
    assert rows["stages"] == (2, 1) and rows["stage 0 mesh"] == ("data=1", "tensor=2")
    assert rows["price.seconds"][1] == pytest.approx(_seconds(folder / "mesh2.json"))
    assert "price.bubble_fraction" in command("diff", "--trust", plan, folder / "b.json")[1]


def _seconds(path: Path) -> float:
    price: dict[str, float] = json.loads(path.read_text())["stages"][0]["price"]
    return sum(seconds for name, seconds in price.items() if name.endswith("_seconds"))


def test_a_cluster_file_beside_the_plan(folder: Path) -> None:
    text = '[[node]]\ndevice = "cpu-core"\nn_devices = 2\n\n[[node.level]]\nlink = "nvlink4"\n'
    (folder / "mine.toml").write_text(text)
    words = ("plan", folder / "net.py:make", "-c", folder / "mine.toml", "--stages", 2, "--microbatches", 2)
    code, _, err = command(*words, "--schedule", "1f1b", "-o", folder / "own.json")
    assert code == 0, err
    assert json.loads((folder / "own.json").read_text())["cluster"] == "mine.toml"
    code, _, err = command("simulate", "--trust", folder / "own.json")
    assert code == 0, err


def test_verify(folder: Path) -> None:
    code, out, err = command("verify", folder / "net.py:make", "--plan", folder / "plan.json", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["plans"]
    assert row["ok"] and row["worst"] < 1e-9


@pytest.mark.parametrize(
    "words, message",
    [
        (["--stages", "three"], "--stages is 'three'; give a number of groups of devices, at most"),
        (["--stages", "3"], "2 devices cannot be cut into 3 groups; use 1 to 2"),
        (["--stages", "2", "--schedule", "fifo"], "no schedule 'fifo'; use gpipe, 1f1b"),
        (["--stages", "2", "--mesh", "data=2"], "2 stages on a mesh of 2 devices each need 4 devices, there are 2"),
    ],
)
def test_mistakes(folder: Path, words: list[str], message: str) -> None:
    code, _, err = command("plan", folder / "net.py:make", "--cluster", "local-x2", "--microbatches", 4, *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_plan_of_one_stage(folder: Path) -> None:
    """Every command takes it as it takes plans in stages; a measured timeline is what only these have."""
    other = folder / "mesh.json"
    command("plan", folder / "net.py:make", "--cluster", "local-x2", "--mesh", "data=2", "-o", other)
    code, out, err = command("simulate", "--trust", other, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["schedule"] == "none" and facts["bubble_fraction"] == 0.0
    assert facts["seconds"] == pytest.approx(_seconds(other))
    code, _, err = command("run", other, "--trace", folder / "t.json")
    assert code == 2 and "--trace is for plans in stages" in err


def test_show_one_stage(folder: Path) -> None:
    """The ops of a stage, as those of a plan that is not cut are shown."""
    code, out, err = command("show", "--trust", folder / "plan.json", "--stage", 1, "--json")
    assert code == 0, err
    shown, raw = json.loads(out), json.loads((folder / "plan.json").read_text())["stages"][1]
    assert shown["stage"] == 1 and shown["bytes"]["parameters"] == raw["price"]["parameter_bytes"]
    assert sum(row["count"] for row in shown["parameters"]) > 0
    code, _, err = command("show", "--trust", folder / "plan.json", "--stage", 2)
    assert code == 2 and "--stage is 2; the plan has 2 stages" in err
