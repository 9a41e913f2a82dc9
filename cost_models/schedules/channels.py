"""Channels: the order of messages between two ranks, and the receiver's buffers.

Between two ranks there is a channel for each direction. It carries messages in the order in which the sender's actions
end: first in, first out. A receiver that wants a later message before an earlier one must take the earlier ones out and
keep them, each in memory that no estimate of a schedule's memory counts. So a receiver keeps a few at most, and rows
that need more are refused: without a buffer for the messages in front the receiver would wait for ever for the one
behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from .actions import Schedule

KEPT_AT_MOST = 16
KEPT_FOR_STAGE = 2
"""Messages from one rank that another may keep before it comes to what it wants: so many, or so many for each stage of
a deep pipeline. Schedules of the table need as many as there are stages, where every stage sends to all later ones."""


class Sent(NamedTuple):
    """A message to another stage, as one action sends it or an action of that stage takes it."""

    source: int
    target: int
    kind: str  # F for an output, B for a gradient
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind == "F" else "gradient"
        return f"the {what} of stage {self.source} for stage {self.target}, microbatch {self.microbatch}"


class Keeping(NamedTuple):
    """The most messages that the receiver of a channel keeps, with the message it wants then and the action.

    The action is a position in the receiver's flat row, with both halves of an overlapped pair.
    """

    kept: int
    wanted: Sent
    place: int


def keeping(schedule: Schedule, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Keeping]:
    """Return the most messages that each receiver keeps, by sender and receiver (ranks of the schedule).

    `pairs` are the stages that send and receive in the forward; gradients go the other way.
    """
    orders = _Orders(schedule, pairs)
    most: dict[tuple[int, int], Keeping] = {}
    for channel, taken in orders.taken.items():
        sent = orders.sent[channel]
        if not taken:
            continue
        if sent == taken:  # most are, and this is far quicker than what follows
            most[channel] = Keeping(0, orders.message(taken[0]), orders.places(channel)[0])
            continue
        place = {number: i for i, number in enumerate(sent)}
        came_out = -1
        for i, number in enumerate(number for number in taken if number in place):  # nobody sends it
            came_out = max(came_out, place[number])
            kept = came_out - i
            if channel not in most or kept > most[channel].kept:
                most[channel] = Keeping(kept, orders.message(number), orders.places(channel)[taken.index(number)])
    return most


class _Orders:
    """The messages of each channel as numbers, in the orders of sending and of taking."""

    def __init__(self, schedule: Schedule, pairs: Iterable[tuple[int, int]]) -> None:
        self.schedule = schedule
        self.sent: dict[tuple[int, int], list[int]] = {}
        self.taken: dict[tuple[int, int], list[int]] = {}
        # By kind of action and stage: what is called with the number of microbatch 0's message plus the microbatch.
        self.calls: dict[str, dict[int, list[tuple[Callable[[int], None], int]]]] = {kind: {} for kind in "FBIW"}
        rank_of, n, m = schedule.rank_of_stage, schedule.n_stages, schedule.n_microbatches
        for a, b in sorted(pairs):
            if rank_of[a] == rank_of[b]:
                continue
            for source, target, kinds in ((a, b, "F"), (b, a, "BI")):
                channel = rank_of[source], rank_of[target]
                sent, taken = self.sent.setdefault(channel, []), self.taken.setdefault(channel, [])
                for kind in kinds:
                    self.calls[kind].setdefault(source, []).append((sent.append, (source * n + target) * m))
                    self.calls[kind].setdefault(target, []).append((taken.append, (source * n + target) * m))
        calls = self.calls
        for row in schedule.flat_rows:
            for stage, kind, microbatch in row:
                if stage in calls[kind]:
                    for append, first in calls[kind][stage]:
                        append(first + microbatch)

    def message(self, number: int) -> Sent:
        """Return the message of a number; a gradient goes to an earlier stage."""
        stages, microbatch = divmod(number, self.schedule.n_microbatches)
        source, target = divmod(stages, self.schedule.n_stages)
        return Sent(source, target, "F" if source < target else "B", microbatch)

    def places(self, channel: tuple[int, int]) -> list[int]:
        """Return the actions of the receiver's flat row that take messages from a channel, in order."""
        taken, places = self.taken[channel].append, []
        for place, (stage, kind, _) in enumerate(self.schedule.flat_rows[channel[1]]):
            places += [place for append, _ in self.calls[kind].get(stage, ()) if append == taken]
        return places


class Stop(NamedTuple):
    """A rank that waits for ever: the action of its flat row, and the reason."""

    rank: int
    place: int
    why: str


def first_blocked_rank(schedule: Schedule, pairs: Iterable[tuple[int, int]]) -> Stop | None:
    """Return the rank that takes messages too far out of the order of sending; None if there is none.

    It has no buffer for the messages in front of the one it wants. The answer is cached with the schedule, since it
    does not depend on times.
    """
    key = frozenset(pairs)
    answers: dict[frozenset[tuple[int, int]], Stop | None] = schedule.__dict__.setdefault("_first_blocked_rank", {})
    if key not in answers:
        answers[key] = _first_blocked_rank(schedule, key)
    return answers[key]


def _first_blocked_rank(schedule: Schedule, pairs: Collection[tuple[int, int]]) -> Stop | None:
    at_most = max(KEPT_AT_MOST, KEPT_FOR_STAGE * schedule.n_stages)
    if 2 * len(pairs) * schedule.n_microbatches <= at_most:  # all messages
        return None
    for (source, target), (kept, wanted, place) in sorted(keeping(schedule, pairs).items()):
        if kept > at_most:
            return Stop(
                target, place,
                f"rank {target} wants {wanted}, behind {kept} messages of rank {source} that it takes later, and a "
                f"rank keeps {at_most} at most; take what a rank sends nearer to the order in which it is sent",
            )  # fmt: skip
    return None
