"""Pipelines on the command line: plan, show, simulate, run, traces, mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from unit.test_cli import MODEL

from autopar.cli import main


def autopar(*words: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["autopar", *map(str, words)]), pytest.raises(SystemExit) as end:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a pipelined plan of it."""
    path = tmp_path_factory.mktemp("pipeline")
    (path / "net.py").write_text(MODEL)
    code, out, err = autopar(
        "plan", path / "net.py:make", "--cluster", "local-x2", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b",
        "-o", path / "plan.json",
    )  # fmt: skip
    assert code == 0, err
    assert "2 groups of devices on local-x2, schedule 1f1b, 4 microbatches" in out
    assert "tried:" in out and "idle" in out
    return path


def test_the_file_is_the_same_again(folder: Path) -> None:
    code, out, _ = autopar(
        "plan", folder / "net.py:make", "--cluster", "local-x2", "--stages", 2, "--microbatches", 4, "--json",
        "--schedule", "1f1b",
    )  # fmt: skip
    mine, other = json.loads(out), json.loads((folder / "plan.json").read_text())
    assert code == 0
    assert {k: v for k, v in mine.items() if k != "model"} == {k: v for k, v in other.items() if k != "model"}


def test_show(folder: Path) -> None:
    _, out, _ = autopar("show", folder / "plan.json")
    assert "1B3" in out and "in flight" in out
    _, out, _ = autopar("show", folder / "plan.json", "--json")
    facts: dict[str, Any] = json.loads(out)
    assert [s["in_flight"] for s in facts["stages"]] == [2, 1]
    assert facts["transfers"][0]["source"] == 0 and facts["transfers"][0]["forward_seconds"] > 0
    _, out, _ = autopar("show", folder / "plan.json", "--code")
    assert out.count("def forward") == 2 and "# stage 1" in out


def test_simulate_and_run_write_one_trace(folder: Path) -> None:
    trace = folder / "trace.json"
    code, out, err = autopar("simulate", folder / "plan.json", "--trace", trace, "--json")
    assert code == 0, err
    facts = json.loads(out)
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events} >= {"0F0", "1B3", "F0", "B3"}
    assert max(e["ts"] + e["dur"] for e in events if e["tid"] < 1000) == pytest.approx(facts["makespan_seconds"] * 1e6)
    code, out, err = autopar("run", folder / "plan.json", "--steps", 3, "--trace", trace, "--json")
    assert code == 0, err
    losses = json.loads(out)["losses"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {1, 2}, "predicted and measured in one file"
    assert {e["name"] for e in events if e["pid"] == 2} == {
        f"{s}{k}{m}" for s in (0, 1) for k in "FB" for m in range(4)
    }


def test_verify(folder: Path) -> None:
    code, out, err = autopar("verify", folder / "net.py:make", "--plan", folder / "plan.json", "--json")
    assert code == 0, err
    (row,) = json.loads(out)
    assert row["ok"] and row["worst"] < 1e-9


@pytest.mark.parametrize(
    "words, message",
    [
        (["--stages", "three"], "--stages is 'three'; give a number of groups of devices, or auto"),
        (["--stages", "3"], "2 devices cannot be cut into 3 groups; use 1 to 2"),
        (["--stages", "2", "--schedule", "fifo"], "no schedule 'fifo'; use gpipe, 1f1b"),
        (["--stages", "2", "--mesh", "data=2"], "2 stages on a mesh of 2 devices each need 4 devices, there are 2"),
    ],
)
def test_mistakes(folder: Path, words: list[str], message: str) -> None:
    code, _, err = autopar("plan", folder / "net.py:make", "--cluster", "local-x2", "--microbatches", 4, *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_what_is_for_pipelines_only(folder: Path) -> None:
    other = folder / "mesh.json"
    autopar("plan", folder / "net.py:make", "--cluster", "local-x2", "--mesh", "data=2", "-o", other)
    for command in (["simulate", other], ["run", other, "--trace", folder / "t.json"]):
        code, _, err = autopar(*command)
        assert code == 2 and "pipelined plan" in err
