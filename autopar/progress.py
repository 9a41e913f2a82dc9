"""Progress of long work: the module being traced, the layout being planned.

Nothing is computed without a listener; frequent messages are limited to ten per second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Say = Callable[[str], None]

SECONDS = 0.1
"""Least seconds between two frequent messages."""


class _Listener:
    """A listener, and the time of its last message."""

    def __init__(self, say: Say) -> None:
        self.say, self.last, self.best = say, 0.0, ""


_LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def heard(say: Say) -> Iterator[None]:
    """Send messages from this scope to ``say``."""
    token = _LISTENER.set(_Listener(say))
    try:
        yield
    finally:
        _LISTENER.reset(token)


def is_heard() -> bool:
    """Return True if there is a listener."""
    return _LISTENER.get() is not None


def tell(text: Callable[[], str], *, often: bool = True) -> None:
    """Send a message to the listener, if there is one, followed by the best result so far (:func:`note_best`).

    ``text`` makes the message. An ``often`` one is dropped within :data:`SECONDS` of the last message.
    """
    listener = _LISTENER.get()
    if listener is None:
        return
    now = time.monotonic()
    if not often or now - listener.last > SECONDS:
        listener.last = now
        listener.say(text() + listener.best)


def note_best(text: str) -> None:
    """Set the best result so far, which ends all messages from now on; an empty text clears it."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.best = f"; best so far {text}" if text else ""
