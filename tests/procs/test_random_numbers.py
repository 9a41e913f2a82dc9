"""Random numbers on real ranks: apart where eager mode's are, governed by torch's generator, alike on all meshes and in
any number of microbatches; or eager mode's own."""

from __future__ import annotations

from typing import Any

import pytest
from procs import random_numbers
from procs.in_turn import LONG, marked, selected, several

from autopar.runtime.ranks.launch import run_local

KINDS = ("Noise", "Drops", "Masks")
FIRST = "rows, sharded"
CASES = {f"{how}, {mode}": ("alike", how, mode) for how in random_numbers.HOW for mode in ("torch", "sharded")}
SLOW = {
    "queries, torch", "queries, sharded", "ring, sharded", "gathered and again, sharded", "own rows, torch",
    "own rows in stages, torch", "own rows in stages, sharded", "own rows in 2 microbatches, sharded",
    "seeded apart, sharded", "2 microbatches, torch", "2 microbatches, sharded", "4 microbatches, torch",
    "columns, sharded", "ring, torch", "gathered and again, torch", "stages, sharded",
}  # fmt: skip
ON_FOUR = {
    f"on 4 ranks, {case}": CASES[case] for case in ("columns, torch", "stages, torch", "4 microbatches, sharded")
}
SLOW_ON_FOUR = {"on 4 ranks, columns, torch", "on 4 ranks, 4 microbatches, sharded"}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    calls = dict(selected(request, CASES, SLOW))
    calls |= {f"apart {kind}": ("apart", kind) for kind in KINDS}
    calls |= {"resumed": ("resumed", str(tmp_path_factory.mktemp("draws"))), "back": ("taken_back",)}
    return run_local(several, 2, "random_numbers", {**calls, "refused": ("refused",)}, timeout=LONG)


@pytest.fixture(scope="module")
def on_four(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    calls = selected(request, ON_FOUR, SLOW_ON_FOUR)
    return run_local(several, 4, "random_numbers", calls, timeout=LONG)


def check(results: dict[str, Any], case: str, first: list[float], stands_elsewhere: bool = False) -> None:
    """Losses are eager mode's; or those of the first plan, and not eager mode's."""
    losses, eager, stands = results[case]
    if case.endswith("torch"):
        assert losses == pytest.approx(eager, rel=1e-9)
        assert stands or stands_elsewhere
    else:
        assert losses == pytest.approx(first, rel=1e-9)
        assert abs(losses[0] - eager[0]) > 1e-3


@pytest.mark.parametrize("case", marked(CASES, SLOW))
def test_those_of_eager_mode_or_the_same_on_all_meshes(found: list[dict[str, Any]], case: str) -> None:
    for rank, results in enumerate(found):
        check(results, case, results[FIRST][0], rank == 1 and case.startswith("seeded apart"))


@pytest.mark.parametrize("case", marked(ON_FOUR, SLOW_ON_FOUR))
def test_on_2_by_2(found: list[dict[str, Any]], on_four: list[dict[str, Any]], case: str) -> None:
    for results in on_four:
        check(results, case, found[0][FIRST][0])


@pytest.mark.parametrize("kind", KINDS)
def test_modules_calls_and_copies_draw_apart_and_a_seed_governs_them(found: list[dict[str, Any]], kind: str) -> None:
    for results in found:
        alike = results[f"apart {kind}"]
        of_chance = 0.0 if kind == "Noise" else 0.5
        for name in ("modules", "copy", "calls"):
            assert alike.pop(name) == pytest.approx(of_chance, abs=0.15), name
        assert alike.pop("eval") == pytest.approx(1.0 if kind == "Drops" else of_chance, abs=0.15)
        assert alike == dict.fromkeys(alike, 1.0)


def test_a_run_goes_on_in_another_number_of_microbatches(found: list[dict[str, Any]]) -> None:
    for results in found:
        went_on, again = results["resumed"]
        assert again == pytest.approx(went_on, rel=1e-9)


def test_weights_that_are_taken_back_bring_no_noise_back(found: list[dict[str, Any]]) -> None:
    assert [results["back"] for results in found] == [0.0, 0.0]


def test_what_torchs_numbers_do_not_go_with(found: list[dict[str, Any]]) -> None:
    for results in found:
        compiled, recorded, asked, other = results["refused"]
        assert "are not compiled" in compiled and "random='sharded', the default" in compiled
        assert "is not recorded" in recorded
        assert "goes with no compile=" in asked
        assert "random is 'numpy'; give 'sharded' or 'torch'" in other
