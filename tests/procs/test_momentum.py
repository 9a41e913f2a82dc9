"""A momentum encoder that its model's forward renews, on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from procs import momentum
from procs.in_turn import marked

from autopar.runtime.ranks.launch import run_local

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "batch cut": ({"constraints": {"q.*": {"data": "b"}, "k.*": {"data": "b"}}}, False),
    "encoders cut": ({"constraints": {"q.0": {"data": "n"}, "k.0": {"data": "n"}}}, False),
    "gathered for a use": ({"params": {"q.*.weight": "S0 use"}}, False),
    "written by hand, too": ({"constraints": {"q.*": {"data": "b"}}}, True),
}


@pytest.mark.parametrize("name", marked(CASES, {"batch cut", "gathered for a use"}))
def test_trains_as_in_eager_mode(name: str) -> None:
    assert max(run_local(momentum.trains, 2, *CASES[name])) < 1e-9


def test_is_saved_and_loaded() -> None:
    assert max(run_local(momentum.saved_and_loaded, 2)) < 1e-12
