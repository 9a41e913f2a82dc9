"""A rank that fails in a step of a model on one mesh, or while one is spread: all ranks have its error in seconds."""

from __future__ import annotations

from typing import Any

import pytest
from procs.failing import CUTS, WHERE, fail_at_values, fail_in

from autopar.runtime.ranks.launch import run_local


def check(cases: list[tuple[str, str, int]]) -> None:
    ranks = run_local(fail_in, 2, cases, timeout=300)
    for at, (where, cut, culprit) in enumerate(cases):
        for rank, answers in enumerate(ranks):
            seconds, text = answers[at]
            assert seconds < 10, (where, cut, culprit, rank, seconds, text)
            if where == "end of the backward" and rank != culprit and text.startswith("RuntimeError"):
                continue  # it waited in torch's clip_grad_norm_
            assert f"on purpose in the {where}" in text, (where, cut, culprit, rank, text)
            named = text.startswith("Trouble") if rank == culprit else f"rank {culprit} failed in the " in text
            assert named, (where, cut, culprit, rank, text)


def test_a_failure_ends_the_step_on_all_ranks() -> None:
    check([("backward", "rows, ZeRO", 1), ("optimizer", "rows", 0)])


@pytest.mark.slow
def test_a_failure_anywhere_in_a_step() -> None:
    check([(where, cut, culprit) for where in WHERE for cut in CUTS for culprit in (0, 1)])


VALUES = 4
"""How many the model of these tests has."""
PIPELINE = {"stages": 2, "schedule": "1f1b", "microbatches": 2}


def check_values(n: int, cases: list[tuple[int, int]], options: dict[str, Any]) -> None:
    ranks = run_local(fail_at_values, n, cases, options, timeout=300)
    for at, (number, culprit) in enumerate(cases):
        for rank, (answers, _) in enumerate(ranks):
            seconds, text = answers[at]
            assert "no room for '" in text and seconds < 10, (number, culprit, rank, seconds, text)
            assert rank == culprit or f"on rank {culprit}: " in text, (number, culprit, rank, text)
    losses = [loss for _, loss in ranks]
    assert max(losses) - min(losses) < 1e-6 and losses[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, PIPELINE])
@pytest.mark.parametrize("n", [2, 4])
def test_a_failure_at_every_value(n: int, options: dict[str, Any]) -> None:
    check_values(n, [(number, culprit) for number in range(VALUES) for culprit in range(n)], options)
