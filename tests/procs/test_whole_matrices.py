"""Optimizers that need whole matrices, on four real ranks (and eight in stages) beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from procs import matrix_cases as cases
from procs.in_turn import several

from autopar.runtime.ranks.launch import run_local

LIMIT = 1e-9
NUMBERS: dict[str, tuple[Any, ...]] = {
    **{f"Muon and AdamW, {layout}": ("words", layout) for layout in cases.LAYOUTS},
    "Muon and AdamW, clipped and scaled": ("words", "ZeRO-3", False, True, True),
    "Muon and AdamW in stages": ("pipeline", False, 1),
    "Muon and AdamW in stages that share a table": ("pipeline", True, 1),
    **{f"by hand, {layout}": ("by_hand", layout) for layout in ("ZeRO-3", "tensor and ZeRO")},
    "by hand, experts": ("experts",),
    **{
        f"{kind} saved and loaded, {how}": ("resumed", kind, how)
        for kind in ("Muon", "by hand") for how in ("full", "dcp")
    },
}
CUTS = (((4,), ["0"]), ((4,), ["1"]), ((4,), ["R"]), ((2, 2), ["0", "1"]), ((2, 2), ["0", "0"]), ((2, 2), ["R", "1"]),
        ((2, 2), ["1", "R"]), ((2, 2), ["R", "R"]))  # fmt: skip
SAME: dict[str, tuple[Any, ...]] = {
    **{f"Muon {dtype} {'x'.join(map(str, sizes))} {''.join(cut)}": ("bits", sizes, cut, dtype)
       for sizes, cut in CUTS for dtype in (torch.float32, torch.float64)},
    **{f"there and back {'x'.join(map(str, sizes))} {''.join(cut)}": ("ways_back", sizes, cut) for sizes, cut in CUTS},
}  # fmt: skip
REFUSED: dict[str, tuple[str, str]] = {
    "other matrices": ("RunError", "2 matrices on one rank, 3 on another"),
    "counts": ("RunError", "changed 'counted' of its group 0"),
    "closure": ("RunError", "called its closure a second time"),
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of all cases on four ranks, in one start of processes."""
    calls = {
        **NUMBERS, **SAME, **{name: ("refused", name) for name in (*REFUSED, "fails")}, "sent": ("sent",),
        "kinds": ("kinds",), "talking": ("talking",),
    }  # fmt: skip
    return run_local(several, 4, "matrix_cases", calls)


@pytest.mark.parametrize("name", NUMBERS)
def test_whole_matrices_are_stepped_on_as_on_one_device(results: list[dict[str, Any]], name: str) -> None:
    for on_rank in results:
        assert on_rank[name] < LIMIT


@pytest.mark.parametrize("name", SAME)
def test_to_the_bit(results: list[dict[str, Any]], name: str) -> None:
    assert all(on_rank[name] for on_rank in results)


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_on_whole_matrices_is_refused(results: list[dict[str, Any]], name: str) -> None:
    kind, text = REFUSED[name]
    for on_rank in results:
        assert on_rank[name].startswith(kind) and text in on_rank[name]


def test_a_step_that_fails_on_one_owner_fails_on_all_and_changes_nothing(results: list[dict[str, Any]]) -> None:
    texts = [on_rank["fails"] for on_rank in results]
    assert sum(text == "ArithmeticError: no root of this matrix" for text in texts) == 1
    assert sum(text.startswith("RunError: the step of Turning failed on member") for text in texts) == 3


def test_each_matrix_is_computed_once_and_travels_once_each_way(results: list[dict[str, Any]]) -> None:
    """Eight matrices on four ranks: two each; three quarters of each are elsewhere, in two bytes an element."""
    for on_rank in results:
        assert on_rank["sent"]["iterations"] == [(64, 32)] * 2
        assert on_rank["sent"]["sizes"] == [2 * 6 * 16 * 32, 2 * 2 * 48 * 32]


def test_trials_find_what_a_step_looks_at(results: list[dict[str, Any]]) -> None:
    for on_rank in results:
        assert on_rank["kinds"] == ["whole", "elements", "talks", "elements", "elements", "whole"]
        assert "Talking.step() makes collectives of its own" in on_rank["talking"]


def test_stages_of_two_axes_make_a_group_of_their_own() -> None:
    calls = {"Muon": ("pipeline", False, 2), "by hand": ("pipeline", True, 2, cases.Turning)}
    for on_rank in run_local(several, 8, "matrix_cases", calls):
        assert {name: far for name, far in on_rank.items() if not far < LIMIT} == {}
