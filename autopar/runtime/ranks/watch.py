"""The one thread of a rank that looks into the process group's store, for all who want to hear of other ranks.

It ends before the interpreter does. A daemon thread is left behind when that ends. One that is within a request to the
store then, whose answer comes while the interpreter is taken down, is unwound by Python through code of C++ that allows
no unwinding: ``terminate called without an active exception``, and a rank whose work was done counts as failed. So at
exit it is told to end, and waited for; there are few requests, and each is answered at once unless the store is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

Look = Callable[[], float | None]
"""Looks once, without waiting long; gives seconds until it is to look again, None if it need not."""
LONGEST_SECONDS = 10.0
"""How long the thread is waited for at exit: a request to a store that is gone, or far away, may not return."""


class StoreWatch:
    """Looks into the store of one world, in a thread; it ends when that world has, or none is left to look."""

    def __init__(self) -> None:
        self.world, self.pid = dist.group.WORLD, os.getpid()
        self.changed = threading.Condition()
        self.due: dict[Look, float] = {}
        self.leaving: list[Callable[[], None]] = []
        self.ends = False
        self.thread = threading.Thread(target=self._run, name="autopar watch", daemon=True)

    def add(self, look: Look, seconds: float, leave: Callable[[], None] | None) -> bool:
        """Look first in ``seconds``, and then as often as ``look`` says; return False if the thread has ended."""
        if self.pid != os.getpid():  # a forked process has the lock as it was, and no thread
            return False
        with self.changed:
            if self.ends or self.world is not dist.group.WORLD:
                return False
            self.due[look] = time.monotonic() + seconds
            self.leaving += [leave] if leave is not None else []
            self.changed.notify()
            if self.thread.ident is None:
                self.thread.start()
        return True

    def _run(self) -> None:
        while self._looks():
            pass
        for leave in self.leaving:
            with contextlib.suppress(dist.DistError, RuntimeError):
                leave()

    def _looks(self) -> bool:
        """Wait for who is to look next, and let them; return False at the end."""
        with self.changed:
            now = time.monotonic()
            self.ends = self.ends or dist.group.WORLD is not self.world or not self.due
            if self.ends:
                return False
            ready = [look for look, at in self.due.items() if at <= now]
            if not ready:
                self.changed.wait(min(self.due.values()) - now)
        for look in ready:
            again: float | None = None
            with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone
                again = look()
            with self.changed:
                self.due.pop(look, None)
                if again is not None:
                    self.due[look] = time.monotonic() + again
        return True

    def end(self, seconds: float = LONGEST_SECONDS) -> None:
        """End the thread, waiting at most ``seconds`` for it."""
        if self.pid != os.getpid():
            return
        with self.changed:
            self.ends = True
            self.changed.notify()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(seconds)


_watches: list[StoreWatch] = []
"""The last one is that of the present world."""


def watch(look: Look, seconds: float, leave: Callable[[], None] | None = None) -> None:
    """Look into the store with this rank, first in ``seconds``; another world, or a forked process, has its own thread.

    Args:
        leave: called when that ends.
    """
    if not _watches or not _watches[-1].add(look, seconds, leave):
        _watches[:] = [each for each in _watches if each.thread.is_alive()]
        _watches.append(StoreWatch())
        _watches[-1].add(look, seconds, leave)


@atexit.register
def end_watches() -> None:
    """End what looks into the store."""
    for each in _watches:
        each.end()
