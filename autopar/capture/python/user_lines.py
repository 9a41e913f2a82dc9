"""Places in the user's code, told from the frames of Python."""

from __future__ import annotations

import dis
import itertools
import os
import sysconfig
from types import FrameType

import torch


def _folder(path: str) -> tuple[str, ...]:
    """Return a folder's name as given and without links, since frames may have either."""
    return tuple(dict.fromkeys(os.path.join(name, "") for name in (os.path.abspath(path), os.path.realpath(path))))


_STDLIB = _folder(sysconfig.get_path("stdlib"))
_TORCH = _folder(os.path.dirname(torch.__file__))
_HERE = _folder(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_LAYERS = tuple(os.path.join(folder, "nn", "") for folder in _TORCH)
_MACHINERY = tuple(os.path.join(folder, "modules", "module.py") for folder in _LAYERS)
_SITE = "site-packages"


def is_users(file: str) -> bool:
    """Check that a file is neither Python's, nor torch's, nor this package's."""
    if file.startswith("<") or file.startswith(_TORCH + _HERE):
        return False
    return not file.startswith(_STDLIB) or _SITE in file


def is_own(file: str) -> bool:
    """Check that a file is the user's and not that of an installed package."""
    return is_users(file) and _SITE not in file and "dist-packages" not in file


def from_machinery(frame: FrameType) -> bool:
    """Check that a frame is of torch's tracing or of Python, which reads attributes that a model does not use."""
    file = frame.f_code.co_filename
    if file.startswith(_LAYERS):
        return file in _MACHINERY
    return file.startswith(_TORCH) or not (is_users(file) or file.startswith("<"))


def user_line(frame: FrameType) -> str:
    """Return ``file.py:12`` of the innermost line of the user's; empty if there is none."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def place_in(frame: FrameType) -> tuple[int, int | None, int | None]:
    """Return the line and the columns (None where unknown) of what a frame evaluates right now.

    Where a frame decides whether it jumps, that is what it decides by: the jump itself has the place of the whole
    statement, which has as many questions as ``and`` and ``or`` put together. By columns and not by instructions:
    Python moves between instructions of one call when it has run often.
    """
    code, at = frame.f_code.co_code, frame.f_lasti // 2
    if "JUMP" in dis.opname[code[2 * at]] or dis.opname[code[2 * at]] == "TO_BOOL":
        at -= 1
        while at > 0 and dis.opname[code[2 * at]] in ("CACHE", "TO_BOOL", "COPY"):
            at -= 1
    line, _, begin, end = next(itertools.islice(frame.f_code.co_positions(), at, None), (None,) * 4)
    return line or frame.f_lineno, begin, end


__all__ = ["from_machinery", "is_own", "is_users", "place_in", "user_line"]
