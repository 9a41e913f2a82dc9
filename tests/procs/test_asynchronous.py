"""Asynchronous pipelines on real processes train as their definition does on one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from procs.asynchronous import (
    Case,
    breaks_off_alike,
    compare,
    fails_in_flight,
    from_a_script,
    peaks,
    several_optimizers,
)
from procs.pipelines import ONE, TWO, Config

from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

PAIR = Mesh.of(data=2)
UNTIED = {"tied": False}


def check(n: int, cases: Sequence[Case]) -> None:
    problems = []
    for rank, of_rank in enumerate(run_local(compare, n, list(cases), timeout=600)):
        for case, found in zip(cases, of_rank, strict=True):
            worst: Any = max(found["loss"], found["weight"][0])
            if not worst <= 1e-9:
                problems.append(f"{case} rank {rank}: {found}")
    assert not problems, "\n".join(problems)


def test_two_stages() -> None:
    check(2, [
        Case(Config("mlp", "pipedream", TWO, 4), "momentum"),
        Case(Config("mlp", "pipedream-2bw", TWO, 4)),
        Case(Config("gpt2", "pipedream-2bw", TWO, 2, zoo=UNTIED), "momentum"),
        Case(Config("mlp", "pipedream", TWO, 2, zoo={"dropout": 0.1}), steps=10),
        Case(Config("resnet", "pipedream", TWO, 2), steps=10),  # statistics of batch norms follow the microbatches
    ])  # fmt: skip


def test_stages_of_several_ranks() -> None:
    """Gradients are reduced for every update, and versions of gathered parameters are copies of their own."""
    check(4, [
        Case(Config("gpt2", "pipedream", (PAIR, PAIR), 2, zoo=UNTIED), "momentum", steps=10),
        Case(Config("mlp", "pipedream-2bw", (PAIR, PAIR), 4, seed=3, lifetime="step")),
        Case(Config("mlp", "pipedream-2bw", (PAIR, PAIR), 4, seed=3, lifetime="step"), "adafactor", steps=6),
        Case(Config("gpt2", "pipedream-2bw", (PAIR, PAIR), 2, zoo=UNTIED), "adafactor, gradients of zero", steps=4),
        Case(Config("gpt2", "pipedream-2bw", (PAIR, ONE, ONE), 4, seed=1, lifetime="step", zoo=UNTIED), steps=6),
    ])  # fmt: skip


def test_what_a_script_meets() -> None:
    for said in run_local(from_a_script, 2, timeout=300):
        assert "train_step(*batch, optimizer=optimizer)" in said["no optimizer"]
        assert "GradScaler" in said["scaler"] and "over all stages" in said["clip"]
        for what in ("evaluate", "state_dict", "full_state_dict", "load", "copy"):
            wanted = r"1 microbatches of schedule 'pipedream-2bw' are in flight.*call drain\(\)"
            assert re.search(wanted, said[what]), what
        assert "another optimizer" in said["another optimizer"]
        assert "tensors on 1 of 2 ranks" in said["save"]  # on the rank without any, too
        assert "leave out the last, smaller batch" in said["fewer rows"]
        assert re.search(r"parameter '.*' was written between two steps", said["written"])
        assert "changes the training result" in said["note"]


def test_a_failure_in_flight_leaves_weights_that_do_not_fit() -> None:
    first, second = run_local(fails_in_flight, 2, timeout=300)
    assert "rank 1 failed" in first and "division by zero" in second
    for said in (first, second):
        assert said.count("start again from the last checkpoint") == 2, said


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_several_optimizers(schedule: str) -> None:
    """As Muon for the matrices, and another one for the rest."""
    for found, other_order, no_optimizer in run_local(several_optimizers, 2, schedule, timeout=300):
        assert found <= 1e-9
        assert schedule == "1f1b" or "another optimizer" in other_order
        assert "has an object of type float" in no_optimizer and "several in a list" in no_optimizer


@pytest.mark.parametrize("schedule, then", [("1f1b", "1f1b"), ("1f1b", "pipedream"), ("pipedream-2bw", "1f1b")])
def test_a_new_model_behind_a_step_that_broke_off(schedule: str, then: str) -> None:
    """Its messages are not taken by what the step has left in the channels of the same ranks."""
    for said, losses, again in run_local(breaks_off_alike, 2, schedule, then, timeout=120):
        assert said == "on all ranks" and losses == again


@pytest.mark.slow
@pytest.mark.parametrize("name, schedule, n_microbatches, zoo", [
    ("mlp", "pipedream", 6, {"batch": 24, "hidden": 96}), ("mlp", "pipedream-2bw", 6, {"batch": 24, "hidden": 96}),
    ("gpt2", "pipedream-2bw", 3, {**UNTIED, "rows": 6, "hidden": 96, "heads": 6}),
])  # fmt: skip
def test_real_peaks_of_three_stages(name: str, schedule: str, n_microbatches: int, zoo: Any) -> None:
    """With all versions of the weights that live at one time."""
    for real, predicted, versions, at in run_local(peaks, 3, name, schedule, n_microbatches, zoo, timeout=300):
        assert -0.05 < real / predicted - 1 < 0.05, (real, predicted, versions, at)


@pytest.mark.slow
def test_three_and_four_stages() -> None:
    check(3, [Case(Config("unet", "pipedream", (ONE,) * 3, 4), "momentum", steps=6)])  # skips past a stage
    check(4, [
        Case(Config("gpt2", "pipedream", (ONE,) * 4, 4, zoo=UNTIED), "momentum", steps=6),
        Case(Config("gpt2", "pipedream-2bw", (ONE,) * 4, 4, zoo=UNTIED, recompute=("*.h.*",))),
        Case(Config("resnet", "pipedream-2bw", (ONE,) * 4, 4), "momentum"),
        Case(Config("mlp", "pipedream", (ONE,) * 4, 4)),
    ])  # fmt: skip
