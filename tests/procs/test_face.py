"""What people do with a parallel module: right, or one clear error; all on two ranks that are started once."""

from __future__ import annotations

import pytest
from procs.habits_of_use import CASES, every
from procs.in_turn import marked, selected

from autopar.runtime.ranks.launch import run_local

SLOW = (
    "losses_of_parameters", "penalties_of_parameters", "statistics_taken_anew", "plain_tensors_beside_parameters",
    "an_input_of_a_pipeline_that_was_not_to_want_a_gradient", "input_gradients_of_a_pipeline", "a_number_of_a_stage",
    "ranks_write_random_numbers_of_their_own",
)  # fmt: skip
"""What others do, too, and cost most."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_local(every, 2, list(selected(request, dict.fromkeys(CASES, ()), SLOW)), timeout=240)


@pytest.mark.parametrize("name", marked(CASES, SLOW))
def test_what_people_do(found: list[dict[str, str]], name: str) -> None:
    assert [rank[name] for rank in found] == ["", ""], "\n".join(rank[name] for rank in found)
