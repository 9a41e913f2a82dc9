"""Ways in which a command ends early: SIGTERM acts like Ctrl-C, and a model's code cannot end it in silence."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

from autopar.errors import ModelError

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], bool]]:
    """Make SIGTERM, by which a job scheduler ends a command, act like Ctrl-C in this scope.

    Yields a function that says if the signal has come. Ranks of torchrun are left alone: they wait for each other, and
    torchrun ends them all.
    """
    came: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
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


def to_its_end(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that ``sys.exit(0)`` in a model's code is an error and does not look like success."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except SystemExit as stop:
            raise ModelError(
                f"the model's code called sys.exit({stop.code!r}), and the command is not done; raise an error there, "
                "or return"
            ) from stop

    return run
