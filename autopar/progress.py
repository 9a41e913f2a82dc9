"""What long work tells whoever waits for it: the module that is traced, the layout that is planned.

Nothing is told where nobody listens; what comes often, ten times a second at most.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Say = Callable[[str], None]

SECONDS = 0.1
"""Between two things that are told."""


class _Listener:
    """Who listens, and when it heard something last."""

    def __init__(self, say: Say) -> None:
        self.say, self.last, self.best = say, 0.0, ""


_LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def heard(say: Say) -> Iterator[None]:
    """What is told in here, ``say`` hears."""
    token = _LISTENER.set(_Listener(say))
    try:
        yield
    finally:
        _LISTENER.reset(token)


def is_heard() -> bool:
    """Whether anybody listens."""
    return _LISTENER.get() is not None


def tell(text: Callable[[], str], *, often: bool = True) -> None:
    """Tell something, if somebody listens.

    Args:
        text: makes it; called only then.
        often: it comes often, and may be left out where something was heard within :data:`SECONDS`.

    What is the best so far (:func:`note_best`) is told with it.
    """
    listener = _LISTENER.get()
    if listener is None:
        return
    now = time.monotonic()
    if not often or now - listener.last > SECONDS:
        listener.last = now
        listener.say(text() + listener.best)


def note_best(text: str) -> None:
    """Note what is the best so far of what is looked for: it ends all that is told from now on. Nothing ends it."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.best = f"; best so far {text}" if text else ""


__all__ = ["Say", "heard", "is_heard", "note_best", "tell"]
