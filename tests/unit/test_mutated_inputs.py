"""Plans, profiles, clusters, configs and options with one thing wrong: no traceback, 30 seconds, 2 GB."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from mutated_inputs import cases, made_plans, tried

QUICK = 60


def _wrong(count: int, folder: Path) -> list[str]:
    with contextlib.chdir(folder):
        outcomes = [tried(case) for case in cases(count, made_plans())]
    return [f"{o.case.what}: {' '.join(o.case.words)}\n{o.wrong}" for o in outcomes if o.wrong]


def test_some(tmp_path: Path) -> None:
    assert not _wrong(QUICK, tmp_path)


@pytest.mark.slow
def test_twelve_hundred(tmp_path: Path) -> None:
    assert not _wrong(1200, tmp_path)


def test_cases_are_the_same_again(tmp_path: Path) -> None:
    plans = {"plan.json": '{"autopar_plan": 2, "stages": [{"mesh": "data=2"}]}'}
    first, second = list(cases(200, plans)), list(cases(200, plans))
    assert first == second and len({case.what for case in first}) > 150
    assert {case.words[0] for case in first} >= {"plan", "show", "explain", "diff", "simulate", "report", "check"}
