"""Rows of measured serving that are set aside: measured values and bytes decide, never a price."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from serving import DIFFERENT, IMPOSSIBLE, LATE, UNCOUNTED, Case, contradicting, least_token_seconds

CASE = Case("a", "llama-3.1-70b", "h200_sxm", "trtllm", "1", "fp8", 1024, 1024, 2, 1, 1, 4, 0.1, 0.02, True, "")


def said(*cases: Case) -> list[str]:
    """Return why each case is set aside."""
    return [case.suspect for case in contradicting(list(cases))]


def test_rows_that_agree_count() -> None:
    longer = replace(CASE, name="b", output_tokens=8192, first=0.11)
    assert said(CASE, longer, replace(CASE, name="c", batch=8, token=0.019)) == ["", "", ""]


def test_a_setting_that_was_measured_twice_with_other_times() -> None:
    other = replace(CASE, name="b", token=0.031)
    assert said(CASE, other, replace(CASE, name="c", batch=8)) == [DIFFERENT] * 3
    assert said(CASE, replace(CASE, name="b", token=0.029)) == ["", ""]


def test_less_time_than_reading_the_weights() -> None:
    least = least_token_seconds(CASE)
    assert 35e9 / 4.8e12 < least < 1.1 * 35e9 / 4.8e12
    assert said(replace(CASE, token=0.99 * least), replace(CASE, name="b", batch=8)) == [IMPOSSIBLE, ""]


def test_answers_that_begin_many_tokens_late() -> None:
    longer = replace(CASE, name="b", output_tokens=8192, first=0.1)
    assert said(replace(CASE, first=0.5), longer) == [LATE, ""]
    assert said(replace(CASE, first=0.2), longer) == ["", ""]


def test_a_reason_that_a_row_had_before_stays() -> None:
    assert said(replace(CASE, suspect=UNCOUNTED)) == [UNCOUNTED]
