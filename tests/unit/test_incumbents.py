"""Which estimates are planned exactly, and when a search has enough."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.candidates import Candidate
from autopar.planner.inter_op.incumbents import Incumbents
from autopar.words.meshes import Mesh

MANY = 4 * EFFORT.few_devices
GROUPS = 4


class Search:
    """Plans candidates exactly by a table: seconds of a step by their estimates, each by so many programs."""

    def __init__(self, exact: dict[float, float], programs: int = EFFORT.few_programs) -> None:
        self.seconds, self.planned, self.programs = exact, [], programs

    def n_programs(self, candidate: Candidate) -> int:
        return self.programs

    def what(self, candidate: Candidate) -> str:
        return str(candidate.seconds)

    def exact(self, candidate: Candidate, best_known: float) -> Any:
        self.planned.append(candidate.seconds)
        return SimpleNamespace(
            seconds=self.seconds[candidate.seconds], what=self.what(candidate), candidate=candidate, search=self
        )


def estimated(seconds: float) -> Candidate:
    mesh = Mesh.of(data=MANY // GROUPS)
    devices = tuple(tuple(range(g * mesh.n_devices, (g + 1) * mesh.n_devices)) for g in range(GROUPS))
    return Candidate((mesh,) * GROUPS, devices, "1f1b", (1, 2, 3), seconds)


@pytest.mark.parametrize("order, planned", [
    ([10.9, 11.5, 10.8], [10.9, 10.8]),  # the first few come in the order of their programs, not of their estimates
    ([10.8, 10.9, 11.5], [10.8]),
])  # fmt: skip
def test_what_looks_better_than_the_best_is_planned_whatever_comes_before(
    order: list[float], planned: list[float]
) -> None:
    """GPT-3 on 64 devices had an estimate of 10.79 s that nobody planned, behind one of 11.00 s that was too long."""
    search = Search({10.8: 10.85, 10.9: 10.88, 11.5: 11.4, 12.0: 12.0})
    best = Incumbents(MANY)
    best.plan_exactly([(search, estimated(seconds)) for seconds in order])  # type: ignore[list-item]
    assert search.planned == planned
    assert best.fastest.seconds == 10.85


@pytest.mark.parametrize("programs, fastest", [(4, 10.4), (EFFORT.few_programs, 10.8)])
def test_what_costs_little_is_planned_where_its_estimate_may_be_too_long(programs: int, fastest: float) -> None:
    """Llama-3-8B on 64 devices had three exact plans, and a fourth estimate whose plan is 2% better than theirs."""
    exact = {10.8: 10.8, 10.9: 10.9, 10.95: 10.95, 11.2: 10.4, 11.6: 10.0}
    search, best = Search(exact, programs), Incumbents(MANY)
    best.plan_exactly([(search, estimated(seconds)) for seconds in exact])  # type: ignore[list-item]
    assert best.fastest.seconds == fastest
    assert 11.6 not in search.planned


@pytest.mark.parametrize("stages, planned", [(2 * GROUPS, [10.8, 10.8]), (GROUPS, [10.8])])
def test_the_fastest_is_planned_with_equal_shares_too(stages: int, planned: list[float]) -> None:
    """Where groups have several stages: of one stage a group all memory is its share."""
    search, best = Search({10.8: 10.85}), Incumbents(MANY)
    candidate = replace(estimated(10.8), n_bytes=((1.0, 2.0),) * stages, once_bytes=(3.0,) * stages)
    best.plan_exactly([(search, candidate)])  # type: ignore[list-item]
    best.share_equally([search])  # type: ignore[list-item]
    assert search.planned == planned
    assert [bool(plan.candidate.n_bytes) for plan in best.plans] == [True, False][: len(planned)]


@pytest.mark.parametrize("top, planned", [(2, [10.8, 10.9]), (3, [10.8, 10.9, 11.5])])
def test_the_next_best_are_planned_after_the_best(top: int, planned: list[float]) -> None:
    """Until there are so many layouts, and two in a row are no faster than the last of them."""
    search, best = Search({10.8: 10.85, 10.9: 10.95, 11.5: 11.6, 12.0: 12.1, 12.5: 12.6}), Incumbents(MANY)
    ways = [(search, estimated(seconds)) for seconds in (10.8, 12.5, 12.0, 10.9, 11.5)]
    best.plan_exactly(ways[:1])  # type: ignore[arg-type]
    best.next_best(top, ways)  # type: ignore[arg-type]
    assert search.planned == planned
    assert best.fastest.seconds == 10.85
