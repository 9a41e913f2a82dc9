"""What people do around a step: as in eager mode, or one clear error; all on two ranks that are started once."""

from __future__ import annotations

import pytest
from procs.habits_of_training import REFUSED, SAME, every

from autopar.runtime.ranks.launch import run_local

LAYOUTS = [pytest.param(False, id="one"), pytest.param(True, id="all", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_local(every, 2, request.param, timeout=240)


@pytest.mark.parametrize("name", [*SAME, *REFUSED])
def test_what_people_do(found: list[dict[str, str]], name: str) -> None:
    assert [rank[name] for rank in found] == ["", ""], "\n".join(rank[name] for rank in found)
