"""What ranks do together, one thing after another, as each of them writes it down for the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.ranks.ended import ended, say_at_exit
from autopar.runtime.ranks.pulse import wait_elsewhere
from autopar.runtime.ranks.store_names import next_name
from autopar.torch_private import default_store, default_timeout_seconds

POLL_SECONDS = 0.002
ENDED_SECONDS = 0.5
"""How often a rank that waits looks whether the one that it waits for has ended."""


AT_EXCHANGE = "its next call, number "
"""Where a rank is that waits for others before a call."""


class CollectiveLog:
    """The collective actions of the ranks, in order, so that a reader knows whether all read."""

    def __init__(self, ranks: Sequence[int], timeout_seconds: float | None = None) -> None:
        self.store = dist.PrefixStore(next_name("log", ranks), default_store())
        self.rank, self.others = dist.get_rank(), [r for r in ranks if r != dist.get_rank()]
        self.timeout = timeout_seconds or default_timeout_seconds()
        say_at_exit()
        self.count = 0
        self.exchanges = 0
        """The exchanges of rows (:mod:`~autopar.runtime.batches.uneven_rows`) to which this rank has come."""
        self.broken_off: Callable[[], str] = str
        """What is known of a rank that has broken off a step of the module, and so comes to no meeting; or empty."""
        self.read: deque[str] = deque(maxlen=4)  # an accelerator's collectives let a rank run ahead of one reading

    def note(self, what: str) -> None:
        """Note that this rank begins something in which ranks wait for each other."""
        self.count += 1
        self.store.set(str(self.rank), f"{self.count}|{what}|{';'.join(self.read)}")

    def note_waiting(self) -> None:
        """Note that this rank waits for the others at an exchange, before what follows."""
        self.store.set(str(self.rank), f"{self.count + 1}|{AT_EXCHANGE}{self.exchanges}|{';'.join(self.read)}")

    def meet(self, verb: str, what: str, why: str) -> None:
        """Wait until every rank comes to ``what``, such as ``output 1 of call 3`` (without ``|`` and ``;``).

        Args:
            verb: what this rank does there, for messages: it ``reads`` that.
            why: what to say to a rank that is alone with it.

        Raises:
            RunError: another rank comes to something else, has ended, or comes to nothing before the time is out.
            RuntimeError: it has broken off a step; whoever runs steps says which and where.
        """
        mine = f"{self.count + 1} {what}"
        self.read.append(mine)
        self.note(what)
        began = looked = time.monotonic()
        for other_rank in self.others:
            while True:
                how_ended = elsewhere = ""
                if time.monotonic() - looked > ENDED_SECONDS:  # before its last word is read, which it may come after
                    looked, how_ended = time.monotonic(), ended([other_rank]).get(other_rank, "")
                    elsewhere = wait_elsewhere([other_rank])
                has_come = self.store.check([str(other_rank)])
                count, at, read = self.store.get(str(other_rank)).decode().split("|") if has_come else ("0", "", "")
                if mine in read.split(";"):
                    break
                if at.startswith(AT_EXCHANGE) and int(at.removeprefix(AT_EXCHANGE)) <= self.exchanges:
                    count = "0"  # this rank was there, too, so the other one goes on from it
                if broken_off := self.broken_off():
                    self.count -= 1
                    self.read.pop()
                    raise RuntimeError(broken_off)
                late = time.monotonic() - began > self.timeout
                if int(count) >= self.count or late or how_ended or elsewhere:
                    self.count -= 1
                    self.read.pop()
                    done = f"has not come in {self.timeout:g} s" if late else f"is at {at}"
                    if elsewhere:
                        done = elsewhere.removeprefix(f"rank {other_rank} ")
                    if how_ended:
                        done, why = how_ended, f"do this on every rank, before one leaves; {why}"
                    raise RunError(f"rank {self.rank} {verb} {what}, rank {other_rank} {done}: {why}")
                time.sleep(POLL_SECONDS)
