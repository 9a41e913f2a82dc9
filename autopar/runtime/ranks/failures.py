"""Failures of a step on one rank, as errors on the others, which wait for it in a collective."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from autopar.errors import AutoparError, RunError
from autopar.runtime.ranks.ended import ended, killed, say_at_exit
from autopar.runtime.ranks.store_names import next_name
from autopar.runtime.ranks.watch import watch
from autopar.torch_private import default_store, default_timeout_seconds

_of_all_modules: weakref.WeakSet[Failures] = weakref.WeakSet()
POLL_SECONDS = 0.01
NEWS_SECONDS = 1.0
"""How long a rank whose collective failed waits to hear which rank failed first."""
QUIET_SECONDS = 1.0
"""How often a rank looks for news while a step goes on."""
GRACE_SECONDS = 4.0
"""How long a rank has after the news to break off the step by itself: all may fail alike, one after the other."""
SHOWN = 2000
"""Characters of another rank's error that are shown."""
LOST_SECONDS = 2.0
"""How long a rank that a lost connection ends looks who was lost."""
MOST_NAMED = 8
"""Ranks that are named of those of which nothing is heard."""
_SOMEONE = "a rank"
_ENDED = "ended"
"""Under which the first rank that ends between steps says so."""


class Failures:
    """The failures of one module's steps, on the ranks that run it together."""

    def __init__(
        self, ranks: Sequence[int], abort: Callable[[], None] | None = None, stays_armed: bool = False
    ) -> None:
        """Initialize the object.

        Args:
            abort: has what waits in a collective of this module end with an error; called from another thread.
            stays_armed: news count between the parts of a step, too: the caller may wait there for others in torch's
                own functions, and on a GPU a part may go on after it has returned.
        """
        self.store = dist.PrefixStore(next_name("failures", ranks), default_store())
        self.rank, self.others = dist.get_rank(), [r for r in ranks if r != dist.get_rank()]
        self.timeout = default_timeout_seconds()
        self.count = 0
        self.where = ""
        self.aborted = ""
        self.watch = _Step(self, abort, stays_armed) if abort is not None else None
        _of_all_modules.add(self)
        say_at_exit()

    @contextlib.contextmanager
    def during(self, where: str) -> Iterator[None]:
        """Enclose a part of a step, such as ``the backward of call 3``.

        Raises:
            RunError: a collective failed here, because another rank did before.
        """
        if self.watch is not None:
            self.watch.begin()
        try:
            yield
            if self.aborted:  # a GPU goes on with what there is when a collective is aborted
                raise RunError(self.aborted)
        except BaseException as error:
            waited = _is_of_a_collective(error) or (self.aborted and isinstance(error, RuntimeError))
            if waited and (first := self.aborted or self._first_after(error)):
                self._write(where, "" if first.startswith(_SOMEONE) else first, of_another=True)
                raise RunError(f"{first}\n  rank {self.rank} waited for it in {where}: {str(error)[:SHOWN]}") from error
            self._write(where, f"{type(error).__name__}: {str(error)[:SHOWN]}")
            raise
        finally:
            if self.watch is not None:
                self.watch.end()

    def _write(self, where: str, text: str, of_another: bool = False) -> None:
        """Say that this rank has broken off a step; ``of_another``: for what the text says of another rank."""
        self.where = self.where or where
        self.count += 1
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be gone with the rank that has it
            self.store.set(str(self.rank), f"{self.count}|{int(bool(self.aborted))}|{int(of_another)}|{where}|{text}")
            self.store.set(f"broken {self.count}", str(self.rank))

    def news(self) -> str:
        """Say which rank has broken off a step that this one has not, or was killed; empty if none has."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.store.check([f"broken {self.count + 1}"]):
                return self._first() or self._someone(late=False)
            return self._killed()
        return ""

    def heard(self) -> str:
        """Return what the watch knows of another rank's failure in a step that this rank is in; empty if nothing."""
        return self.aborted

    def _killed(self) -> str:
        """Say which other rank was killed; empty if none was, as far as is known."""
        return next((f"rank {rank} {how}" for rank, how in killed(self.others).items()), "")

    def _read(self, rank: int) -> tuple[int, bool, str]:
        """Read how many steps another rank has broken off, whether it aborted its groups, and its last message."""
        if not self.store.check([str(rank)]):
            return 0, False, ""
        count, aborted, of_another, where, text = self.store.get(str(rank)).decode().split("|", 4)
        return int(count), aborted == "1", text if of_another == "1" else f"rank {rank} failed in {where}: {text}"

    def _first(self) -> str:
        """Return the message of a rank that has broken off more steps than this one; empty if none comes in time."""
        end, looked = time.monotonic() + NEWS_SECONDS, 0.0
        with contextlib.suppress(dist.DistError, RuntimeError):
            while time.monotonic() < end:
                for rank in self.others:
                    count, _, text = self._read(rank)
                    if count > self.count and text:
                        return text
                if time.monotonic() > looked + NEWS_SECONDS / 4:
                    looked = time.monotonic()
                    if text := self._killed():
                        return text
                if self.store.check([_ENDED]):
                    return self.store.get(_ENDED).decode()
                time.sleep(POLL_SECONDS)
        return ""

    def _first_after(self, error: BaseException) -> str:
        """Say what became of the rank that a failed collective waited for, as far as ranks report it.

        Empty if the error is not of another rank, but of this one's own call.
        """
        if not is_of_another_rank(error):
            return self._first()
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.store.set(f"lost {self.count + 1} {self.rank}", "")
        return self._first() or self._someone(any(word in str(error) for word in _LATE))

    def _someone(self, late: bool) -> str:
        """Say that the failed rank is not known, with the ranks that it may be: also those that do not wait."""
        lost, silent = f"lost {self.count + 1} ", []
        with contextlib.suppress(dist.DistError, RuntimeError):
            silent = [rank for rank in self.others if not self.store.check([f"{lost}{rank}"])]
        named = f"; nothing is heard of rank {', '.join(map(str, silent[:MOST_NAMED]))}" if silent else ""
        named += ", .." if len(silent) > MOST_NAMED else ""
        if late:
            return f"{_SOMEONE} did not come to this step within the time-out of the process group{named}"
        return f"{_SOMEONE} has ended outside of this module's steps{named}; its own output says why"

    def note_end(self) -> None:
        """Note that this rank ends between steps, with the error that ended the script if there was one."""
        error = getattr(sys, "last_value", None)
        if self.where or (error is not None and is_of_another_rank(error)):
            return  # it only waited for another one
        how = f": {type(error).__name__}: {str(error)[:SHOWN]}" if error is not None else "; its own output says why"
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.store.compare_set(_ENDED, "", f"rank {self.rank} has ended outside of this module's steps{how}")

    def settle(self) -> None:
        """Wait before a step, if an earlier one broke off here, until it has on all ranks.

        Raises:
            RunError: another rank goes on with that step, or waits in it for this one; or a rank that waited in it had
                to abort its groups, so that no rank can go on.
        """
        if self.aborted and not self.where:
            self._write("a step that had returned", self.aborted)
        if not self.where:
            return
        end, looked = time.monotonic() + self.timeout, time.monotonic()
        aborted = self.rank if self.aborted else None
        for rank in self.others:
            while self._read(rank)[0] < self.count:
                if time.monotonic() > looked + NEWS_SECONDS / 4:
                    looked = time.monotonic()
                    if gone := ended(self.others):
                        told = "; ".join(f"rank {other} {how}" for other, how in gone.items())
                        raise RunError(f"{told}; rank {self.rank} waited for it after {self.where} broke off")
                if time.monotonic() > end:
                    raise RunError(
                        f"rank {self.rank} broke off {self.where} and goes on, rank {rank} did not in {self.timeout:g} "
                        "s: it waits for this one in a collective. A step can be skipped only on all ranks alike: "
                        "decide it together, or let the job end"
                    )
                time.sleep(POLL_SECONDS)
            aborted = rank if aborted is None and self._read(rank)[1] else aborted
        if aborted is not None:
            raise RunError(
                f"{self.where} broke off, and rank {aborted} waited in it for a rank that had failed, until its "
                "process groups were aborted: this module cannot go on. A step can be skipped only on all ranks alike; "
                "call parallelize again on all ranks, or let the job end and begin at the last checkpoint"
            )
        self.where = ""


