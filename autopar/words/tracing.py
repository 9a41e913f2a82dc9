"""Whether code runs to be recorded for a compiler, which wants other operators than a run does.

A compiler takes functional collectives, and no kernels of autopar's own; and what it records must not depend on values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_depth = 0


@contextlib.contextmanager
def traced_for_a_compiler() -> Iterator[None]:
    """Enclose a run on tensors without values that is recorded for a compiler."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_traced() -> bool:
    """Check whether what runs now is recorded for a compiler: a program's own, or the caller's ``torch.compile``."""
    return _depth > 0 or torch.compiler.is_compiling()
