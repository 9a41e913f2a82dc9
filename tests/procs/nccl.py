"""NCCL's rules over gloo, for ranks that are processes: :mod:`nccl_rules` says which; what never comes ends in time.

``under(rules)`` puts them into torch.distributed of this rank: ``isend`` and ``irecv`` go to one worker for each
communicator, which does one after the other; what makes groups is recorded, and compared between all ranks at the end.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from nccl_rules import communicator
from procs.cases import cut
from procs.pipelines import ONE, Config, compare, compare_one, make_plan
from torch.distributed.device_mesh import DeviceMesh
from zoo import ZOO

import autopar
from autopar.capture import capture
from autopar.errors import RunError
from autopar.runtime.as_module.spreading import pipelined
from autopar.runtime.ranks import failures, presence
from autopar.runtime.ranks.agree import share
from autopar.runtime.ranks.groups import Groups, destroy_groups, group_of_members
from autopar.torch_private import default_store, group_names
from cost_models.schedules import build

c10d = dist.distributed_c10d
WAITS = 60.0
"""Seconds after which an operation counts as one that never ends."""
_uses = itertools.count()
"""Of the rules in this process. Groups, and so communicators that have begun, go on from one use to the next; counts of
new groups do not."""


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
        self.use = next(_uses)
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
            if options.get("use_local_synchronization"):  # torch does not count it, nor do other ranks hear of it
                return real(ranks, timeout, backend, *args, **options)
            members = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
            self.groups.append(members)
            self.backends.append(backend)
            if self.shared == "group":  # split from the world's communicator, by all of its ranks
                everyone = list(range(dist.get_world_size()))
                self._meet(f"split/{self.use}/{len(self.groups)}", dist.get_rank(), everyone, f"group {members}")
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


def compare_models_under(shared: str, by_model: Sequence[Sequence[Config]]) -> list[list[dict[str, Any]]]:
    """The same of several models one after the other, in processes that start once."""
    return [compare_under(shared, configs) for configs in by_model]


def over_the_world(shared: str, config: Config) -> None:
    """The same with all messages in the group of all ranks, as they were once."""
    Groups.channels = lambda self, pairs: dict.fromkeys(pairs, dist.group.WORLD)  # type: ignore[method-assign]
    with under(shared, waits=8.0):
        compare_one(config)


class Place(NamedTuple):
    """Where a rank of a pipeline fails.

    Attributes:
        at: which action of its row.
        step: of training; ``evaluate`` is a forward without gradients.
    """

    rank: int
    at: int
    schedule: str = "1f1b"
    step: int = 1
    evaluate: bool = False

    @property
    def called(self) -> str:
        """What the others say that failed."""
        return "a forward without gradients" if self.evaluate else f"train_step {self.step}"


def rows_of(schedule: str, n: int) -> list[int]:
    """How many actions each rank has in a step of training, and in an evaluation."""
    return [len(row) for row in build(schedule, n, n, 4).flat_rows]


def fails_at(place: Place) -> tuple[float, str]:
    """One rank of a pipeline fails at an action of its row, and does not go away; seconds until this rank has an error,
    and the error."""
    config = Config("mlp", place.schedule, (ONE,) * dist.get_world_size(), 4)
    case = ZOO["mlp"](layers=2 * dist.get_world_size())
    captured = capture(case.model, *cut(case.batch, 4, 0))
    beside = pipelined(copy.deepcopy(case.model), captured, make_plan(captured, config))
    pm = pipelined(case.model, captured, make_plan(captured, config))
    call = pm.evaluate if place.evaluate else pm.train_step
    for _ in range(place.step):
        pm.train_step(*case.batch[0], **case.batch[1])  # these go well
    if dist.get_rank() == place.rank:
        row = pm._autopar.work.forward_row if place.evaluate else pm._autopar.work.row
        action = row[place.at]
        flight = pm._autopar.work.flights[action.stage]
        name = {"F": "forward", "W": "weights"}.get(action.kind, "backward")
        real, calls = getattr(flight, name), itertools.count()
        kinds = {"forward": "F", "weights": "W", "backward": "BI"}[name]
        number = [a for a in row[: place.at] if a.kind in kinds]

        def trouble(*args: Any, **options: Any) -> Any:
            if next(calls) == len(number):
                raise ValueError(f"trouble in {action}")
            return real(*args, **options)

        setattr(flight, name, trouble)
    start = time.monotonic()
    try:
        call(*case.batch[0], **case.batch[1])
    except (RunError, ValueError) as error:
        took, text = time.monotonic() - start, str(error)
        again = ""
        try:
            pm.train_step(*case.batch[0], **case.batch[1])
        except RunError as refused:
            again = str(refused)
        assert "this module cannot go on" in again, again
        with pytest.raises(RunError, match="of this module or of another one with the same ranks"):
            beside.train_step(*case.batch[0], **case.batch[1])
        return took, text
    raise AssertionError("the step went well")


def fail_at(places: Sequence[Place], grace: float | None = None) -> list[tuple[float, str]]:
    """One module after the other, each of which fails at one place."""
    if grace is not None:
        failures.GRACE_SECONDS = grace
    return [fails_at(place) for place in places]


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(_Block(), _Block(), _Block(), _Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def with_groups_between(shared: str, runs: int, late: float) -> tuple[list[tuple[int, ...]], list[float]]:
    """Two calls of ``parallelize`` and a user's groups after each, ``runs`` times; ranks come late."""
    chance = random.Random(dist.get_rank())
    n, rank = dist.get_world_size(), dist.get_rank()
    losses: list[float] = []
    with under(shared) as rules:
        for run in range(runs):
            for stages in (2, n) if run % 2 else (None, n):  # None: all ranks have one mesh
                time.sleep(chance.uniform(0, late))
                torch.manual_seed(run)
                how: dict[str, Any] = {"stages": stages, "schedule": "1f1b", "microbatches": 2} if stages else {}
                pm = autopar.parallelize(_Small(), n, (torch.ones(4, 8),), **how)
                ranks = [0, n - 1] if run % 2 else [*range(n)]
                mine = dist.new_group(ranks)  # of the user's own, on all ranks
                if rank in ranks:
                    number = torch.ones(1)
                    dist.all_reduce(number, group=mine)
                    assert number.item() == len(ranks)
                time.sleep(chance.uniform(0, late))
                losses.append(float(pm.train_step(torch.ones(4, 8)).detach()))
        of_user = [backend is None for backend in rules.backends]  # autopar says one: no gloo for groups of GPUs
        assert sum(of_user) == 2 * runs and {*rules.backends} == {"gloo", None}
        there = len(group_names())
        destroy_groups()
        assert len(group_names()) == 1 + sum(rank in rules.groups[i] for i, own in enumerate(of_user) if own) < there
        return rules.groups, losses


