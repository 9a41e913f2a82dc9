"""Every repair of torch makes something right that is wrong without it, on the versions that it names and no others."""

from __future__ import annotations

from procs.repairs import CASES, RIGHT, with_and_without

from autopar.runtime.ranks.launch import run_local
from autopar.runtime.repairs.dtensor_fixes import REPAIRS


def test_each_is_needed_where_it_says_so() -> None:
    ranks = run_local(with_and_without, 2, timeout=120)
    for name in CASES:
        of_ranks = [results[name] for results in ranks]
        assert {repaired for repaired, _, _ in of_ranks} == {RIGHT}, f"{name}: {of_ranks}"
        if of_ranks[0][1] is not None:
            is_wrong = any(alone != RIGHT for _, alone, _ in of_ranks)
            assert is_wrong == of_ranks[0][2], f"{name}: needed {of_ranks[0][2]}, without it {of_ranks}"


def test_each_has_a_case() -> None:
    assert [repair.name for repair in REPAIRS] == list(CASES)
