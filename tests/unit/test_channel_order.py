"""Receivers keep a few messages that they take later than they come; rows that ask for more are refused."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from cost_models.schedules import SCHEDULES, Deadlock, Edge, Schedule, build, parse, simulate, times
from cost_models.schedules.channels import first_blocked_rank, keeping


def reversed_on_the_second_rank(microbatches: int) -> Schedule:
    """Rank 0 sends one microbatch after the other, rank 1 begins with the last."""
    rows = [
        [f"0F{k}" for k in range(microbatches)] + [f"0B{k}" for k in range(microbatches)],
        [f"1F{k}" for k in reversed(range(microbatches))] + [f"1B{k}" for k in range(microbatches)],
    ]
    head = f"schedule mine stages 2 microbatches {microbatches}"
    return parse("\n".join([head, *(f"rank {r} holds {r}: {' '.join(row)}" for r, row in enumerate(rows))]))


def test_what_a_receiver_keeps_is_counted() -> None:
    kept, wanted, place = keeping(reversed_on_the_second_rank(4), [(0, 1)])[0, 1]
    assert (kept, place) == (3, 0) and str(wanted) == "the output of stage 0 for stage 1, microbatch 3"
    assert keeping(reversed_on_the_second_rank(4), [(0, 1)])[1, 0].kept == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_the_table_keep_little(name: str) -> None:
    """A chain of stages keeps one at most beside what it wants; each stage reading all others stays in the limit."""
    for groups in (2, 3, 4):
        stages = groups * SCHEDULES[name].fewest
        microbatches = next(k for k in range(8, 64) if _can(name, stages, groups, k))
        schedule = build(name, stages, groups, microbatches)
        assert max(kept for kept, _, _ in keeping(schedule, pairwise(range(stages))).values()) <= 2
        assert first_blocked_rank(schedule, combinations(range(stages), 2)) is None


def _can(name: str, stages: int, groups: int, microbatches: int) -> bool:
    try:
        build(name, stages, groups, microbatches)
    except ValueError:
        return False
    return True


def test_rows_that_ask_for_too_much_never_end() -> None:
    """The simulator knows the order of a channel: the receiver waits for ever, and the sender for its gradients."""
    edges = [Edge(0, 1)]
    assert simulate(reversed_on_the_second_rank(17), times(2, edges=edges)).makespan_seconds > 0
    wanted = "rank 1 wants the output of stage 0 for stage 1, microbatch 17, behind 17 "
    with pytest.raises(Deadlock, match=wanted) as raised:
        simulate(reversed_on_the_second_rank(18), times(2, edges=edges))
    assert [len(row) for row in raised.value.timeline.starts] == [18, 0]
    with pytest.raises(Deadlock, match="deadlocks: rank 1 wants"):
        simulate(reversed_on_the_second_rank(18), times(2, edges=edges, overlap=0.5))
