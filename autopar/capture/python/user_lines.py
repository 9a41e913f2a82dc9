"""Places in the user's code, told from the frames of Python."""

from __future__ import annotations

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
