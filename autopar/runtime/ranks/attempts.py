"""Attempts of a job, kept apart in the store that outlives them.

torchrun starts the ranks again after a failure (``--max-restarts``), or when the number of machines has changed, and
keeps the store through which they find each other. What an attempt has written there, such as addresses and process
numbers, would be read by the next one: ranks connect to processes that are gone, in ``init_process_group`` already.
Nothing that torchrun tells a rank says which attempt it is in (``TORCHELASTIC_RESTART_COUNT`` is counted by each
machine for itself). So the ranks agree on a name of their attempt when they open the store, and see only what was
written under that name.

Rank 0 makes up the name. Every other rank writes down a number of its own, waits for the answer to that number, and
confirms it; rank 0 answers until all have confirmed. What is left of ranks that are gone gets answers, too, and
confirms nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import uuid
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

from autopar.torch_private import OPEN_STORE, name_attempt, uses_store_of_agent
from autopar.words.trees import PyTree

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.002, 0.1
TOLD_AFTER_SECONDS = 60.0
"""After how long rank 0 says for whom it waits."""


def separate_attempts() -> None:
    """Make the ranks of each attempt agree on its name when they open the store of torchrun's agent.

    Where autopar is imported after ``init_process_group``, torch's own keys are those of all attempts. Then autopar's
    are kept apart at least where one machine has all ranks, by its count of restarts.
    """
    open_store = OPEN_STORE.get()
    if hasattr(open_store, "_autopar_separates"):
        return
    if dist.is_initialized() and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        name_attempt(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")

    @wraps(open_store)
    def opened(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: PyTree, **kw: Any
    ) -> PyTree:
        store = open_store(hostname, port, rank, world_size, timeout, *args, **kw)
        return of_attempt(store, rank, world_size, timeout) if uses_store_of_agent() else store

    opened._autopar_separates = True  # type: ignore[attr-defined]
    OPEN_STORE.set(opened)


def of_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the part of a store that only the ranks of this attempt use; all of them call it.

    Args:
        timeout: how long ranks wait for each other.

    Raises:
        DistStoreError: some did not come in time.
    """
    place = dist.PrefixStore("autopar/attempts", store)
    mine = uuid.uuid4().hex
    if rank == 0:
        _answer(place, mine, world_size, timeout)
        name = mine
    else:
        place.set(f"asks {rank}", mine)
        place.wait([f"answer to {mine}"], timeout)
        name = place.get(f"answer to {mine}").decode()
        place.set(f"{name} {rank}", "")
    name_attempt(name)
    return dist.PrefixStore(f"attempt {name}", store)


def _answer(place: dist.Store, name: str, world_size: int, timeout: timedelta) -> None:
    """Tell the name to all ranks that ask for it, until every one has confirmed it."""
    missing, answered = set(range(1, world_size)), set()
    began, told = time.monotonic(), False
    seconds = FIRST_LOOK_SECONDS
    for _ in itertools.count():
        for rank in sorted(missing):
            if place.check([f"{name} {rank}"]):
                missing.discard(rank)
            elif place.check([f"asks {rank}"]) and (asks := place.get(f"asks {rank}").decode()) not in answered:
                answered.add(asks)
                place.set(f"answer to {asks}", name)
        if not missing:
            return
        waited = time.monotonic() - began
        shown = ", ".join(map(str, sorted(missing)[:8])) + (", .." if len(missing) > 8 else "")
        if waited > timeout.total_seconds():
            raise dist.DistStoreError(
                f"rank 0 waited {waited:.0f} s for rank {shown} at init_process_group: import autopar before it on all "
                "ranks, or on none"
            )
        if waited > TOLD_AFTER_SECONDS and not told:
            told = True
            print(f"autopar: rank 0 has waited {waited:.0f} s for rank {shown} at init_process_group; import autopar "
                  "before it on all ranks", file=sys.stderr, flush=True)  # fmt: skip
        time.sleep(seconds)
        seconds = min(1.3 * seconds, LONGEST_LOOK_SECONDS)
