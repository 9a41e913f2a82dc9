"""The command ``autopar``, called in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
from json_answers import held_to_its_schema
from unit.test_cli import MODEL

from autopar.cli import main


def command(*words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["autopar", *map(str, words)]), pytest.raises(SystemExit) as end:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    held_to_its_schema(list(map(str, words)), out.getvalue())
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def plan_all(folder: Path, kinds: Mapping[str, Sequence[object]]) -> Path:
    """The folder, with ``net.py:make`` and a plan of each kind, made with these words after ``plan net.py:make``."""
    (folder / "net.py").write_text(MODEL)
    for kind, words in kinds.items():
        code, _, err = command("plan", folder / "net.py:make", *words, "-o", folder / f"{kind}.json")
        assert code == 0, err
    return folder
