"""What people write in training loops: as in eager mode, or one clear error; all on two ranks that are started once."""

from __future__ import annotations

import pytest
from procs.habits_of_loops import LOOPS, REFUSED_LOOPS, every_loop

from autopar.runtime.ranks.launch import run_local

LAYOUTS = [pytest.param(False, id="one"), pytest.param(True, id="all", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_local(every_loop, 2, request.param, timeout=240)


@pytest.mark.parametrize("name", [*LOOPS, *REFUSED_LOOPS])
def test_what_people_write(found: list[dict[str, str]], name: str) -> None:
    assert [rank[name] for rank in found] == ["", ""], "\n".join(rank[name] for rank in found)
