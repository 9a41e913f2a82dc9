"""Ranks that have ended: each says so in the process group's store when its process exits.

A rank that is through with its script comes to no meeting any more. Without its word, one that goes on alone (it
evaluates, generates or saves after the loop, ``if rank == 0:``) would wait for it until a time-out of half an hour.

The process group may have been ended before, and the store, where it is another rank's, may be gone. So it is one
request, which does not wait for an answer, and the store is kept for it; not on the rank that may hold the store
itself, whose port would stay in use, and whose end all others see as a lost connection.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from autopar.torch_private import default_store

SHOWN = 2000
"""Characters of the error that ended a rank that are shown."""
_ANY = "any"
_PREFIX = "autopar/ended"
_kept: dict[str, Any] = {}


def say_at_exit() -> None:
    """Have this rank say that it has ended, when it does. Called by whoever may meet others in the store."""
    if _kept.get("pid") != os.getpid():  # a forked process is no rank: what was registered before is not its own
        Finalize(None, say, exitpriority=0)
    holds_store = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    _kept.update(pid=os.getpid(), rank=dist.get_rank(), store=None if holds_store else default_store())


def say() -> None:
    """This rank ends, with the error that ended the script if there was one."""
    store = _kept.get("store")
    if store is None and dist.is_initialized():
        store = default_store()
    if store is None or _kept.get("pid") != os.getpid():
        return
    error = getattr(sys, "last_value", None)
    how = f" by {type(error).__name__}: {str(error)[:SHOWN]}" if error is not None else ""
    with contextlib.suppress(dist.DistError, RuntimeError):
        ends: Any = dist.PrefixStore(_PREFIX, store)
        ends.multi_set([str(_kept["rank"]), _ANY], [f"has ended{how}", "so"])


def ended(ranks: Sequence[int]) -> dict[int, str]:
    """Those of ``ranks`` that have ended, and how in words; one request to the store while none has."""
    store = dist.PrefixStore(_PREFIX, default_store())
    if not store.check([_ANY]):
        return {}
    return {rank: store.get(str(rank)).decode() for rank in ranks if store.check([str(rank)])}


__all__ = ["SHOWN", "ended", "say", "say_at_exit"]
