"""docs/what-people-do.md: every row names its test, and the test is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def cases_of(tree: ast.AST) -> Iterator[str]:
    """Names of functions and classes, keys of tables (of those that are put together, their constant parts), and file
    names of scripts."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Dict(keys=keys):
                yield from (text for key in keys if key is not None for text in _parts(key))
            case ast.DictComp(key=key):
                yield from _parts(key)
            case ast.Constant(value=str(path)) if path.endswith(".py"):
                yield path.rpartition("/")[2]


def _parts(key: ast.expr) -> Iterator[str]:
    for part in key.values if isinstance(key, ast.JoinedStr) else [key]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value.strip(" ,")
            yield part.value.partition(",")[0]


@cache
def known() -> frozenset[str]:
    """Files of tests, and the cases and functions in them."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names |= {path.relative_to(ROOT).as_posix(), *cases_of(ast.parse(path.read_text(encoding="utf-8")))}
    return frozenset(names)


def test_there_are_rows() -> None:
    assert len(rows()) >= AT_LEAST
    assert len({what for what, *_ in rows()}) == len(rows()), "a row stands twice"


@pytest.mark.parametrize(("what", "test"), [(what, test) for what, test, _ in rows()], ids=lambda text: text[:50])
def test_a_row_has_its_test(what: str, test: str) -> None:
    """Each name in the last cell is a file of tests, or a case or a function in one."""
    names = re.findall(r"`([^`]+)`", test)
    assert names, f"no test: {what}"
    assert [name for name in names if name not in known()] == [], what
