"""Messages of a pipeline under NCCL's rules: channels of one direction each go through, one for both hangs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import pytest
import torch
from nccl_rules import SHARED, Deadlock, ThreadRanks

from autopar.graph import Spec
from autopar.placements import Mesh, State, local_shape
from autopar.runtime import wires
from autopar.transfer import Side, transfer
from cost_models.pipeline import build
from cost_models.pipeline.actions import Action, Schedule

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
            mesh: Mesh = (("data", len(devices)),)
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
@pytest.mark.parametrize("kind", ["equal", "unequal"])
@pytest.mark.parametrize("groups", [2, 3, 4])
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
