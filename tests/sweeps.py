"""Tests, and cases of tests, that only the sweeps run (``make test-all``): ``sweeps.txt`` lists them.

They take long and try once more, on other models and numbers, what a cheaper case beside them shows every time. The
list is a file of its own because what belongs there is decided by CPU-seconds of the whole suite, not test by test; a
case that is added to a test runs every time until it is listed. Tests with ranks of their own name theirs in ``SLOW``
(``procs/in_turn.py``), since what such a case does is done before its test.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LISTED = FOLDER / "sweeps.txt"


def sweeps(text: str) -> dict[str, set[str]]:
    """The cases of each listed test, by ``file::test``; none where the whole test is listed.

    A line names a test, lines behind it that begin with two spaces its cases, by the ids that pytest gives them.
    """
    found: dict[str, set[str]] = {}
    test = ""
    for line in text.splitlines():
        if line.startswith("  "):
            found[test].add(line[2:])
        elif line and not line.startswith("#"):
            test = line
            found[test] = set()
    return found


def mark(items: Iterable[pytest.Item], whole_files: bool) -> None:
    """Mark what is listed as slow.

    Raises:
        UsageError: of a file that was collected whole, the list names what there is not.
    """
    listed = sweeps(LISTED.read_text(encoding="utf-8"))
    files: set[str] = set()
    missing = {test: cases or {""} for test, cases in listed.items()}
    for item in items:
        file = item.path.relative_to(FOLDER).as_posix()
        files.add(file)
        name, _, case = item.name.partition("[")
        test, case = f"{file}::{name}", case.removesuffix("]")
        cases = listed.get(test)
        if cases is None or (cases and case not in cases):
            continue
        item.add_marker(pytest.mark.slow)
        missing[test] = missing[test] - {case if cases else ""}
    wrong = [
        f"{test}[{case}]" if case else test
        for test, cases in missing.items() if test.partition("::")[0] in files for case in sorted(cases)
    ]  # fmt: skip
    if wrong and whole_files:
        raise pytest.UsageError(f"{LISTED.name} names what there is not: {', '.join(wrong)}; take it out of the list")
