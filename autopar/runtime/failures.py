"""What a step that breaks on one rank says on the others, which wait for it in a collective.

A rank on which a forward, a backward or a pipeline's step raises writes that to the process group's store. When a
collective then fails on another rank, because its peer is gone or the time is out, the error there names the rank that
failed first, where, and how. Nothing is written in a step that ends well.

A rank that goes on after an error of its own (a batch is skipped) must not start its next step while others are still
in the broken one: its collectives would pair with theirs, and give wrong numbers. So it first waits, in the store,
until every rank has broken off the same step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from autopar.errors import AutoparError, RunError
from autopar.torch_private import default_store, default_timeout_seconds

_MADE: dict[tuple[int, ...], Any] = {}
POLL_SECONDS = 0.01
NEWS_SECONDS = 1.0
"""How long a rank whose collective failed waits to hear which rank failed first."""
SHOWN = 2000
"""Characters of another rank's error that are shown."""


class Failures:
    """Those of one module's steps, on the ranks that run it together."""

    def __init__(self, ranks: Sequence[int]) -> None:
        key = tuple(ranks)
        number = next(_MADE.setdefault(key, itertools.count()))
        name = f"autopar/failures/{'-'.join(map(str, key)) if len(key) < 9 else hash(key)}/{number}"
        self.store = dist.PrefixStore(name, default_store())
        self.rank, self.others = dist.get_rank(), [r for r in key if r != dist.get_rank()]
        self.timeout = default_timeout_seconds()
        self.count = 0
        self.where = ""

    @contextlib.contextmanager
    def during(self, where: str) -> Iterator[None]:
        """Around a part of a step, such as ``the backward of call 3``.

        Raises:
            RunError: a collective failed here, because another rank did before.
        """
        try:
            yield
        except BaseException as error:
            if _is_of_a_collective(error) and (first := self._first()):
                news = f"{first}\n  rank {self.rank} waited for it in {where}: {str(error)[:SHOWN]}"
                self._write(where, news)
                raise RunError(news) from error
            self._write(where, f"{type(error).__name__}: {str(error)[:SHOWN]}")
            raise

    def _write(self, where: str, text: str) -> None:
        self.where = self.where or where
        self.count += 1
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone with the rank that has it
            self.store.set(str(self.rank), f"{self.count}|{where}|{text}")

    def _read(self, rank: int) -> tuple[int, str, str]:
        """How many steps another rank has broken off, and the last of them: where, and why."""
        if not self.store.check([str(rank)]):
            return 0, "", ""
        count, where, text = self.store.get(str(rank)).decode().split("|", 2)
        return int(count), where, text

    def _first(self) -> str:
        """What another rank says that has broken off more steps than this one; empty if none says so in time."""
        end = time.monotonic() + NEWS_SECONDS
        with contextlib.suppress(dist.DistError, RuntimeError):
            while time.monotonic() < end:
                for rank in self.others:
                    count, where, text = self._read(rank)
                    if count > self.count:
                        return f"rank {rank} failed in {where}: {text}"
                time.sleep(POLL_SECONDS)
        return ""

    def settle(self) -> None:
        """Before a step: if an earlier one broke off here, wait until it has on all ranks.

        Raises:
            RunError: another rank goes on with that step, or waits in it for this one.
        """
        if not self.where:
            return
        end = time.monotonic() + self.timeout
        for rank in self.others:
            while self._read(rank)[0] < self.count:
                if time.monotonic() > end:
                    raise RunError(
                        f"rank {self.rank} broke off {self.where} and goes on, rank {rank} did not in {self.timeout:g} "
                        "s: it waits for this one in a collective. A step can be skipped only on all ranks alike: "
                        "decide it together, or let the job end"
                    )
                time.sleep(POLL_SECONDS)
        self.where = ""


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether it is what a process group says of a peer that is gone or late."""
    if isinstance(error, AutoparError):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


__all__ = ["Failures"]
