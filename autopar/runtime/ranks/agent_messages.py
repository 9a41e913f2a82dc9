"""Messages of ranks to the agent of their machine that started them (:mod:`autopar.elastic`), as files in a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from autopar.errors import InfeasibleError, MeshError, PlanError
from hardware_profiles.strict import read_text

FOLDER = "AUTOPAR_ELASTIC_FOLDER"
SAVED, REFUSED = "saved", "refused"
OF_NUMBER = InfeasibleError, MeshError, PlanError
"""Errors that a script may not have on another number of ranks."""
_hooked: list[Any] = []


def tell_agent(name: str, text: str) -> None:
    """Leave a text for the agent, if there is one; the last one of a name counts."""
    folder = os.environ.get(FOLDER)
    if folder:
        written = Path(folder, f".{name}-{os.getpid()}")
        written.write_text(text, encoding="utf-8")
        written.rename(Path(folder, name))


def heard(folder: Path, name: str) -> str | None:
    """Return the message of some rank; None if there is none."""
    path = folder / name
    return read_text(path) if path.exists() else None


def tell_of_refusal() -> None:
    """Report, from now on, an error that ends the script because the model has no plan for this number of ranks."""
    if _hooked or not os.environ.get(FOLDER):
        return
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, OF_NUMBER):
            tell_agent(REFUSED, f"{kind.__name__}: {error}")
        before(kind, error, traceback)

    _hooked.append(told)
    sys.excepthook = told
