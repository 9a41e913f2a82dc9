"""Values that change after ``parallelize(..., on_change="recapture")``, on two real ranks with cuts forced."""

from __future__ import annotations

from typing import Any

import pytest
from procs import other_values
from procs.in_turn import marked, selected, several

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    **{cut: ("scheduled", cut) for cut in other_values.CUTS}, "compiled": ("scheduled", "batch", True),
    "evaluated": ("evaluated",), "in stages": ("in_stages",), "apart": ("apart", "different"),
    "without a plan": ("without_a_plan",), "pinned": ("pinned",),
}  # fmt: skip
SLOW = {"batch", "tensor", "compiled"}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_local(several, 2, "other_values", selected(request, CALLS, SLOW))


@pytest.mark.parametrize("how", marked([*other_values.CUTS, "compiled"], SLOW))
def test_a_schedule_of_values_trains_as_in_eager_mode(found: list[dict[str, Any]], how: str) -> None:
    for worst, captures, kept in (rank[how] for rank in found):
        assert worst < 1e-9
        assert captures[:6] == [0, 1, 2, 2, 2, 3]  # a flag that is set back, or set again, captures nothing
        assert kept == captures[-1] <= other_values.program_cache.KEPT


def test_values_change_in_eval_mode(found: list[dict[str, Any]]) -> None:
    assert all(rank["evaluated"] < 1e-9 for rank in found)


def test_pins_of_what_another_call_leaves_out_are_left_out_on_all_ranks(found: list[dict[str, Any]]) -> None:
    assert all(rank["pinned"] < 1e-9 for rank in found)


def test_numbers_and_operators_of_a_pipeline_change(found: list[dict[str, Any]]) -> None:
    for worst, kept in (rank["in stages"] for rank in found):
        assert worst < 1e-9 and kept == 3


def test_ranks_that_change_different_values(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        text = one["apart"]
        assert f"RunError: rank {rank} is at call 2 with changed values" in text
        assert f"'scale' is {2.0 + rank}, and was 1.0" in text and "on all ranks alike" in text


def test_a_change_of_one_rank_alone_is_no_hang() -> None:
    with pytest.raises(RunError, match=r"rank 0 is at call 2 with changed values .*rank 1 is at call 2 without a cha"):
        run_local(other_values.apart, 2, "one")


def test_a_change_for_which_there_is_no_plan(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "no room" in rank["without a plan"] and "'gate' is True, and was False" in rank["without a plan"]
