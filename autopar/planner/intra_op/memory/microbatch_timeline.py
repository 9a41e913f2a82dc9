"""The timeline of a microbatch on one rank: when memory begins and ceases to live, and what is needed beside it.

Moments are operators and steps of reshards: those of the forward in their order, then those of the backward in the
reverse order, as autograd runs them (of all nodes whose gradients are there, the one that was made last).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.plans.prices import MicrobatchPeaks, Moment

SLOTS = 4
"""Moments of one operator or step in the backward: what is recomputed for it, itself, the sums of its gradients with
others, and what becomes of gradients of parameters."""

MADE = -1
"""Position that stands for what an operator makes, among those of what it reads."""


class Span(NamedTuple):
    """Some memory that is no entry of the ledger, from one moment to another, both included.

    ``node`` and ``position`` say which tensor is as large as it: what a node reads there, or makes (:data:`MADE`).
    """

    n_bytes: int
    first: int
    last: int
    node: int
    position: int = MADE


class Lifetime(NamedTuple):
    """Some memory of a microbatch, from one moment to another, both included.

    Attributes:
        kind: ``activation``, ``gradient`` of one, ``parameter gradient``, which stays, or ``recomputed``.
        node: the node that makes it, or whose gradient it is.
    """

    kind: str
    n_bytes: int
    first: int
    last: int
    node: int


class MicrobatchTimeline:
    """Bytes moment by moment.

    Attributes:
        n: moments of the forward.
        more: bytes that begin to live at each moment, less those that cease to.
        beside: working memory of each moment.
        spans: results that are read in the forward only, and gradients but for those that stay.
        lifetimes: the lifetimes of all memory that lives; None if nobody reads it.
    """

    def __init__(self, walk: Walk, remembers: bool) -> None:
        self.walk, self.graph, self.mesh = walk, walk.graph, walk.mesh
        self.order, self.n = walk.order, len(walk.order)
        self.at_of = {what: at for at, what in enumerate(self.order) if isinstance(what, int)}
        self.more = [0] * ((1 + SLOTS) * self.n + 2)
        self.beside = [0] * ((1 + SLOTS) * self.n + 1)
        self.spans: list[Span] = []
        self.lifetimes: list[Lifetime] | None = [] if remembers else None

    def back(self, at: int, slot: int = 1) -> int:
        """Return the moment of the backward of the operator at ``at`` in the order."""
        return self.n + SLOTS * (self.n - 1 - at) + slot

    def lives(self, kind: str, n_bytes: int, first: int, last: int, node: int) -> None:
        """Note memory that lives from one moment to another, both included; words as in :class:`Lifetime`."""
        self.more[first] += n_bytes
        self.more[last + 1] -= n_bytes
        if self.lifetimes is not None and n_bytes:
            self.lifetimes.append(Lifetime(kind, n_bytes, first, last, node))

    def stays(self, n_bytes: int, first: int, node: int) -> None:
        """Note that the gradient of a parameter is there from a moment on."""
        self.more[first] += n_bytes
        if self.lifetimes is not None and n_bytes:
            self.lifetimes.append(Lifetime("parameter gradient", n_bytes, first, self.back(0, SLOTS - 1), node))

    def peaks(self) -> MicrobatchPeaks:
        """Return the fullest moment of the forward and that of the backward, the earlier of equal moments."""
        if not self.n:
            return MicrobatchPeaks(0, 0, None, None)
        totals = self.totals()
        forward, backward = (
            max(range(first, end), key=totals.__getitem__) for first, end in ((0, self.n), (self.n, len(totals)))
        )
        return MicrobatchPeaks(totals[forward], totals[backward], self.moment(forward), self.moment(backward))

    def totals(self) -> list[int]:
        """Return the bytes at each moment."""
        return [live + beside for live, beside in zip(accumulate(self.more), self.beside, strict=False)]

    def moment(self, at: int) -> Moment:
        """Return a moment by the operator that runs then, or for which a reshard step is made."""
        backward = at >= self.n
        place = self.n - 1 - (at - self.n) // SLOTS if backward else at
        place = min(max(place, 0), self.n - 1)
        operators = [what for what in self.order[place:] if isinstance(what, int)]
        if not operators:
            operators = [what for what in self.order if isinstance(what, int)][-1:]
        return Moment(operators[0], backward, (at - self.n) % SLOTS if backward else 0)

    def at(self, moment: Moment) -> int:
        """Return the number of a moment."""
        return self.back(self.at_of[moment.node], moment.slot) if moment.backward else self.at_of[moment.node]
