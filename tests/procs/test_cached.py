"""Models with caches that run forward alone, on real ranks: the tokens of one device."""

from __future__ import annotations

from typing import Any

import pytest
from procs.cached import HEADS
from procs.in_turn import marked, selected, several

from autopar.runtime.ranks.launch import run_local

TENSOR = {"tensor": 2}
CALLS: dict[str, tuple[Any, ...]] = {
    "rows": ("tokens", {}, {"data": 2}, {"blocks.*.attention.q": {"data": "b"}}),
    "heads": ("tokens", {"slices": True}, TENSOR, HEADS),
    "one head for all": ("tokens", {"kv_heads": 1, "rope": True, "experts": 4}, TENSOR, HEADS),
    "stages": ("tokens", {"rope": True}, None, None, 2),
}  # fmt: skip
SLOW = {"one head for all"}
CACHES = {
    "rows": {(2, 4, 80, 8)}, "heads": {(4, 2, 80, 8)}, "one head for all": {(4, 1, 80, 8)}, "stages": {(4, 4, 80, 8)},
}  # fmt: skip
"""The shapes of this rank's part of the caches."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_local(several, 2, "cached", {**selected(request, CALLS, SLOW), "left alone": ("left_alone",)})


@pytest.mark.parametrize("case", marked(CALLS, SLOW))
def test_tokens_are_those_of_one_device(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert rank[case]["same"] == [True, True, True]
        assert rank[case]["caches"] == CACHES[case]
        assert rank[case]["worst"] < 1e-9
        assert rank[case]["captures"] == 2  # one token, and the other prompt


def test_a_buffer_that_some_programs_of_a_pipeline_leave_alone(found: list[dict[str, Any]]) -> None:
    assert all(max(rank["left alone"]) < 1e-9 for rank in found)


def test_rows_and_heads_of_two_axes() -> None:
    sizes = {"kv_heads": 2, "rope": True}
    both = {"blocks.*.attention.q": {"data": "b", "tensor": "n"}}
    for rank in run_local(several, 4, "cached", {"": ("tokens", sizes, {"data": 2, **TENSOR}, both)}):
        assert rank[""]["same"] == [True, True, True]
        assert rank[""]["caches"] == {(2, 1, 80, 8)}
        assert rank[""]["worst"] < 1e-9
