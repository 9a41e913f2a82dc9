"""Threads that look into the process group's store end before the interpreter does.

A daemon thread is left behind when the interpreter ends. One that is within a request to the store then, whose answer
comes while the interpreter is taken down, is unwound by Python through code of C++ that allows no unwinding:
``terminate called without an active exception``, and a rank whose work was done counts as failed. So at exit each is
told to end, and waited for; there are few requests, and each is answered at once unless the store is gone.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

from autopar.words.trees import PyTree

LONGEST_SECONDS = 10.0
"""How long a thread is waited for at exit: a request to a store that is gone, or far away, may not return."""


class StoreThread(threading.Thread):
    """A thread that asks the store again and again; it ends by itself, when told to, or at exit.

    Attributes:
        told_to_end: set for the thread to look at, and to wait for between two requests.
    """

    def __init__(self, target: Callable[..., None], args: tuple[PyTree, ...], told_to_end: threading.Event) -> None:
        super().__init__(target=target, args=args, daemon=True)
        self.told_to_end = told_to_end
        _running.add(self)

    def end(self, seconds: float) -> None:
        """End the thread, waiting at most ``seconds`` for it."""
        self.told_to_end.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join(seconds)


_first: list[Callable[[], None]] = []


def before_end(does: Callable[[], None]) -> None:
    """Make a rank of :func:`~autopar.runtime.ranks.launch.run_local` do something before its result counts.

    Such as finishing a save in a thread: the process is ended soon after.
    """
    if does not in _first:
        _first.append(does)


def end_rank() -> None:
    """Do what is to be done before.

    Raises:
        Exception: it went wrong.
    """
    for does in _first:
        does()


_running: weakref.WeakSet[StoreThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for thread in list(_running):
        thread.told_to_end.set()
    for thread in list(_running):
        thread.end(LONGEST_SECONDS)
