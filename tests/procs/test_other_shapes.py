"""Calls with other shapes than those of ``parallelize``, on two real ranks with cuts forced."""

from __future__ import annotations

from typing import Any

import pytest
from procs import other_shapes
from procs.in_turn import marked, selected, several

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    **{f"epochs {cut}": ("epochs", cut) for cut in other_shapes.CUTS}, "compiled": ("epochs", "batch", True),
    **{f"evaluated {cut}": ("evaluated", cut) for cut in other_shapes.CUTS},
    **{f"accumulated {cut}": ("accumulated", cut) for cut in other_shapes.CUTS},
    "with targets": ("with_targets",), "copied": ("copied",), "refused": ("refused",),
}  # fmt: skip
SLOW = {
    "epochs zero",
    "epochs batch",
    "compiled",
    "evaluated batch",
    "evaluated zero",
    "accumulated batch",
    "accumulated tensor",
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_local(several, 2, "other_shapes", selected(request, CALLS, SLOW))


@pytest.mark.parametrize("how", marked([k for k in CALLS if k.startswith(("epochs", "compiled"))], SLOW))
def test_batches_of_other_sizes_train_as_on_one_device(found: list[dict[str, Any]], how: str) -> None:
    for worst, captures, kept in (rank[how] for rank in found):
        assert worst < 1e-9
        assert captures == [0, 0, 1, 1, 1, 2, 3, 3]  # a size that was there before captures nothing
        assert kept == captures[-1]


@pytest.mark.parametrize(
    "how", marked([k for k in CALLS if k.startswith(("evaluated", "accumulated", "with", "copied"))], SLOW)
)
def test_other_calls_give_what_one_device_gives(found: list[dict[str, Any]], how: str) -> None:
    assert all(rank[how] < 1e-9 for rank in found)


def test_calls_that_no_capture_mends(found: list[dict[str, Any]]) -> None:
    for rank in found:
        many, dtype, none, rows, fixed, structure = rank["refused"]
        assert "too many positional arguments" in many
        assert "called with (int64[5 6], int64[5 6], int64[5 6], int64[5 6])" in many
        assert "input args[0]: captured with dtype int64, called with float64" in dtype
        assert "missing a required argument: 'x'" in none
        assert "called with (int64[5 6], int64[3 6])" in rows and "CaptureError" in rows
        assert "captured with shape (8, 6), called with (5, 6)" in fixed and "shapes='fixed'" in fixed
        assert "does not have the structure of the example inputs" in structure


def test_another_shape_on_one_rank_alone_is_no_hang() -> None:
    text = r"rank 1 is at call 2 with \(int64\[5 6\], int64\[5 6\]\), rank 0 is at call 2"
    with pytest.raises(RunError, match=text):
        run_local(other_shapes.alone_with_it, 2)
