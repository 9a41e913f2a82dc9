"""A HiGHS engine that prints nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

_one_at_a_time = threading.Lock()


def silent_engine() -> Any:
    """Return a new engine with its output off.

    From HiGHS 1.16 on the constructor itself prints a banner, before any option can be set, which would stand in front
    of what ``autopar plan --json`` prints. So the standard output of the process leads nowhere for that moment.
    """
    import highspy  # which may be missing: CBC solves then, and nobody asks for an engine

    with _stdout_nowhere() if hasattr(os, "dup2") else contextlib.nullcontext():
        engine = highspy.Highs()
    engine.setOptionValue("output_flag", False)
    return engine


@contextlib.contextmanager
def _stdout_nowhere() -> Iterator[None]:
    """Discard what C code prints in this scope, after writing what Python has printed before."""
    with _one_at_a_time, contextlib.ExitStack() as at_end:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
            kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        except (OSError, ValueError):  # there is no standard output
            yield
            return
        at_end.callback(os.close, kept)
        at_end.callback(os.close, nowhere)
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        os.dup2(nowhere, 1)
        try:
            yield
        finally:
            libc.fflush(None)
            os.dup2(kept, 1)
