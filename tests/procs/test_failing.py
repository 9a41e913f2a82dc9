"""A model on one mesh of which one rank fails in a step and stays alive: all ranks end with its error in seconds."""

from __future__ import annotations

import pytest
from procs.failing import CUTS, WHERE, fail_in

from autopar.runtime.launch import run_local


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
    check([("forward", "rows", 0), ("backward", "rows, ZeRO", 1), ("optimizer", "rows", 1)])


@pytest.mark.slow
def test_a_failure_anywhere_in_a_step() -> None:
    check([(where, cut, culprit) for where in WHERE for cut in CUTS for culprit in (0, 1)])
