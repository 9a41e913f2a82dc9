"""NCCL's rules over gloo, for ranks that are processes: :mod:`nccl_rules` says which; what never comes ends in time.

``under(rules)`` puts them into torch.distributed of this rank: ``isend`` and ``irecv`` go to one worker for each
communicator, which does one after the other; what makes groups is recorded, and compared between all ranks at the end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from nccl_rules import communicator
from procs.pipelines import Config, compare, compare_one

from autopar.runtime.groups import Groups
from autopar.torch_private import default_store

c10d = dist.distributed_c10d
WAITS = 60.0
"""Seconds after which an operation counts as one that never ends."""


class Stuck(RuntimeError):
    """An operation that never ended."""


class _Work:
    def __init__(self, what: str, waits: float) -> None:
        self.what, self.waits, self.done = what, waits, threading.Event()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: Any = None) -> bool:
        if not self.done.wait(self.waits):
            raise Stuck(f"rank {dist.get_rank()}: {self.what} never ended")
        if self.error is not None:
            raise self.error
        return True


class Rules:
    """The rules, in the process of one rank.

    Attributes:
        groups: the sets of ranks of all groups that this rank was asked to make, in order.
        backends: what each was asked to be made of.
    """

    def __init__(self, shared: str, waits: float = WAITS) -> None:
        self.shared, self.waits = shared, waits
        self.store = dist.PrefixStore(f"nccl-rules/{shared}", default_store())
        self.real: dict[str, Callable[..., Any]] = {"send": dist.isend, "receive": dist.irecv}
        self.streams: dict[Hashable, queue.Queue[Any]] = {}
        self.groups: list[tuple[int, ...]] = []
        self.backends: list[str | None] = []

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> _Work:
        return self._post("send", tensor, dst, group)

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None, tag: int = 0) -> _Work:
        return self._post("receive", tensor, src, group)

    def _post(self, kind: str, tensor: torch.Tensor, peer: int, group: Any) -> _Work:
        rank = dist.get_rank()
        label = "world" if group is None or group is dist.group.WORLD else group.group_name
        name = communicator(self.shared, label, rank, peer)
        work = _Work(f"{kind} with rank {peer} on {label}", self.waits)
        if name not in self.streams:
            if self.shared == "pair":
                self._meet(f"{label}/{name[1:]}", rank, [peer], f"the first operation, a {work.what},")
            self.streams[name] = queue.Queue()
            threading.Thread(target=self._serve, args=(self.streams[name],), daemon=True).start()
        self.streams[name].put((kind, tensor, peer, group, work))
        return work

    def _serve(self, operations: queue.Queue[Any]) -> None:
        while True:
            kind, tensor, peer, group, work = operations.get()
            try:
                self.real[kind](tensor, peer, group=group).wait()  # gloo's sends, too, end when they have met a receive
            except BaseException as error:
                work.error = error
            work.done.set()

    def _meet(self, key: str, rank: int, others: list[int], what: str) -> None:
        """Block the host until the others come here, too."""
        self.store.set(f"{key}/{rank}", "here")
        end = time.monotonic() + self.waits
        while not self.store.check([f"{key}/{other}" for other in others]):
            if time.monotonic() > end:
                raise Stuck(f"rank {rank}: {what} waits for ranks {others}, which never came")
            time.sleep(0.005)

    def new_group(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
            members = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
            self.groups.append(members)
            self.backends.append(backend)
            if self.shared == "group":  # split from the world's communicator, by all of its ranks
                everyone = list(range(dist.get_world_size()))
                self._meet(f"split/{len(self.groups)}", dist.get_rank(), everyone, f"group {members}")
            return real(ranks, timeout, backend, *args, **options)

        return recorded

    def check_groups(self) -> None:
        """Every rank was asked to make the same groups in the same order. All ranks call it."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.groups)
        for rank, theirs in enumerate(everyone):
            assert theirs == everyone[0], f"rank 0 made groups {everyone[0]}, rank {rank} {theirs}"


@contextlib.contextmanager
def under(shared: str, waits: float = WAITS) -> Iterator[Rules]:
    """This rank's torch.distributed has the rules in this context; at its end groups are compared."""
    rules = Rules(shared, waits)
    before = dist.isend, dist.irecv, c10d._new_group_with_tag
    dist.isend, dist.irecv = rules.isend, rules.irecv  # type: ignore[assignment]
    c10d._new_group_with_tag = rules.new_group(before[2])
    try:
        yield rules
        rules.check_groups()
    finally:
        dist.isend, dist.irecv, c10d._new_group_with_tag = before


def compare_under(shared: str, configs: Sequence[Config], late: float = 0.0) -> list[dict[str, Any]]:
    """:func:`procs.pipelines.compare` under the rules; each rank comes up to ``late`` seconds after the others."""
    with under(shared):
        time.sleep(late * dist.get_rank() / dist.get_world_size())
        return compare(configs)


def over_the_world(shared: str, config: Config) -> None:
    """The same with all messages in the group of all ranks, as they were once."""
    Groups.channels = lambda self, pairs: dict.fromkeys(pairs, dist.group.WORLD)  # type: ignore[method-assign]
    with under(shared, waits=8.0):
        compare_one(config)
