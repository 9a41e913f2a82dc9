"""A user's own backward on two real ranks, with cuts forced around it."""

from __future__ import annotations

from typing import Any

import pytest
from procs import own_code

from autopar.runtime.ranks.launch import run_local

CUT = {"constraints": {"up": {"data": "b"}, "mid": {"data": "b"}}}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "cut": (CUT, False),
    "gathered for a use": ({**CUT, "params": {"*.weight": "S0 use", "*.bias": "S0 use"}}, False),
    "pipeline": ({"stages": 2, "schedule": "1f1b", "microbatches": 1, "cuts": ["mid"]}, True),
}


@pytest.mark.parametrize("name", list(CASES))
def test_trains_as_in_eager_mode(name: str) -> None:
    assert max(run_local(own_code.trains, 2, *CASES[name])) < 1e-9
