"""Pipelines that are called with other shapes than those of ``parallelize``, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from procs import other_shapes_in_stages
from procs.in_turn import LONG, several

from autopar.errors import RunError
from autopar.runtime.batches.runs import sizes
from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    "tied": ("epochs", "1f1b", True), "of inputs": ("of_inputs",), "averaged": ("averaged",), "refused": ("refused",),
}  # fmt: skip
SLOW_CALLS: dict[str, tuple[Any, ...]] = {
    "interleaved": ("epochs", "interleaved", False), "tied on more ranks": ("epochs", "1f1b", True),
    "data": ("local_batch", "1f1b", "2"), "two axes": ("local_batch", "interleaved", "1x2"),
    "unequal": ("unequal_rows", "interleaved"),
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_local(several, 2, "other_shapes_in_stages", CALLS)


def test_batches_of_other_sizes_train_as_on_one_device(found: list[dict[str, Any]]) -> None:
    for worst, captures in (rank["tied"] for rank in found):
        assert worst < 1e-9
        assert captures == other_shapes_in_stages.CAPTURES


def test_inputs_of_a_batch_in_two_runs_get_their_gradients(found: list[dict[str, Any]]) -> None:
    assert all(rank["of inputs"] < 1e-9 for rank in found)


def test_averages_and_copies(found: list[dict[str, Any]]) -> None:
    assert all(rank["averaged"] < 1e-9 for rank in found)


def test_calls_that_no_capture_mends(found: list[dict[str, Any]]) -> None:
    for rank in found:
        dtype, no_loss, rows, fixed = rank["refused"]
        assert "no scalar loss to train on" in no_loss
        assert "input args[0]: captured with dtype int64, called with float64" in dtype
        assert "input args[0] has 5 rows and input args[1] 3" in rows
        assert "captured with shape (2, 6) a microbatch, called with (5, 6); give 4 x 2 rows" in fixed


def test_another_number_of_rows_on_one_rank_alone_is_no_hang() -> None:
    with pytest.raises(RunError, match=r"rank \d is at call 2.* rank \d is at call 2"):
        run_local(other_shapes_in_stages.alone_with_it, 2)


LOCAL_BATCH: dict[str, tuple[Any, ...]] = {
    "refused": ("other_rows_at_a_place",), "unequal": ("unequal_rows", "1f1b"),
    "unequal at a place": ("unequal_rows_at_a_place",),
}  # fmt: skip


@pytest.mark.slow
def test_ranks_with_rows_of_their_own() -> None:
    for rank in run_local(several, 4, "other_shapes_in_stages", LOCAL_BATCH):
        differ, auto = rank["refused"]
        assert "input args[0] has other values on rank 3 than on rank 1" in differ and "pm.sampler(dataset)" in differ
        assert "a number of stages that is to be chosen" in auto
        assert rank["unequal"] < 1e-9
        counts, lengths = rank["unequal at a place"]
        assert "called with 4, 4, 4, 3 rows, and rank 3 is to have the same as rank 1, which has 4" in counts
        assert "ranks have 4, 3, 4, 3 rows of their own, and the tensors differ in more" in lengths


@pytest.mark.slow
def test_four_ranks() -> None:
    for rank in run_local(several, 4, "other_shapes_in_stages", SLOW_CALLS, timeout=LONG):
        for worst, captures in (rank["interleaved"], rank["tied on more ranks"]):
            assert worst < 1e-9
            assert captures == other_shapes_in_stages.CAPTURES
        assert max(rank["data"], rank["two axes"], rank["unequal"]) < 1e-9


@pytest.mark.parametrize("rows", range(1, 30))
@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_runs_have_all_rows_in_few_microbatches(rows: int, most: int) -> None:
    runs = sizes(rows, most)
    assert sum(count * each for count, each in runs) == rows
    assert len(runs) <= 2 and all(0 < each <= most for _, each in runs)
    assert sum(count for count, _ in runs) == -(-rows // most)
