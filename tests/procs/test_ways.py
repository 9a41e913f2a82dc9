"""Branches on data on two real ranks: a call that would take another way is an error on all, and the next goes on."""

from __future__ import annotations

from typing import Any

import pytest
from procs.in_turn import several

from autopar.runtime.ranks.launch import run_local

CUTS: dict[str, dict[str, Any]] = {
    "rows": {"constraints": {"*": {"tensor": "b"}}},
    "columns": {"constraints": {"*up": {"tensor": "n"}, "*down": {"tensor": "k"}}},
    "stages": {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_local(several, 2, "ways", {"all": ("all_cuts", CUTS)})


@pytest.mark.parametrize("how", CUTS)
def test_another_way_is_an_error_on_all_ranks(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        first, train, evaluated, then, other = rank["all"][how]
        assert max(first, then, other) < 1e-9
        for text in (train, evaluated):
            assert "branches on data in '<model>' at ways.py:" in text
            assert "the condition is False" in text and "it is True" in text