class _Step:
    """The part of a step that runs, of which the watch of this rank sees whether another rank has broken it off."""

    def __init__(self, failures: Failures, abort: Callable[[], None], stays_armed: bool) -> None:
        self.failures, self.abort, self.stays_armed = weakref.ref(failures), abort, stays_armed
        self.changed = threading.Lock()
        self.step, self.running, self.within, self.is_watched = 0, False, False, False
        self.news, self.of_step, self.until = "", 0, 0.0

    def begin(self) -> None:
        """Begin a part of a step."""
        with self.changed:
            self.step, self.running, self.within = self.step + 1, True, True
        if not self.is_watched:
            self.is_watched = True
            ref = weakref.ref(self)  # a module that is freed is watched no more
            watch(lambda: None if (step := ref()) is None else step.look(), QUIET_SECONDS)

    def end(self) -> None:
        """End a part of a step."""
        with self.changed:
            self.running, self.within = self.stays_armed, False

    def look(self) -> float | None:
        """Abort the running step if another rank has failed in it and it still runs a while after that was heard."""
        step, failures = self.step, self.failures()
        if failures is None or failures.aborted:
            return None
        if not self.running or (self.news and self.of_step != step):
            self.news = ""
            return QUIET_SECONDS
        if not self.news:
            self.news, self.of_step, self.until = failures.news(), step, time.monotonic() + GRACE_SECONDS
            return min(QUIET_SECONDS, GRACE_SECONDS) if self.news else QUIET_SECONDS
        if time.monotonic() < self.until:
            return max(POLL_SECONDS, min(QUIET_SECONDS, self.until - time.monotonic()))
        with self.changed:
            if self.running and self.step == step:
                failures.aborted = self.news
                self.abort()
                if not self.within:  # in code of the caller's, such as clip_grad_norm_, what ends says nothing of it
                    news = f"autopar: rank {failures.rank} ends what it waits for: {failures.aborted}"
                    print(news, file=sys.stderr, flush=True)
        return QUIET_SECONDS


