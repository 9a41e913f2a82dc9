"""Messages of a pipeline under NCCL's rules: channels of one direction each go through, one for both hangs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from nccl_rules import SHARED, Deadlock, ThreadRanks

from autopar.errors import RunError
from autopar.plans.transfer import Side, transfer
from autopar.runtime.pipelines import wires
from autopar.runtime.ranks import streams
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape
from cost_models.schedules import build
from cost_models.schedules.actions import Action, Schedule

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v")
Channels = Callable[[list[tuple[int, int]]], Mapping[tuple[int, int], Hashable]]


def of_their_own(pairs: list[tuple[int, int]]) -> dict[tuple[int, int], Hashable]:
    """A group for each ordered pair, as the runtime makes them."""
    return {pair: f"{pair[0]}>{pair[1]}" for pair in pairs}


def of_the_world(pairs: list[tuple[int, int]]) -> dict[tuple[int, int], Hashable]:
    """All messages in the group of all ranks, as they were once."""
    return dict.fromkeys(pairs, "world")


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


def sizes_of(kind: str, groups: int) -> list[int]:
    """How many ranks each group has."""
    return [2] * groups if kind == "equal" else [(1, 2, 4)[number % 3] for number in range(groups)]


class Steps:
    """A pipeline of ranks that are threads: what crosses neighbouring stages, and what skips some, two steps long."""

    def __init__(self, schedule: str, groups: int, kind: str, microbatches: int = 8) -> None:
        per_group = 1 if schedule in ("gpipe", "1f1b", "zb-h1") else 2
        self.schedule: Schedule = build(schedule, groups * per_group, groups, microbatches)
        places, first = [], 0
        for size in sizes_of(kind, groups):
            places.append(tuple(range(first, first + size)))
            first += size
        of_rank, last = self.schedule.rank_of_stage, self.schedule.n_stages - 1
        sides = []
        for s in range(last + 1):
            devices = places[of_rank[s]]
            mesh = Mesh.of(data=len(devices))
            sides.append(Side(State.of("S0") if s % 2 else State.of("S1"), mesh, devices))
        spec = Spec((4, 8), "float32")
        pairs = [*((s, s + 1) for s in range(last)), (0, last), (0, last), *([(1, last)] if last > 1 else [])]
        self.wires = [
            wires.Wire(i, f"x{i}", a, b, transfer(spec, sides[a], sides[b]), transfer(spec, sides[b], sides[a]))
            for i, (a, b) in enumerate(pairs)
        ]
        self.rows = {rank: self.schedule.flat_rows[g] for g, ranks in enumerate(places) for rank in ranks}

    def run(self, shared: str, channels: Channels, monkeypatch: pytest.MonkeyPatch) -> ThreadRanks:
        ranks = ThreadRanks(shared)
        monkeypatch.setattr(wires.dist, "isend", ranks.isend)
        monkeypatch.setattr(wires.dist, "irecv", ranks.irecv)
        groups = channels(wires.pairs_of(self.wires))

        def warm_up(rank: int) -> None:
            for (source, target), group in groups.items():
                if rank == source:
                    ranks.isend(torch.zeros(1), target, group).wait()
                elif rank == target:
                    ranks.irecv(torch.zeros(1), source, group).wait()

        def one(rank: int) -> None:
            warm_up(rank)
            row, microbatches = self.rows[rank], self.schedule.n_microbatches
            post = wires.Post.of(rank, torch.device("cpu"), self.wires, self.rows, microbatches, groups)
            for _ in range(2):
                does(post, self.wires, row)

        ranks.run(one, list(self.rows))
        return ranks


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("kind", [pytest.param("equal", marks=pytest.mark.slow), "unequal"])
@pytest.mark.parametrize("groups", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_channels_of_one_direction_go_through(
    schedule: str, groups: int, kind: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order alone tells messages apart, and whatever shares a stream, nothing waits for what is behind it."""
    steps = Steps(schedule, groups, kind)
    ranks = steps.run(shared, of_their_own, monkeypatch)
    assert sum(ranks.met.values()) > steps.schedule.n_microbatches * len(steps.wires)
    assert not any(ranks.open.values())


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_channel_for_both_directions_hangs(schedule: str, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the rules bite: receives that are posted ahead hold up the sends behind them, on both sides."""
    with pytest.raises(Deadlock, match="rank 0 waits for its"):
        Steps(schedule, 2, "equal").run(shared, of_the_world, monkeypatch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_later_message_answers_has_left(schedule: str) -> None:
    """The peer sends the answer in the action that takes the message or in a later one, and in no earlier message."""
    steps = Steps(schedule, 3, "unequal")

    def actions(wire: wires.Wire, message: wires.Message) -> tuple[tuple[int, str], tuple[int, str]]:
        ends = (wire.source, "F"), (wire.target, "F")
        return ((wire.target, "BI"), (wire.source, "BI")) if message.backward else ends

    def at(rank: int, stage: int, kinds: str, microbatch: int) -> int:
        [place] = [
            i for i, a in enumerate(steps.rows[rank])
            if a.stage == stage and a.kind in kinds and a.microbatch == microbatch
        ]  # fmt: skip
        return place

    answered = 0
    for rank in steps.rows:
        post = wires.Post.of(rank, torch.device("cpu"), steps.wires, steps.rows, 8, {})
        for target, messages in post.going.items():
            coming = [message for message, _ in post.coming.get(target, ())]
            sent = [at(target, *actions(steps.wires[m.wire], m)[0], m.microbatch) for m in coming]
            for message, _ in messages:
                taken = at(target, *actions(steps.wires[message.wire], message)[1], message.microbatch)
                later = [number for number, place in enumerate(sent) if place >= taken]
                assert post.answers.get(message) == (later[0] if later else None)
                answered += bool(later)
    assert answered


class _NeverSaysSo(NamedTuple):
    """Something under way that has ended only when somebody waited for it, as gloo's does."""

    is_completed: Callable[[], bool] = lambda: False
    wait: Callable[[], None] = lambda: None


def test_what_was_sent_is_held_until_it_is_answered() -> None:
    """Under 1F1B a stage holds, when a backward begins, what it has sent of one microbatch at most."""
    steps = Steps("1f1b", 3, "equal")
    post = wires.Post.of(0, torch.device("cpu"), steps.wires, steps.rows, 8, {})
    most = 0
    for action in steps.rows[0]:
        taken = [m for m in post.place if m.microbatch == action.microbatch and action.kind == "B"]
        for message in taken:
            post._answered(*post.place[message])
        if action.kind == "B":
            most = max(most, sum(sent.target in (2, 3) for sent in post.outbox))
        else:
            for message, piece in wires.messages_of(action, steps.wires):
                if piece.source == 0 != piece.target:
                    answer = post.answers.get(message, inf)
                    post.outbox.append(wires.UnderWay(_NeverSaysSo(), torch.empty(0), piece.target, answer))
    per_microbatch = sum(piece.source == 0 and piece.target in (2, 3) for piece in steps.wires[0].there.pieces)
    assert 0 < most <= per_microbatch


@pytest.mark.parametrize("does_what", ["send", "take"])
def test_messages_are_on_the_stream_of_the_step(does_what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps it may change; within one, what another stream sends or takes may not be there yet."""
    now = mock.Mock(name="first")
    monkeypatch.setattr(streams, "current_stream", lambda _: now)
    monkeypatch.setattr(wires.dist, "isend", lambda *_, **__: _NeverSaysSo())
    monkeypatch.setattr(wires.dist, "irecv", lambda *_, **__: _NeverSaysSo())
    steps = Steps("1f1b", 2, "equal")
    wire, rank = steps.wires[0], 0 if does_what == "send" else 2
    channels = of_their_own(wires.pairs_of(steps.wires))
    post = wires.Post.of(rank, torch.device("cpu"), steps.wires, steps.rows, 8, channels)

    def does(microbatch: int) -> None:
        if does_what == "send":
            post.send(wire, False, microbatch, torch.zeros(4, 4))
        else:
            post.take(wire, False, microbatch)

    post.begin()
    does(0)
    before, now = now, mock.Mock(name="second")
    with pytest.raises(RunError, match="what stage 0 and stage 1 send each other comes on the stream"):
        does(1)
    post.begin()
    now.wait_stream.assert_called_once_with(before)
    does(0)
