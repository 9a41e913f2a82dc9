"""What commands say of the memory of the host, of activations and of parameters alike, and where to try it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import command, plan_all

from autopar.cli.common import opened
from autopar.planner.host_bytes import moved_bytes, stored_bytes
from autopar.planner.intra_op.building.price import pricer
from autopar.plans.stage_graphs import cut
from autopar.report.on_host import on_host
from autopar.report.page.seconds_spent import HOST_COPIES, stage_tally

HOST = str(Path(__file__).parents[1] / "data" / "beside-a-host.toml")
BOTH = ("-c", HOST, "--offload", "activations=*,optimizer=1")
KINDS: dict[str, tuple[object, ...]] = {
    "both": (*BOTH, "--mesh", "data=1"),
    "piped": (*BOTH, "--stages", 2, "--microbatches", 4, "--schedule", "1f1b"),
    "none": ("-c", HOST, "--mesh", "data=1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_all(tmp_path_factory.mktemp("plans"), KINDS)


def said_of(folder: Path, kind: str, *words: object) -> Any:
    code, text, err = command(words[0], folder / f"{kind}.json", *words[1:], "--trust", "--json")
    assert code == 0, err
    return json.loads(text)


@pytest.mark.parametrize("kind", ["both", "piped"])
def test_commands_say_the_same_of_both_kinds(folder: Path, kind: str) -> None:
    rows = said_of(folder, kind, "memory")["on_host"]
    stages = {row["stage"] for row in rows}
    assert [(row["stage"], row["what"]) for row in rows] == [
        (stage, what) for stage in sorted(stages) for what in ("activations", "parameters")
    ]
    for stage in stages:
        mine = [row for row in rows if row["stage"] == stage]
        assert said_of(folder, kind, "show", *(["--stage", stage] if len(stages) > 1 else []))["on_host"] == mine
    assert said_of(folder, kind, "explain", "layers.*")["on_host"] == rows
    code, text, err = command("show", folder / f"{kind}.json", "--trust", *(["--stage", 1] if len(stages) > 1 else []))
    assert code == 0, err
    assert "on the host: activations, " in text and "on the host: parameters, " in text, text


@pytest.mark.parametrize("kind", ["both", "piped"])
def test_what_they_say_is_what_the_plan_has(folder: Path, kind: str) -> None:
    captured, asked = opened(folder / f"{kind}.json", trust=True)
    parts = cut(captured.graph, asked.plan.starts)
    for part, stage in zip(parts, asked.plan.stages, strict=True):
        priced = pricer(asked.cluster, stage.mesh, stage.devices)
        activations, parameters = on_host(part.graph, stage, priced)
        assert activations.bytes == moved_bytes(part.graph, stage) == moved_bytes(captured.graph, stage) > 0
        assert parameters.bytes == stored_bytes(part.graph, stage) > 0
        assert 0 < activations.waited_seconds <= stage.price.activation_seconds * (1 + 1e-9)
        assert 0 < parameters.copy_seconds <= stage.price.parameter_seconds * (1 + 1e-9)
        if kind == "both":  # on one device nothing else is in these
            assert parameters.copy_seconds == pytest.approx(stage.price.parameter_seconds)
            assert parameters.waited_seconds == pytest.approx(stage.price.exposed_seconds)
        tally = stage_tally(part.graph, stage, priced)
        of_step = tally.once[HOST_COPIES] + stage.microbatches * tally.seconds[HOST_COPIES]
        assert parameters.waited_seconds == pytest.approx(of_step)


def test_nothing_is_said_where_nothing_is_there(folder: Path) -> None:
    for words in (["memory"], ["show"], ["explain", "layers.*"]):
        assert "on_host" not in said_of(folder, "none", *words)
        code, text, _ = command(words[0], folder / "none.json", *words[1:], "--trust")
        assert code == 0 and "on the host" not in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ((), "offload='auto'"),
        (("--offload", "optimizer"), "offload='optimizer,activations,parameters'"),
        (("--offload", "auto"), ""),
        (("--optimizer", "muon"), "offload='activations'"),
    ],
)
def test_an_error_names_what_else_may_wait_on_the_host(folder: Path, words: tuple[str, ...], hint: str) -> None:
    small = ("plan", folder / "net.py:make", "--mesh", "data=1", "--memory-limit", "2KiB", "-o", folder / "small.json")
    code, _, err = command(*small, "-c", HOST, *words)
    assert code and "no plan fits" in err
    assert (f"wait in the memory of the host: {hint}" in " ".join(err.split())) == bool(hint), err
    code, _, err = command(*small, "-c", "local-x1", *(words if "muon" in words else ()))
    assert code and "no plan fits" in err and "offload=" not in err


def test_so_does_that_of_pipelines(folder: Path) -> None:
    small = ("plan", folder / "net.py:make", "-c", HOST, "--memory-limit", "2KiB", "-o", folder / "small.json")
    code, _, err = command(*small, "--stages", 2)
    assert code and "offload='auto'" in err, err
