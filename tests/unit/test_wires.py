"""Messages of a pipeline need no tags: with those of each pair of ranks in the order of posting, all arrive right."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from autopar.graph import Spec
from autopar.placements import Mesh, local_shape
from autopar.runtime import wires
from autopar.transfer import Side, transfer
from cost_models.pipeline import build
from cost_models.pipeline.actions import Action

SECONDS = 20.0


class InOrder:
    """Channels that ignore tags, as NCCL does: the nth message from one rank to another goes to the nth receive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.here = threading.local()

    def isend(self, value: torch.Tensor, dst: int, tag: int = 0) -> _Done:
        with self.changed:
            self.sent[self.here.rank, dst].append(value.clone())
            self.changed.notify_all()
        return _Done()

    def irecv(self, value: torch.Tensor, src: int, tag: int = 0) -> _Arrival:
        with self.changed:
            pair = src, self.here.rank
            self.posted[pair] += 1
            return _Arrival(self, pair, self.posted[pair] - 1, value)


class _Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Arrival:
    def __init__(self, channels: InOrder, pair: tuple[int, int], number: int, value: torch.Tensor) -> None:
        self.channels, self.pair, self.number, self.value = channels, pair, number, value

    def wait(self) -> None:
        with self.channels.changed:
            arrived = self.channels.changed.wait_for(
                lambda: len(self.channels.sent[self.pair]) > self.number, timeout=SECONDS
            )
            assert arrived, f"message {self.number} of {self.pair} never came"
            message = self.channels.sent[self.pair][self.number]
        assert message.shape == self.value.shape
        self.value.copy_(message)


def number_of(wire: wires.Wire, backward: bool, microbatch: int) -> float:
    return 1000.0 * wire.number + 500.0 * backward + microbatch


def does(post: wires.Post, all_wires: Sequence[wires.Wire], row: Sequence[Action]) -> None:
    """What a rank does in a step: what it takes must be what was sent."""

    def send(wire: wires.Wire, backward: bool, microbatch: int) -> None:
        here = wire.transfer(backward).source
        shape = local_shape(wire.there.spec.shape, here.state, here.mesh)
        post.send(wire, backward, microbatch, torch.full(shape, number_of(wire, backward, microbatch)))

    def take(wire: wires.Wire, backward: bool, microbatch: int) -> None:
        assert bool((post.take(wire, backward, microbatch) == number_of(wire, backward, microbatch)).all())

    post.begin()
    for stage, kind, microbatch in row:
        into = [wire for wire in all_wires if wire.target == stage]
        out = [wire for wire in all_wires if wire.source == stage]
        for wire in {"F": into, "B": out, "I": out, "W": []}[kind]:
            take(wire, kind != "F", microbatch)
        for wire in {"F": out, "B": into, "I": into, "W": []}[kind]:
            send(wire, kind != "F", microbatch)
    post.end()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_order_alone_tells_messages_apart(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    per_group = 1 if schedule in ("gpipe", "1f1b", "zb-h1") else 2
    groups, microbatches = 3, 12
    plan = build(schedule, groups * per_group, groups, microbatches)
    mesh: Mesh = (("data", 2),)
    places = [(2 * plan.rank_of_stage[s], 2 * plan.rank_of_stage[s] + 1) for s in range(plan.n_stages)]
    sides = [Side(("S0",) if s % 2 else ("S1",), mesh, devices) for s, devices in enumerate(places)]
    spec = Spec((4, 6), "float32")
    last = plan.n_stages - 1
    pairs = [*((s, s + 1) for s in range(last)), (0, last), (0, last), (1, last)]
    all_wires = [
        wires.Wire(i, f"x{i}", a, b, transfer(spec, sides[a], sides[b]), transfer(spec, sides[b], sides[a]))
        for i, (a, b) in enumerate(pairs)
    ]
    rows = {device: plan.flat_rows[group] for group in range(groups) for device in (2 * group, 2 * group + 1)}
    channels = InOrder()
    monkeypatch.setattr(wires.dist, "isend", channels.isend)
    monkeypatch.setattr(wires.dist, "irecv", channels.irecv)
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        channels.here.rank = rank
        post = wires.Post.of(rank, torch.device("cpu"), all_wires, rows, microbatches)
        try:
            for _ in range(2):
                does(post, all_wires, rows[rank])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not problems and not any(thread.is_alive() for thread in threads), problems
    taken = sum(map(len, channels.sent.values()))
    assert taken == sum(channels.posted.values()) > microbatches * len(pairs)