def comes_late(seconds: float) -> tuple[str, float]:
    """What the first rank gives after some seconds, in a group whose collectives are over sooner."""
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=seconds / 4))
    text = None
    with presence.alive(impatient):
        if dist.get_rank() == 0:
            time.sleep(seconds)
            text = "long " * 2_000_000
        start = time.monotonic()
        got = share(impatient, text, None)
    return got[:9] + str(len(got)), time.monotonic() - start


def on_a_part_of_the_world() -> tuple[float, float]:
    """A model on the first two of three ranks, on a mesh of two axes; afterwards the user makes a group of all."""
    mesh = DeviceMesh("cpu", torch.arange(2).reshape(2, 1), mesh_dim_names=("data", "tensor"))
    loss = 0.0
    if dist.get_rank() < 2:
        torch.manual_seed(0)
        pm = autopar.parallelize(_Small(), mesh, (torch.ones(4, 8),), cluster="local-x2")
        out = pm(torch.ones(4, 8))
        out.backward()
        loss = float(out.detach())
    mine = dist.new_group([0, 1, 2])
    number = torch.ones(1)
    dist.all_reduce(number, group=mine)
    return loss, number.item()


def members_of_other_groups(folder: str) -> tuple[float, list[str]]:
    """Ranks that are in different numbers of groups make one among themselves, for a checkpoint, and one that was ended
    is made again; how many of three ranks meet there, and what was saved."""
    dist.new_group([0, 1])
    pm = autopar.parallelize(_Small(), 3, (torch.ones(6, 8),))
    checkpoint = autopar.Checkpoint(folder, model=pm)
    checkpoint.save(1)
    number = torch.ones(1)
    for _ in range(2):
        group = group_of_members([0, 1, 2], "gloo")
        dist.all_reduce(number, group=group)
        dist.destroy_process_group(group)
    return number.item(), sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))
