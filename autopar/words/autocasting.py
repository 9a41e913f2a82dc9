"""The state of ``torch.autocast`` as a value: a capture is for one, and a program runs under none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

AutocastState = Mapping[str, torch.dtype]
"""The precision of autocast by the kind of device that it is on for; empty if it is off."""
KINDS = ("cpu", "cuda")
OFF: AutocastState = {}


def autocast_now() -> dict[str, torch.dtype]:
    """Return the autocast state of this thread."""
    return {kind: torch.get_autocast_dtype(kind) for kind in KINDS if torch.is_autocast_enabled(kind)}


@contextlib.contextmanager
def autocast_as(state: AutocastState) -> Iterator[None]:
    """Set autocast to ``state`` for all kinds of devices; no casts are cached.

    ``torch.autocast`` itself stays off for a kind of device that this machine does not have.
    """
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS]
    cache = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        for kind in KINDS:
            torch.set_autocast_enabled(kind, kind in state)
            if kind in state:
                torch.set_autocast_dtype(kind, state[kind])
        yield
    finally:
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Disable autocast for code whose casts are explicit, or that needs none, such as the backward of a step."""
    return autocast_as(OFF) if any(map(torch.is_autocast_enabled, KINDS)) else contextlib.nullcontext()


def shown(state: AutocastState) -> str:
    """Return the state in words, for messages."""
    each = [f"torch.autocast('{kind}', {dtype})" for kind, dtype in sorted(state.items())]
    return f"under {' and '.join(each)}" if each else "without autocast"