def _is_of_a_collective(error: BaseException) -> bool:
    """Check whether an error is what a process group raises about a peer that is gone or late."""
    if isinstance(error, AutoparError):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


_LATE = ("imed out", "imeout")
_GONE = (
    "onnection closed", "onnection reset", "onnection refused", "roken pipe", "Read error", "Write error",
    "remote process exited", "was aborted",
)  # fmt: skip
"""What gloo, NCCL and stores say of a peer that is late, or gone."""


def is_of_another_rank(error: BaseException) -> bool:
    """Check whether an error says that a peer, or the store, is gone or late."""
    return _is_of_a_collective(error) and any(word in str(error) for word in (*_LATE, *_GONE))


@atexit.register
def _note_ends() -> None:
    """Note the orderly end of the process group: all ranks have come to the end, and its store may be gone."""
    if dist.is_initialized():
        for failures in list(_of_all_modules):
            failures.note_end()
        _name_lost(getattr(sys, "last_value", None))


def _name_lost(error: BaseException | None) -> None:
    """Say which rank was lost where a lost connection has ended the script in a collective of its own."""
    if error is None or not is_of_another_rank(error) or dist.get_world_size() == 1:
        return
    end, others = time.monotonic() + LOST_SECONDS, [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    how = "rank 0, which has the store of the process group, has ended; its output says why"
    with contextlib.suppress(dist.DistError, RuntimeError, ValueError):  # the store is gone
        say_at_exit()
        while not (gone := killed(others)) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        lost = [how for how in ended(others).values() if not is_of_another_rank(RuntimeError(how))]
        gone = gone or {rank: how for rank, how in ended(others).items() if how in lost}
        how = "; ".join(f"rank {rank} {how}" for rank, how in gone.items()) or "a rank has ended; its output says why"
    print(f"autopar: rank {dist.get_rank()} lost its connection because {how}", file=sys.stderr, flush=True)
