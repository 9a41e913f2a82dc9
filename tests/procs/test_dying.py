"""A rank that dies or leaves within ``parallelize``, without a launcher: the others end with an error that names it."""

from __future__ import annotations

import pytest
from procs.dying import CULPRIT, HOW, WHERE, answers

STAGES = (None, 3)


def check(how: str, where: str, stages: int | None) -> None:
    found = answers(3, how, where, stages, 90.0)
    if how in ("killed", "exits"):
        assert found[CULPRIT] is None
    for rank, answer in enumerate(found):
        if rank == CULPRIT:
            continue
        assert answer is not None, f"rank {rank} still waits"
        seconds, text = answer
        words = {
            "killed": f"rank {CULPRIT} has ended within parallelize", "exits": f"rank {CULPRIT} has ended within",
            "leaves": f"rank {CULPRIT} left parallelize by KeyboardInterrupt: on this rank alone",
            "memory": f"on rank {CULPRIT}: ",
        }[how]  # fmt: skip
        assert words in text and seconds < 30, (rank, seconds, text)


def test_a_rank_that_is_killed_while_it_traces() -> None:
    check("killed", "tracing", None)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", HOW)
def test_all(how: str, where: str, stages: int | None) -> None:
    check(how, where, stages)
