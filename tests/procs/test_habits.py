"""What people do in training scripts, on two real ranks with cuts forced: it works, or there is one clear error."""

from __future__ import annotations

import re
from typing import Any

import pytest
from procs import habits

from autopar.runtime.launch import run_local

NUMBERS: dict[str, tuple[Any, ...]] = {
    **{f"an optimizer made before, {kind}, {'pipeline' if piped else 'cut'}": ("optimizer_before", kind, piped)
       for kind, piped in (("sgd", False), ("momentum", False), ("adamw", False), ("amsgrad", True), ("named", False),
                           ("named", True), ("adamw", True))},
    "an optimizer made before, ZeRO": ("optimizer_before", "adamw", False, {"*.weight": "S0 use", "*.bias": "S0 step"}),
}  # fmt: skip
"""Cases that train as in eager mode."""

ERRORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "an optimizer left behind, cut": (("old_optimizer", False), "RunError: .*holds 4 of 4 parameters that parallelize"),
    "an optimizer left behind, pipeline": (("old_optimizer", True), "RunError: .*parallelize.model, ..., optimizer="),
}
"""Cases that are refused, and what is said."""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Results of all cases on two ranks, in one start of processes."""
    return run_local(habits.several, 2, {**NUMBERS, **{name: call for name, (call, _) in ERRORS.items()}})


@pytest.mark.parametrize("name", NUMBERS)
def test_it_trains_as_in_eager_mode(found: list[dict[str, Any]], name: str) -> None:
    assert max(rank[name] for rank in found) < 1e-9, [rank[name] for rank in found]


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_refused(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert re.match(ERRORS[name][1], rank[name], re.DOTALL), rank[name]
