"""What is kept between steps and between runs: checkpoints, initial weights, dropout seeds; and ranks that fail."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from procs import cases
from procs.in_turn import several

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

ONE, TWO, GRID = Mesh.of(data=1), Mesh.of(data=2), Mesh.of(data=2, tensor=2)
DROPOUT = ("transformer_encoder", {"dropout": 0.3})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoint") / "checkpoint")


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """Results on one rank, by function."""
    calls = {"meta": ("meta_state", "gpt2", ONE, 1), "losses": ("losses", *DROPOUT, ONE, None), "bad": ("bad_calls",)}
    return run_local(several, 1, "cases", calls)[0]


@pytest.fixture(scope="module")
def two(path: str) -> list[dict[str, Any]]:
    """Results on two ranks: one start of processes for all that needs two."""
    return run_local(several, 2, "cases", {
        "meta": ("meta_state", "gpt2", TWO, 2), "losses": ("losses", *DROPOUT, TWO, 7),
        "save": ("save", path, "gpt2", TWO, 4), "round trip": ("full_round_trip", "gpt2", TWO, 4),
        "infeasible": ("plan_fails_on_rank_0",), "differs": ("model_differs",),
        "rows differ": ("rows_differ",), "build": ("build_fails_on_rank_1",),
    })  # fmt: skip


def test_checkpoint_moves_between_meshes(two: list[dict[str, Any]], path: str) -> None:
    state, loss = two[0]["save"]
    there, loss_there = run_local(cases.load, 4, path, "gpt2", GRID, 2)[0]
    assert list(state) == list(there)
    for name in state:
        assert torch.equal(state[name], there[name]), name
    assert abs(loss - loss_there) < 1e-6


def test_full_state_dict(two: list[dict[str, Any]]) -> None:
    for results in two:
        rank = results["round trip"]
        assert rank["changed"] and rank["again"]
        unexpected, missing, shape = rank["messages"]
        assert "1 unexpected: nonsense" in unexpected
        assert "1 missing: transformer.wpe.weight" in missing
        assert "shape (3, 5) in the state dict, (64, 64) in the model" in shape


def test_meta_model_has_the_same_weights_on_any_mesh(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    a, b = one["meta"], two[0]["meta"]
    assert list(a) == list(b) and a
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert 0.015 < a["transformer.h.0.attn.c_attn.weight"].std() < 0.025


def test_dropout_does_not_depend_on_the_mesh(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    a, b = one["losses"], two[0]["losses"]
    assert len(set(a)) == len(a)
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-9


def test_rank_0_fails_to_plan_and_all_ranks_hear_it(two: list[dict[str, Any]]) -> None:
    assert two[0]["infeasible"] == two[1]["infeasible"]
    assert "no plan fits" in two[0]["infeasible"]


def test_ranks_with_different_models_are_refused(two: list[dict[str, Any]]) -> None:
    for results in two:
        assert "captured another model than rank 0: fingerprint" in results["differs"]
        assert "; build the same model" in results["differs"] and "meta device" not in results["differs"]


def test_ranks_whose_rows_make_other_programs_hear_of_the_line(two: list[dict[str, Any]]) -> None:
    for results in two:
        text = results["rows differ"]
        assert "captured another model than rank 0: fingerprint" in text and "meta device" not in text
        assert re.search(r"the model's code in '<model>' at cases\.py:\d+ reads numbers or a mask that depend", text)


@pytest.mark.parametrize("when", ["first", "on the way", "last parameter", "after all", "initial values"])
def test_a_rank_that_cannot_be_built_stops_the_others(two: list[dict[str, Any]], when: str) -> None:
    texts, seconds = zip(*(results["build"][when] for results in two), strict=True)
    assert texts == ("AutoparError: on rank 1: out of memory", "RuntimeError: out of memory")
    assert max(seconds) < 60, "a rank waited for its timeout"


def test_a_rank_that_raises_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 of 2 failed:[\s\S]*ValueError: trouble on 1"):
        run_local(cases.raise_on, 2, 1)
    with pytest.raises(RunError, match="exit code 7"):
        run_local(cases.die_on, 2, 0)
    assert time.monotonic() - start < 120


def test_time_limit_leaves_no_process() -> None:
    with pytest.raises(RunError, match="did not finish within 2 s"):
        run_local(cases.sleep, 2, 60.0, timeout=2)
    for pid in _children(os.getpid()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"spawn_main" not in command
        if b"forkserver" in command:  # ranks are its children
            assert not _children(pid)


def _children(parent: int) -> list[int]:
    """Processes that a process has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "shape",
            r"RunError: input args\[0\]: captured with shape \(2, 4\), called with \(3, 4\); pass the whole batch",
        ),
        (
            "structure",
            r"RunError: the call does not have the structure[\s\S]*captured: \(float32\[2 4\], float32\[2 4\]\)",
        ),
        ("dtype", r"RunError: input args\[0\]: captured with dtype float32, called with float64"),
        (
            "type",
            r"RunError: input args\[1\]: captured as a float32 tensor of shape \(2, 4\), called with 3 of type int",
        ),
        ("train", r"RunError: this program was captured in eval mode; for training mode call model.train\(\)"),
        ("half", r"RunError: the program was made for cpu and its dtypes"),
        ("uneven microbatches", r"RunError: input args\[0\] has 4 rows and input args\[1\] 6, and both have the rows"),
        ("wrong microbatches", r"RunError: train_step: inputs must be 3 times as long[^;]*; found args\[0\]: 2"),
        ("too few ranks", r"MeshError: the plan is for 2 ranks \(data=2\), 1 is running; start them with torchrun"),
    ],
)
def test_bad_calls(one: dict[str, Any], name: str, expected: str) -> None:
    assert re.match(expected, one["bad"][name]), one["bad"][name]
