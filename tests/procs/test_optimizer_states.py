"""The state of an optimizer goes from one process to a mesh or a pipeline, and back."""

from __future__ import annotations

from typing import Any

import pytest
from procs import optimizer_states
from procs.in_turn import several

from autopar.runtime.ranks.launch import run_local

CASES = [(how, make) for how in ("zero", "pipeline") for make in optimizer_states.MAKES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("states")
    calls: dict[str, tuple[Any, ...]] = {
        how: ("both_ways", how, str(path)) for how in ("zero", "pipeline")
    }
    return run_local(several, 2, "optimizer_states", calls)


@pytest.mark.parametrize(("how", "make"), CASES)
def test_a_run_goes_on_on_the_other_side(found: list[dict[str, Any]], how: str, make: str) -> None:
    for rank in found:
        wanted, went_on, returned, said = rank[how][make]
        assert went_on == pytest.approx(wanted, rel=1e-12)
        assert returned == pytest.approx(wanted, rel=1e-12)
        assert "give what optimizer.state_dict() gives" in said[0]
        assert "groups of 2 parameters, this one has " in said[1] and "rank 0 has no state" in said[2]
        assert how == "zero" or "lists its parameters in another order than model.parameters()" in said[3]
