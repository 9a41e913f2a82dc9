"""Receivers keep a few messages that they take later than they come; rows that ask for more are refused."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from cost_models.pipeline import SCHEDULES, Schedule, build, parse
from cost_models.pipeline.channels import check_channels, keeping


def reversed_on_the_second_rank(microbatches: int) -> Schedule:
    """Rank 0 sends one microbatch after the other, rank 1 begins with the last."""
    rows = [
        [f"0F{k}" for k in range(microbatches)] + [f"0B{k}" for k in range(microbatches)],
        [f"1F{k}" for k in reversed(range(microbatches))] + [f"1B{k}" for k in range(microbatches)],
    ]
    head = f"schedule mine stages 2 microbatches {microbatches}"
    return parse("\n".join([head, *(f"rank {r} holds {r}: {' '.join(row)}" for r, row in enumerate(rows))]))


def test_what_a_receiver_keeps_is_counted() -> None:
    kept, wanted = keeping(reversed_on_the_second_rank(4), [(0, 1)])[0, 1]
    assert kept == 3 and str(wanted) == "the output of stage 0 for stage 1, microbatch 3"
    assert keeping(reversed_on_the_second_rank(4), [(0, 1)])[1, 0].kept == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_the_table_keep_little(name: str) -> None:
    """A chain of stages keeps one at most beside what it wants; each stage reading all others stays in the limit."""
    for groups in (2, 3, 4):
        stages = groups * SCHEDULES[name].fewest
        microbatches = next(k for k in range(8, 64) if _can(name, stages, groups, k))
        schedule = build(name, stages, groups, microbatches)
        assert max(kept for kept, _ in keeping(schedule, pairwise(range(stages))).values()) <= 2
        check_channels(schedule, combinations(range(stages), 2))


def _can(name: str, stages: int, groups: int, microbatches: int) -> bool:
    try:
        build(name, stages, groups, microbatches)
    except ValueError:
        return False
    return True


def test_rows_that_ask_for_too_much_are_refused() -> None:
    check_channels(reversed_on_the_second_rank(17), [(0, 1)])
    with pytest.raises(ValueError, match="rank 1 wants the output of stage 0 for stage 1, microbatch 17, behind 17 "):
        check_channels(reversed_on_the_second_rank(18), [(0, 1)])
