"""When Python does not look for garbage in cycles.

Imports, traces and plans make millions of objects that stay, or that nothing in a cycle holds. The collector walks
through them again and again, and through all of torch with them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage inside; also a decorator. Those around it decide when one stands in another."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.collect(0)  # what was made here; else the next allocation may set off a walk through the whole heap
            gc.enable()


__all__ = ["uncollected"]
