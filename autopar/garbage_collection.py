"""Control of Python's cyclic garbage collector.

Imports, traces and plans make millions of objects that stay, or that are in no cycle. The collector would walk through
them, and through all of torch, again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector in this scope; also a decorator. The outermost scope decides."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.collect(0)  # else the next allocation may trigger a full collection
            gc.enable()
