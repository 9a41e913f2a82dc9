"""What of a memory limit is left to what a program's rows do not see of a plan: raised where it is too little, and
taken back half-way where it is enough."""

from __future__ import annotations

from typing import Any

from autopar.planner.effort import EFFORT
from autopar.planner.intra_op.within_memory import _Room

LIMIT = 1000.0


class Program:
    """A program that remembers the limits of its rows."""

    def __init__(self) -> None:
        self.of_all, self.less = LIMIT, dict[int, float]()

    def limit(self, n_bytes: float) -> None:
        self.of_all = n_bytes

    def lower(self, number: int, n_bytes: float) -> None:
        self.less[number] = self.less.get(number, 0.0) + n_bytes


def room_of() -> tuple[Any, Program]:
    program = Program()
    return _Room(program, LIMIT), program  # type: ignore[arg-type]


def test_of_a_moment_twice_as_much_is_left_each_time_and_half_of_that_taken_back() -> None:
    room, program = room_of()
    for fits, left in ((False, 30.0), (False, 90.0)):
        room.note(fits)
        room.leave(3, 30.0)
        assert program.less[3] == left
    room.note(True)
    assert room.take_back() and program.less[3] == 60.0, "between 30, too little, and 90, enough"
    room.note(False)
    assert room.take_back() and program.less[3] == 75.0
    room.note(True)
    assert room.take_back() and program.less[3] == 67.5
    assert program.of_all == LIMIT, "other moments have all of it"


def test_of_all_moments_what_a_plan_was_too_large_is_left() -> None:
    room, program = room_of()
    room.note(False)
    room.leave(None, 40.0)
    room.note(False)
    room.leave(None, 40.0)
    assert program.of_all == LIMIT - 80.0
    room.note(True)
    assert room.take_back() and program.of_all == LIMIT - 60.0


def test_nothing_is_taken_back_where_no_plan_fits_or_little_would_be_won() -> None:
    room, program = room_of()
    assert not room.take_back()
    room.note(False)
    room.leave(1, EFFORT.refined_share * LIMIT / 2)
    assert not room.take_back(), "no plan is known to fit with it"
    room.note(True)
    assert not room.take_back()
    assert program.less[1] == EFFORT.refined_share * LIMIT / 2
