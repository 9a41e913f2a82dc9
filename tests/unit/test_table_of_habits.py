"""docs/what-people-do.md: every row names its test, and the test is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "what-people-do.md"
AT_LEAST = 40


def rows() -> list[tuple[str, str, str]]:
    """``(what people do, its test, the files that its section names)`` of tables that have a column of tests."""
    table: list[tuple[str, str, str]] = []
    with_tests, named = False, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            with_tests = False
        elif cells[-1].strip(" |") == "test":
            with_tests = True
        elif with_tests and not set(line) <= set("|- "):
            table.append((cells[0], cells[-1].strip(" |"), named))
    return table


@cache
def texts() -> dict[str, str]:
    """All files of tests, by their paths."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")
    }


def test_there_are_rows() -> None:
    assert len(rows()) >= AT_LEAST
    assert len({what for what, *_ in rows()}) == len(rows()), "a row stands twice"


@pytest.mark.parametrize(("what", "test"), [(what, test) for what, test, _ in rows()], ids=lambda text: text[:50])
def test_a_row_has_its_test(what: str, test: str) -> None:
    """Each name in the last cell is a file of tests, or stands in one: a case or a function."""
    names = re.findall(r"`([^`]+)`", test)
    assert names, f"no test: {what}"
    for name in names:
        if name.startswith("tests/"):
            assert name in texts(), f"{name}: {what}"
        else:
            assert any(name in text for text in texts().values()), f"{name}: {what}"
