"""The pulse of a rank: as long as its process runs, it counts up in the store, and looks whether its neighbour does.

A rank that is stopped (SIGSTOP, a debugger), whose machine or network hangs, or that was killed on another machine says
nothing, and nobody who waits for it in a collective hears of that before a time-out of half an hour. So a thread of
every rank that may meet others counts up in the store, and looks at the count of the next rank alone, so that the store
serves thousands. Where that stands still for :func:`silence_seconds`, it writes down that this rank is silent
(:mod:`autopar.runtime.ranks.ended`), where all who wait look: within ``parallelize``, in a step, or before a call of
all ranks. Every rank prints it, too: it may wait in a collective of the script's own.

With its count a rank writes in which collective of the script's own it waits (``dist.barrier()``), and since when. So a
rank that waits for all others in a call of autopar's, which only it has come to (``if rank == 0:``), hears that they
never come (:func:`wait_elsewhere`).

Python's threads stand still while a library keeps the interpreter's lock, and so does this one; the limit is for that.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from autopar.errors import RunError, first_few
from autopar.runtime.ranks.ended import ended, killed, say_silent
from autopar.runtime.ranks.watch import watch
from autopar.torch_private import default_store

BEAT_SECONDS = 1.0
RANKS_OF_A_SECOND = 1000
"""How many ranks may count up in the store in one second; where there are more, each does so less often."""
SILENCE_SECONDS = 60.0
"""How long a count may stand still, unless the environment variable says otherwise."""
VARIABLE = "AUTOPAR_SILENCE_SECONDS"
BEATS_AFTER_LOSS = 4
"""How many beats a count may stand still where some rank has lost a connection, so that one is known to be gone."""
HURRY_BEATS = 12
"""For how many beats after that."""
ELSEWHERE_SECONDS = 4.0
"""After how long a rank that waits in a collective of the script's own does not come elsewhere."""
OF_ALL = frozenset({
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter",
    "reduce_scatter_tensor",
})  # fmt: skip
"""Collectives of torch's in which every rank waits for every other one."""
_COLLECTIVES = dist.distributed_c10d.__file__
_kept: dict[str, Any] = {}


def silence_seconds() -> float:
    """Return the seconds of silence after which a rank counts as dead.

    :data:`SILENCE_SECONDS`, or ``AUTOPAR_SILENCE_SECONDS`` from the environment.

    Raises:
        RunError: that is no number above 0.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return SILENCE_SECONDS
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0 and not math.isnan(seconds):
            return seconds
    raise RunError(f"{VARIABLE} is {text!r}; give seconds above 0, such as 20, or inf to wait for ever")


class Pulse:
    """The pulse of this rank in one world.

    Attributes:
        beat: seconds between two counts.
        limit: seconds after which another rank is silent.
    """

    def __init__(self) -> None:
        self.world, self.rank, self.ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        self.limit = silence_seconds()
        self.beat = max(min(BEAT_SECONDS, self.limit / 4), self.ranks / RANKS_OF_A_SECOND)
        self.store = dist.PrefixStore("pulse", default_store())
        self.place: tuple[Any, float] = (None, 0.0)
        self.losses, self.hurries_until = "0", -math.inf
        self.count, self.told = 0, set[int]()
        self.watched, self.at, self.since = self.rank, "", time.monotonic()
        self.looked = time.monotonic()
        watch(self._look, 0.0, lambda: self.store.set(str(self.rank), "done"))

    def _look(self) -> float:
        now, beat = time.monotonic(), self.beat
        if now - self.looked > 4 * beat:  # this process itself was stopped: what it saw is old
            self.since = now
        self.looked = now
        self.store.set(str(self.rank), f"{self.count}|{self._waits_in()}")
        self.count += 1
        gone = killed(range(self.ranks))
        for rank in sorted(gone.keys() - self.told):
            self.told.add(rank)
            print(f"autopar: rank {self.rank} hears that rank {rank} {gone[rank]}", file=sys.stderr, flush=True)
        after = [(self.rank + k) % self.ranks for k in range(1, self.ranks)]
        neighbour = next((rank for rank in after if rank not in gone), self.rank)
        at = self._count_of(neighbour)
        if neighbour != self.watched or at != self.at or at in ("", "done"):
            self.watched, self.at, self.since = neighbour, at, time.monotonic()
        silent = time.monotonic() - self.since
        if silent > self._allowed() and not ended([neighbour]):
            say_silent(neighbour, silent)
        return beat

    def _allowed(self) -> float:
        losses = self.store.get("lost").decode() if self.store.check(["lost"]) else "0"
        if losses != self.losses:
            self.losses, self.hurries_until = losses, time.monotonic() + HURRY_BEATS * self.beat
        return min(self.limit, BEATS_AFTER_LOSS * self.beat) if time.monotonic() < self.hurries_until else self.limit

    def _count_of(self, rank: int) -> str:
        """Return a rank's count as a text; empty if it has none yet, and ``done`` where it has left this world."""
        if rank == self.rank:
            return ""
        return self.store.get(str(rank)).decode().partition("|")[0] if self.store.check([str(rank)]) else ""

    def _waits_in(self) -> str:
        """Return the collective of the script's own in which the main thread waits, as ``seconds|ranks|name``.

        Empty if it is in none.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = None
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("autopar."):
                found = None  # a collective of autopar's: what it waits for, it knows itself
                break
            if frame.f_code.co_filename == _COLLECTIVES and frame.f_code.co_name in OF_ALL:
                found = frame
            frame = frame.f_back
        if found is None:
            self.place = None, 0.0
            return ""
        if self.place[0] != (id(found), found.f_code):
            self.place = (id(found), found.f_code), time.monotonic()
        with contextlib.suppress(RuntimeError, ValueError):  # a group that is being ended
            ranks = dist.get_process_group_ranks(found.f_locals.get("group") or dist.group.WORLD)
            above = found.f_back
            while above is not None and above.f_globals.get("__name__", "").startswith("torch."):
                above = above.f_back
            where = f" ({os.path.basename(above.f_code.co_filename)}:{above.f_lineno})" if above is not None else ""
            since = time.monotonic() - self.place[1]
            return f"{since:.1f}|{','.join(map(str, ranks))}|torch.distributed.{found.f_code.co_name}{where}"
        return ""


def wait_elsewhere(ranks: Sequence[int]) -> str:
    """Name the script's own collective in which all of `ranks` wait for this one, which is in none; else empty."""
    pulse, shown = _kept.get("pulse"), []
    if pulse is None or pulse.world is not dist.group.WORLD:
        return ""
    for rank in ranks:
        text = pulse.store.get(str(rank)).decode() if pulse.store.check([str(rank)]) else ""
        _, _, at = text.partition("|")
        if not at:
            return ""
        seconds, among, name = at.split("|", 2)
        if float(seconds) < ELSEWHERE_SECONDS or str(pulse.rank) not in among.split(","):
            return ""
        shown.append(f"rank {rank} waits in {name}")
    return first_few(shown)


def begin() -> None:
    """Start this rank's pulse in the present world."""
    pulse = _kept.get("pulse")
    if dist.get_world_size() > 1 and (
        pulse is None or pulse.world is not dist.group.WORLD or _kept["pid"] != os.getpid()
    ):
        _kept.update(pulse=Pulse(), pid=os.getpid())


def connection_lost() -> None:
    """Make all ranks look more closely: a lost connection shows that some rank has ended."""
    if pulse := _kept.get("pulse"):
        pulse.store.add("lost", 1)
