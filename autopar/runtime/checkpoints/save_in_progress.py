"""A save that is being written, by each rank its own part: while the run waits, or while it goes on.

Ranks have planned together who writes what. From then on none waits for another one but the first, which hears through
the process group's store what all have written, and gives the save its name. So a save that is written by a thread
needs no process group, and ends well where the script ends meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.checkpoints.durable_files import Sum
from autopar.runtime.checkpoints.stored_shards import ShardsToWrite, results_as_rows, results_of_rows
from autopar.runtime.ranks.ended import before_end, ended, say
from autopar.runtime.ranks.store_meeting import looks, received, sent
from autopar.torch_private import default_store, default_timeout_seconds
from hardware_profiles.strict import parse_json

LOST_STATUS = 1
"""Exit status of a script that ended without :meth:`Saving.join`, and whose save could not be written."""

_unjoined: set[Saving] = set()
_at_exit: set[int] = set()


class Saving:
    """One save, on one rank.

    Attributes:
        plan: what this rank writes.
    """

    def __init__(
        self, folder: Path, step: int, ranks: Sequence[int], rank: int, shards: ShardsToWrite,
        ends: Callable[[Mapping[str, Sum]], None], fails: Callable[[Path], None], cause: Callable[[BaseException], str],
    ) -> None:  # fmt: skip
        """Initialize the object.

        Args:
            rank: this one's place among ``ranks``.
            ends: gives the save its name, when all is written; called on the first rank with the sums of all files.
            fails: removes what there is of it.
            cause: says what went wrong, for the other ranks.
        """
        self.folder, self.step, self.ranks, self.rank, self.shards = folder, step, ranks, rank, shards
        self.ends, self.fails, self.cause = ends, fails, cause
        self.plan: SavePlan | None = None
        self.timeout = default_timeout_seconds() if len(ranks) > 1 else 0.0
        self.store = dist.PrefixStore(f"autopar/save/{folder.name}", default_store()) if len(ranks) > 1 else None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Write this rank's part; on the first rank, wait for the others and give the save its name.

        Raises:
            OSError: this rank's part could not be written.
            RunError: that of another one could not.
        """
        assert self.plan is not None
        try:
            results = [self.shards.write(self.plan)]
            if self.store is not None and self.rank != 0:
                told = {"results": results_as_rows(results[0]), "sums": self.shards.sums}
                sent(self.store, str(self.rank), json.dumps(told))
        except Exception as error:
            if self.store is not None:
                with contextlib.suppress(dist.DistError, RuntimeError):
                    self.store.set("failed", f"on rank {self.rank}: {self.cause(error)}")
            raise
        if self.rank == 0:
            sums = self.shards.sums
            for rank in range(1, len(self.ranks)):
                more, their_sums = self._part_of(rank)
                results.append(more)
                sums.update(their_sums)
            self.shards.finish(results)
            self.ends(sums)

    def _part_of(self, rank: int) -> tuple[list[WriteResult], dict[str, Sum]]:
        """Return what another rank has written, once it has."""
        assert self.store is not None
        end, looked = time.monotonic() + self.timeout, time.monotonic()
        for _ in looks():
            how_ended = ""
            if time.monotonic() > looked + 1.0:  # before the look whether it is there, which it may write and then end
                looked = time.monotonic()
                with contextlib.suppress(dist.DistError, RuntimeError):  # the process group may have been ended
                    how_ended = ended([self.ranks[rank]]).get(self.ranks[rank], "")
            if (text := received(self.store, str(rank))) is not None:
                told = parse_json(text)
                return results_of_rows(told["results"]), {name: Sum(*sum_) for name, sum_ in told["sums"].items()}
            if self.store.check(["failed"]):
                raise RunError(self.store.get("failed").decode())
            if how_ended:
                raise RunError(f"rank {self.ranks[rank]} {how_ended}, and has not written its part")
            if time.monotonic() > end:
                raise RunError(f"rank {self.ranks[rank]} has not written its part in {self.timeout:g} s")
        raise AssertionError("looks have no end")

    def start(self) -> None:
        """Write the save in a thread, for which the interpreter waits before it ends."""
        if os.getpid() not in _at_exit:
            _at_exit.add(os.getpid())
            Finalize(None, _tell_lost, exitpriority=100)
            before_end(_end_all)
        _unjoined.add(self)
        self.thread = threading.Thread(target=self._in_thread, name="autopar save")
        self.thread.start()

    def _in_thread(self) -> None:
        try:
            self.run()
            _unjoined.discard(self)
        except Exception as error:
            self.error = error

    def join(self) -> None:
        """Wait until this rank has done its part; on the first rank the save has its name then.

        Raises:
            Exception: what went wrong here.
        """
        assert self.thread is not None
        self.thread.join()
        _unjoined.discard(self)
        if self.error is not None:
            raise self.error


def _lost() -> list[str]:
    """List the messages about saves that could not be written, and whose result nobody asked for."""
    lost = [(saving, saving.error) for saving in _unjoined if saving.error is not None]
    for saving, _ in lost:
        saving.fails(saving.folder)
    return [
        f"the checkpoint of step {saving.step} could not be saved to {saving.folder.parent}, and the script has ended "
        f"without wait(): {saving.cause(error)}" for saving, error in lost
    ]  # fmt: skip


def _end_all() -> None:
    """Wait for saves that nobody waits for.

    Raises:
        RunError: one could not be written.
    """
    for saving in list(_unjoined):
        assert saving.thread is not None
        saving.thread.join()
    if lost := _lost():
        raise RunError("; ".join(lost))


def _tell_lost() -> None:
    """Warn at the end of the script about a last save that failed and whose result nobody asked for."""
    lost = _lost()
    for text in lost:
        print(f"autopar: {text}", file=sys.stderr)
    if lost:  # atexit has no other way to say by the status that something went wrong
        with contextlib.suppress(Exception):
            say()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST_STATUS)


def size_of(state: Any) -> int:
    """Return the bytes of this rank's tensors in a state."""
    if isinstance(state, Mapping):
        return sum(size_of(value) for value in state.values())
    return state.to_local().nbytes if isinstance(state, DTensor) else getattr(state, "nbytes", 0)
