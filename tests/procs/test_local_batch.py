"""Batches of which every rank has its own rows, on two and four real ranks: the numbers of one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from procs import local_batch
from procs.in_turn import LONG, marked, selected, several

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    f"{name} {cut}": (name, cut)
    for name in ("trained", "outside", "in_parts", "uneven", "uneven_outside", "uneven_in_parts")
    for cut in local_batch.CUTS
}
EVERY_TIME = {
    "trained zero", "outside tensor", "in_parts data", "uneven zero", "uneven_outside data", "uneven_in_parts tensor",
}  # fmt: skip
SLOW = CALLS.keys() - EVERY_TIME


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    calls = {**CALLS, **{name: (name,) for name in ("loaded", "lengths_differ", "indexed", "table")}}
    return run_local(several, 2, "local_batch", selected(request, calls, SLOW))


@pytest.mark.parametrize("how", marked(CALLS, SLOW))
def test_the_numbers_of_one_device(found: list[dict[str, Any]], how: str) -> None:
    assert all(rank[how] < 1e-9 for rank in found)


@pytest.mark.slow
def test_on_two_axes() -> None:
    on_two_axes((("trained", "tensor"), ("uneven", "tensor")))


@pytest.mark.slow
def test_more_on_two_axes() -> None:
    on_two_axes((("trained", "data"), ("outside", "data"), ("outside", "tensor"), ("uneven", "data")))


def on_two_axes(pairs: Iterable[tuple[str, str]]) -> None:
    calls = {f"{name} {cut}": (name, cut, (2, 2)) for name, cut in pairs}
    for rank in run_local(several, 4, "local_batch", calls, timeout=LONG):
        assert all(value < 1e-9 for value in rank.values())


def test_loaders_give_each_rank_its_rows(found: list[dict[str, Any]]) -> None:
    firsts, drawns = [rank["loaded"][0] for rank in found], [rank["loaded"][1] for rank in found]
    for parts in (firsts, drawns):
        assert len(parts[0]) == len(parts[1]) == 10 and sorted([*parts[0], *parts[1]]) == list(range(20))
    for rank in found:
        assert rank["loaded"][2] == 4 and rank["loaded"][4] == 8
        assert "draws rows in a way of its own" in rank["loaded"][3]


def test_other_lengths_are_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "ranks have 4, 3 rows of their own, and the tensors differ in more" in rank["lengths_differ"]
        assert "rank 1: float64[3, 7]" in rank["lengths_differ"] and "buckets" in rank["lengths_differ"]


def test_unequal_rows_are_refused_where_shapes_are_fixed() -> None:
    with pytest.raises(RunError, match=r"\(float64\[6 6\], int64\[6\]\)"):
        run_local(local_batch.unequal, 2)


def test_indices_into_own_rows_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "input args[1] ('other') counts rows of args[0] ('x')" in rank["indexed"]


def test_a_table_as_long_as_the_rows_is_whole(found: list[dict[str, Any]]) -> None:
    assert all(rank["table"] < 1e-9 for rank in found)
