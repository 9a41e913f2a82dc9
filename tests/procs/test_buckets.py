"""Calls that are padded to buckets, on two real ranks with cuts forced: the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
from procs import alone_with_a_shape, in_buckets
from procs.in_turn import marked, selected, several

from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    **{f"trained {cut}": ("trained", cut) for cut in in_buckets.CUTS},
    **{f"own rows {cut}": ("uneven_own_rows", cut) for cut in in_buckets.CUTS}, "in stages": ("in_stages",),
    "a change that pays": ("a_change_that_pays",),
    "AdamW": ("between_layouts", "AdamW"), "Adagrad": ("between_layouts", "Adagrad"),
}  # fmt: skip
SLOW = {"trained batch", "trained tensor", "own rows zero", "own rows tensor", "Adagrad"}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_local(several, 2, "in_buckets", selected(request, CALLS, SLOW))


@pytest.mark.parametrize("how", marked([how for how in CALLS if how.startswith("trained")], SLOW))
def test_padded_steps_are_those_of_one_device(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        worst, captures = rank[how]
        assert worst < 1e-9 and captures == 1


@pytest.mark.parametrize("how", marked([how for how in CALLS if how.startswith(("own", "in"))], SLOW))
def test_rows_of_ones_own_and_stages(found: list[dict[str, Any]], how: str) -> None:
    assert all(rank[how] < 1e-9 for rank in found)


@pytest.mark.parametrize("optimizer", marked(["AdamW", "Adagrad"], SLOW))
def test_parameters_and_state_move_between_layouts(found: list[dict[str, Any]], optimizer: str) -> None:
    for rank in found:
        worst, stored, late = rank[optimizer]
        assert worst < 1e-9
        assert stored == ["S(0)", "S(0)", "S(1)", "S(1)", "S(1)", "S(0)"]
        assert "backward() of a call before the last one" in late


def test_the_planner_changes_the_layout_where_it_pays(found: list[dict[str, Any]]) -> None:
    """Float32: sums in another order are within 1e-5 of one device."""
    for rank in found:
        worst, moves, cut = rank["a change that pays"]
        assert worst < 1e-5 and moves == 2 and cut == [False, False, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("way", alone_with_a_shape.WAYS)
def test_another_shape_on_one_rank_alone(way: str) -> None:
    ranks = 4 if way.startswith("both") else 2
    for text in run_local(alone_with_a_shape.alone, ranks, way):
        assert text == "no error" if way in alone_with_a_shape.ALLOWED else "RunError" in text
