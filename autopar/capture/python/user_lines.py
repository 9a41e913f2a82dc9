"""Where in the user's code something happens, told from the frames of Python."""

from __future__ import annotations

import os
import sysconfig
from typing import Any

import torch

_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "")
_MACHINERY = os.path.join(_TORCH, "nn", "modules", "module.py")
_SITE = "site-packages"


def is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor torch's, nor this package's."""
    if file.startswith("<") or file.startswith((_TORCH, _HERE)):
        return False
    return not file.startswith(_STDLIB) or _SITE in file


def is_own(file: str) -> bool:
    """Whether a file is the user's and not that of an installed package."""
    return is_users(file) and _SITE not in file and "dist-packages" not in file


def from_machinery(frame: Any) -> bool:
    """Whether a frame is of torch's tracing or of Python, which looks at attributes that a model does not use."""
    file = frame.f_code.co_filename
    if file.startswith(_LAYERS):
        return file == _MACHINERY
    return file.startswith(_TORCH) or not (is_users(file) or file.startswith("<"))


def user_line(frame: Any) -> str:
    """``file.py:12`` of the innermost line of the user's; empty if there is none."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


__all__ = ["from_machinery", "is_own", "is_users", "user_line"]
