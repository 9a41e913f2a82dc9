"""NCCL's rules of point-to-point operations for ranks that are threads, with a deadlock found the moment it is there.

What NCCL does and gloo does not, and a program for gloo gets wrong without noticing:

* Tags count nothing: the nth send of one rank to another meets the nth receive there.
* The operations of a communicator run on one stream of each rank, one after the other, in the order in which they were
  posted; a send ends when it has met its receive. What is posted behind a receive that nobody answers does not begin.
* A communicator is that of an *unordered* pair of ranks of a group (``shared="pair"``), so both directions share a
  stream; with eager initialisation (``init_process_group(device_id=...)``) it is the group's own (``shared="group"``).
* Without eager initialisation the first operation of a communicator blocks the host until its peer has begun one, too.

No clock is in it: as soon as every rank waits and no two operations at the heads of their streams meet, all ranks get a
:class:`Deadlock` that says what each of them waits for. :mod:`procs.nccl` has the same rules for real processes.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

SHARED = ("pair", "group")
"""Who shares a communicator, and so a stream, with point-to-point operations: a pair of ranks, or the whole group."""


class Deadlock(RuntimeError):
    """Every rank waits, and nothing can go on."""


def communicator(shared: str, group: Hashable, rank: int, peer: int) -> tuple[Hashable, ...]:
    """What names the communicator of an operation between two ranks of a group."""
    return (group, min(rank, peer), max(rank, peer)) if shared == "pair" else (group,)


@dataclass(eq=False)
class _Operation:
    kind: str
    rank: int
    peer: int
    value: torch.Tensor
    done: bool = False


class _Work:
    """What ``isend`` and ``irecv`` give."""

    def __init__(self, ranks: ThreadRanks, operation: _Operation) -> None:
        self.ranks, self.operation = ranks, operation

    def is_completed(self) -> bool:
        return self.operation.done

    def wait(self) -> None:
        operation = self.operation
        self.ranks.wait(lambda: operation.done, f"rank {operation.rank} waits for its {operation.kind} with "
                        f"{operation.peer}")  # fmt: skip


class ThreadRanks:
    """Ranks that are threads of this process, with ``isend`` and ``irecv`` in the place of torch.distributed's.

    Attributes:
        met: how many operations have met, by source and target.
        most: by rank, the most receives that it had open at once.
    """

    def __init__(self, shared: str) -> None:
        self.shared = shared
        self.changed = threading.Condition()
        self.here = threading.local()
        self.streams: dict[tuple[int, Hashable], deque[_Operation]] = defaultdict(deque)
        self.begun: dict[Hashable, set[int]] = defaultdict(set)
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.running: set[int] = set()
        self.deadlock = ""
        self.met: dict[tuple[int, int], int] = defaultdict(int)
        self.open: dict[int, int] = defaultdict(int)
        self.most: dict[int, int] = defaultdict(int)

    def run(self, does: Callable[[int], None], ranks: Sequence[int]) -> None:
        """Call ``does(rank)`` on a thread for every rank.

        Raises:
            Deadlock: it came to one; or whatever another rank raised.
        """
        self.running = set(ranks)
        problems: list[BaseException] = []

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                does(rank)
            except BaseException as error:
                problems.append(error)
            with self.changed:
                self.running.discard(rank)
                self._look()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        others = [error for error in problems if not isinstance(error, Deadlock)]
        if problems:
            raise (others or problems)[0]

    def isend(self, value: torch.Tensor, dst: int, group: Hashable = None, tag: int = 0) -> _Work:
        return self._post(_Operation("send", self.here.rank, dst, value), group)

    def irecv(self, value: torch.Tensor, src: int, group: Hashable = None, tag: int = 0) -> _Work:
        rank = self.here.rank
        self.open[rank] += 1
        self.most[rank] = max(self.most[rank], self.open[rank])
        return self._post(_Operation("receive", rank, src, value), group)

    def _post(self, operation: _Operation, group: Hashable) -> _Work:
        rank, peer = operation.rank, operation.peer
        name = communicator(self.shared, group, rank, peer)
        with self.changed:
            if self.shared == "pair":
                self.begun[name].add(rank)
                self._look()
                what = f"rank {rank} makes its communicator with {peer} for a {operation.kind}"
                self._wait(lambda: peer in self.begun[name], what)
            self.streams[rank, name].append(operation)
            self._meet(name, operation)
            self._look()
        return _Work(self, operation)

    def _meet(self, name: Hashable, operation: _Operation) -> None:
        """Let operations at the heads of their streams meet, for as long as some do."""
        ranks = {rank for rank, stream in self.streams if stream == name}
        met = True
        while met:
            met = False
            for rank in ranks:
                stream = self.streams[rank, name]
                if not stream or stream[0].kind != "send":
                    continue
                there = self.streams[stream[0].peer, name]
                if there and there[0].kind == "receive" and there[0].peer == rank:
                    send, receive = stream.popleft(), there.popleft()
                    assert send.value.shape == receive.value.shape, (send.value.shape, receive.value.shape)
                    receive.value.copy_(send.value)
                    send.done = receive.done = met = True
                    self.open[receive.rank] -= 1
                    self.met[send.rank, receive.rank] += 1

    def wait(self, until: Callable[[], bool], what: str) -> None:
        with self.changed:
            self._wait(until, what)

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        rank = self.here.rank
        self.waiting[rank] = until, what
        self._look()
        self.changed.wait_for(lambda: until() or bool(self.deadlock))
        del self.waiting[rank]
        if not until():
            raise Deadlock(self.deadlock)

    def _look(self) -> None:
        """After every change: wake those that wait, or find that none can go on."""
        waiting = {rank: entry for rank, entry in self.waiting.items() if rank in self.running}
        stuck = len(waiting) == len(self.running) > 0 and not any(until() for until, _ in waiting.values())
        if stuck and not self.deadlock:
            self.deadlock = "; ".join(what for _, (_, what) in sorted(waiting.items()))
        self.changed.notify_all()


__all__ = ["SHARED", "Deadlock", "ThreadRanks", "communicator"]
