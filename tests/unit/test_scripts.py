"""The table of other people's scripts: sources at a commit, at most five changed lines in each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.table import SCRIPTS

DIFFS = Path(__file__).resolve().parents[1] / "scripts" / "diffs"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_a_source_and_at_most_five_changed_lines(name: str) -> None:
    script = SCRIPTS[name]
    assert re.fullmatch(r"[\w-]+/[\w.-]+@[0-9a-f]{40}", script.source)
    lines = (DIFFS / f"{script.diff or name}.diff").read_text().splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert 1 <= len(added) <= 5
    assert any("autopar.parallelize(" in line or "from autopar.integrations import" in line for line in added)


def test_every_diff_is_of_a_script() -> None:
    assert {path.stem for path in DIFFS.glob("*.diff")} == {script.diff or name for name, script in SCRIPTS.items()}
