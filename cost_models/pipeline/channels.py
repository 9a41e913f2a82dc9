"""The order of messages between two ranks, and what it asks of the one that receives.

Between two ranks there is a channel for each direction. It carries messages in the order in which the sender's actions
end, one after the other: what comes out of it first is what was sent first. A receiver that wants a later message
before an earlier one has to take the earlier ones out and keep them, each in memory of its own, which no estimate of a
schedule's memory counts. So a receiver keeps a few at most, and rows that ask for more are refused: with no place for
the messages in front the receiver would wait for ever for the one behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .actions import Action, Schedule

KEPT_AT_MOST = 16
KEPT_FOR_STAGE = 2
"""Messages from one rank that another may keep before it comes to what it wants: so many, or so many for each stage of
a deep pipeline. Schedules of the table need as many as there are stages, where every stage sends to all later ones."""


class Sent(NamedTuple):
    """What one action sends to another stage, or what an action of that stage takes."""

    source: int
    target: int
    kind: str  # F for an output, B for a gradient
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind == "F" else "gradient"
        return f"the {what} of stage {self.source} for stage {self.target}, microbatch {self.microbatch}"


class Keeping(NamedTuple):
    """The most messages that the receiver of a channel keeps, and what it wants then."""

    kept: int
    wanted: Sent


def _sends(action: Action, pairs: Iterable[tuple[int, int]]) -> Iterator[Sent]:
    for a, b in pairs:
        if action.kind == "F" and action.stage == a:
            yield Sent(a, b, "F", action.microbatch)
        if action.kind in "BI" and action.stage == b:
            yield Sent(b, a, "B", action.microbatch)


def _takes(action: Action, pairs: Iterable[tuple[int, int]]) -> Iterator[Sent]:
    for a, b in pairs:
        if action.kind == "F" and action.stage == b:
            yield Sent(a, b, "F", action.microbatch)
        if action.kind in "BI" and action.stage == a:
            yield Sent(b, a, "B", action.microbatch)


def keeping(schedule: Schedule, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Keeping]:
    """By sender and receiver (ranks of the schedule): how many messages the receiver keeps at most.

    Args:
        pairs: the stages that send and those that receive in the forward; gradients go the other way.
    """
    pairs, rank_of = sorted(pairs), schedule.rank_of_stage
    place: dict[Sent, int] = {}
    number: dict[tuple[int, int], int] = {}
    for rank, action in schedule.actions():
        for sent in _sends(action, pairs):
            channel = rank, rank_of[sent.target]
            if channel[0] != channel[1]:
                place[sent] = number.get(channel, 0)
                number[channel] = place[sent] + 1
    most: dict[tuple[int, int], Keeping] = {}
    out: dict[tuple[int, int], int] = {}
    taken: dict[tuple[int, int], int] = {}
    for rank, action in schedule.actions():
        for wanted in _takes(action, pairs):
            channel = rank_of[wanted.source], rank
            if wanted not in place:
                continue
            taken[channel] = taken.get(channel, 0) + 1
            out[channel] = max(out.get(channel, 0), place[wanted] + 1)
            kept = out[channel] - taken[channel]
            if channel not in most or kept > most[channel].kept:
                most[channel] = Keeping(kept, wanted)
    return most


def check_channels(schedule: Schedule, pairs: Iterable[tuple[int, int]]) -> None:
    """Refuse a schedule whose ranks take messages in an order too far from that in which they are sent.

    Raises:
        ValueError: with the ranks, what is wanted, and both numbers.
    """
    at_most = max(KEPT_AT_MOST, KEPT_FOR_STAGE * schedule.n_stages)
    for (source, target), (kept, wanted) in sorted(keeping(schedule, pairs).items()):
        if kept > at_most:
            raise ValueError(
                f"schedule '{schedule.name}': rank {target} wants {wanted}, behind {kept} messages of rank {source} "
                f"that it takes later, and a rank keeps {at_most} at most; take what a rank sends nearer to the order "
                "in which it is sent"
            )


__all__ = ["KEPT_AT_MOST", "Keeping", "Sent", "check_channels", "keeping"]
