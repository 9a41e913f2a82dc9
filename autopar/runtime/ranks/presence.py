"""Ranks that are within one call together, such as ``parallelize``: each hears who is gone.

A launcher such as torchrun ends all ranks when one of them dies. Without one, nobody tells the others: they wait for it
in the process group's store, or in a collective, until a time-out of half an hour. So while a rank is within such a
call, its watch looks every :data:`BEAT_SECONDS` who was killed (:mod:`autopar.runtime.ranks.ended`), or is
silent (:mod:`autopar.runtime.ranks.pulse`); a rank that leaves by an exception says so itself. Any of it is written
down as *news*, which all who wait in the store look for, and the groups that autopar made are aborted for those who
wait in a collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.ranks import pulse
from autopar.runtime.ranks.ended import killed, say_at_exit
from autopar.runtime.ranks.failures import SHOWN, is_of_another_rank
from autopar.runtime.ranks.store_names import next_name
from autopar.runtime.ranks.watch import watch
from autopar.torch_private import default_store

BEAT_SECONDS = 1.0
BEATS_OF_NEWS = 8
"""For how many beats a rank that has lost a connection waits to hear of whom."""
GRACE_SECONDS = 2.0
"""How long a rank may go on after the news before its groups are aborted: most hear it by themselves."""

_within: dict[tuple[int, ...], Presence] = {}
_world: dict[str, Any] = {}


class Presence:
    """This rank's, in one call."""

    def __init__(self, ranks: tuple[int, ...], what: str, abort: Callable[[], None]) -> None:
        """Initialize the object.

        Args:
            what: the call's name.
            abort: has what waits in a collective end with an error; called from another thread.
        """
        self.ranks, self.what, self.abort = ranks, what, abort
        self.rank = dist.get_rank()
        self.store = dist.PrefixStore(next_name("presence", ranks), default_store())
        self.beat = max(BEAT_SECONDS, len(ranks) / pulse.RANKS_OF_A_SECOND)
        self.changed, self.done = threading.Lock(), False
        say_at_exit()
        pulse.begin()
        self.hears = False
        watch(self._look, self.beat)

    def _look(self) -> float | None:
        """Abort the groups a while after the news, and write down who was killed."""
        if self.done:
            return None
        if self.hears:
            with self.changed:
                if not self.done:
                    self.abort()
            return None
        if self.news():
            self.hears = True
            return GRACE_SECONDS
        for rank, how in killed(self.ranks).items():
            self.tell(f"rank {rank}, within {self.what} or before it, {how}")
        return self.beat

    def tell(self, news: str) -> None:
        """Write down why this call cannot end well; the first one that does counts."""
        self.store.compare_set("news", "", news)

    def news(self) -> str:
        """Say why this call cannot end well; empty if nothing is known."""
        return self.store.get("news").decode() if self.store.check(["news"]) else ""

    def after_loss(self) -> str:
        """Say what is known of a rank to which the connection was lost, as soon as something is."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            pulse.connection_lost()
            end = time.monotonic() + BEATS_OF_NEWS * self.beat
            while time.monotonic() < end:
                if news := self.news():
                    return news
                time.sleep(self.beat / 10)
            return f"a rank has ended within {self.what}; its own output says why"
        return f"rank 0, which has the store of the process group, has ended within {self.what}; its output says why"

    def end(self, error: BaseException | None) -> None:
        """Leave the call with this rank."""
        with self.changed:
            self.done = True
        with contextlib.suppress(dist.DistError, RuntimeError):
            if error is not None:
                self.tell(f"rank {self.rank} left {self.what} by {type(error).__name__}: {str(error)[:SHOWN]}")


@contextlib.contextmanager
def alive(
    group: dist.ProcessGroup | None, what: str = "parallelize", abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Watch over what all ranks of a group do together, outside of a step.

    Within another such call of the same ranks it is part of that.

    Raises:
        RunError: a connection was lost here, because another rank has ended; it says which one, as far as that is
            known.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if _world.get("last") is not dist.group.WORLD:
        _world["last"] = dist.group.WORLD
        _within.clear()
    if len(ranks) == 1 or ranks in _within:
        yield
        return
    here = _within[ranks] = Presence(ranks, what, abort)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        if is_of_another_rank(raised):
            error = RunError(f"{here.after_loss()}\n  rank {here.rank} waited for it: {str(raised)[:SHOWN]}")
            raise error from raised
        raise
    finally:
        del _within[ranks]
        here.end(error)


def within(ranks: tuple[int, ...]) -> bool:
    """Check whether this rank is in a common call of `ranks`."""
    return ranks in _within


def news_of(ranks: tuple[int, ...]) -> str:
    """Say why one of `ranks`, which are in a call together, comes no more; empty if nothing is known."""
    here = _within.get(ranks)
    return here.news() if here is not None else ""


def after_loss(ranks: tuple[int, ...]) -> str:
    """Say what is known of the rank to which a connection was lost; empty outside of a common call."""
    here = _within.get(ranks)
    return here.after_loss() if here is not None else ""
