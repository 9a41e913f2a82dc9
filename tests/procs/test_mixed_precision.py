"""Mixed precision on two and four real ranks: the numbers of one device under the same autocast, scaler and policy."""

from __future__ import annotations

from typing import Any

import pytest
from procs import mixed_precision
from procs.in_turn import several

from autopar.runtime.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    f"{cut} {'inside' if inside else 'around'}": ("trained", cut, inside)
    for cut in mixed_precision.CUTS for inside in (True, False)
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_local(several, 2, "mixed_precision", {**CALLS})


@pytest.mark.parametrize("how", list(CALLS))
def test_the_numbers_of_one_device_under_autocast(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        low, full, captures = rank[how]
        assert low < 2e-2 and full < 1e-6  # sums in bfloat16 come in another order
        assert captures == (0 if "inside" in how else 1)  # each state of autocast once
