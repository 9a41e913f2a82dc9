"""Commands that are ended: by SIGTERM as by Ctrl-C, and never in silence by the code of a model."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autopar.errors import ModelError


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], bool]]:
    """In here SIGTERM, by which a scheduler of jobs ends a command, does what Ctrl-C does.

    Ranks that torchrun started are left alone: they wait for each other, and torchrun ends them all.

    Returns:
        Whether the signal has come.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or "TORCHELASTIC_RUN_ID" in os.environ or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def to_its_end(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that a model's code cannot end: ``sys.exit(0)`` in a forward would look as if all had been done."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SystemExit as stop:
            raise ModelError(
                f"the model's code called sys.exit({stop.code!r}), and the command is not done; raise an error there, "
                "or return"
            ) from stop

    return run


__all__ = ["terminated_as_interrupted", "to_its_end"]
