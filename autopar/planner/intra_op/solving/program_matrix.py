"""A :class:`.integer_program.Problem` as the columns and rows of an integer program, whatever solves it.

Rows are collected as plain numbers: making a variable, an expression and a constraint object for each of them takes
longer than the solution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.planner.intra_op.building.integer_program import MomentBytes, Problem

SIZE = 1e3
"""What the objective is scaled to, about: solvers have absolute tolerances."""
SECONDS_SHARE = 1e-3
"""What seconds are worth beside bytes where the fullest moment is minimised."""


@dataclass
class Matrix:
    """Minimise ``cost @ columns`` such that ``low <= row @ columns <= high`` for every row.

    Attributes:
        cost: scaled seconds of a column.
        upper: the upper bound of a column; all are at least 0.
        whole: whether a column is 0 or 1.
        start, columns, values: the rows: row ``r`` has the entries from ``start[r]`` to ``start[r + 1]``.
        low, high: the bounds of a row.
        picks: the columns of every item, one a strategy.
        peak: the column of the peak, with its bytes.
        shared: columns of what several items keep in common.
        memory: rows of the memory limit, as shares of ``unit`` bytes.
        fullest: if the fullest moment is minimised, the column of its bytes.
        scale: the factor from seconds to `cost`.
    """

    scale: float
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    picks: list[range] = field(default_factory=list)
    peak: tuple[int, float] | None = None
    shared: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    unit: float = 1.0
    fullest: int | None = None

    def add(self, costs: Iterable[float], upper: float = math.inf, whole: bool = False) -> range:
        """Add columns, one for each of their seconds, and return their numbers."""
        first = len(self.cost)
        factor = self.scale * 2**20
        self.cost.extend(round(c * factor) / 2**20 for c in costs)
        n = len(self.cost) - first
        self.upper.extend([upper] * n)
        self.whole.extend([whole] * n)
        return range(first, first + n)

    def bytes_of(self, moment: MomentBytes) -> dict[int, float]:
        """Return by column the bytes that are there at a moment."""
        by_column = {
            v: b for picks, of_item in zip(self.picks, moment.items, strict=True)
            for v, b in zip(picks, of_item, strict=True) if b
        }  # fmt: skip
        by_column.update((v, b) for v, b in zip(self.shared, moment.shared, strict=True) if b)
        if self.peak is not None:
            by_column[self.peak[0]] = self.peak[1]
        return by_column

    def memory_row(self, moment: MomentBytes) -> dict[int, float]:
        """Return the row of a moment against the limit, as shares of ``unit`` bytes."""
        entries = {v: b / self.unit for v, b in self.bytes_of(moment).items()}
        return entries if self.fullest is None else {**entries, self.fullest: -1.0}

    def row(self, entries: Mapping[int, float], low: float, high: float) -> None:
        """Add a row."""
        self.columns.extend(entries)
        self.values.extend(entries.values())
        self.start.append(len(self.columns))
        self.low.append(low)
        self.high.append(high)


def matrix(problem: Problem) -> Matrix:
    """Return the integer program of :mod:`autopar.planner.intra_op.building.integer_program`.

    Solvers have absolute tolerances, so seconds are scaled to about :data:`SIZE` in all. The scale is a power of two,
    and costs are rounded to multiples of 2**-20 (one part in 10**9 of the total), so that their sums are exact.
    """
    total = sum(min(i.seconds) for i in problem.items) or max((max(i.seconds) for i in problem.items), default=0.0)
    size = SIZE if not problem.smallest else SIZE * SECONDS_SHARE
    lp = Matrix(2.0 ** round(math.log2(size / total)) if total > 0 else 1.0)
    for item in problem.items:
        lp.picks.append(lp.add(item.seconds, 1.0, True))
        lp.row(dict.fromkeys(lp.picks[-1], 1.0), 1.0, 1.0)
    _flows(problem, lp)
    _shared_bytes(problem, lp)
    _overlaps(problem, lp)
    _conditions(problem, lp)
    if problem.smallest:
        least = max(sum(map(min, moment.items)) for moment in problem.rows)
        lp.unit = max(least, 1.0)
        (lp.fullest,) = lp.add([SIZE / lp.scale])
    elif problem.limit_bytes is not None:
        lp.unit = max(problem.limit_bytes, 1.0)
    else:
        return lp
    for moment in problem.rows:
        lp.memory.append(len(lp.low))
        lp.row(lp.memory_row(moment), -math.inf, (problem.limit_bytes or 0.0) / lp.unit)
    return lp


def _flows(problem: Problem, lp: Matrix) -> None:
    """Add the flow of every tensor to each of its consumers, and the cost of steps that several of them use."""
    for tensor in problem.tensors:
        shared = len(tensor.consumers) > 1
        seconds = [s for _, _, s in tensor.steps]
        costly = [a for a, s in enumerate(seconds) if s]
        paid: range | None = None
        for consumer, wanted in tensor.consumers:
            flow = lp.add([0.0] * len(seconds) if shared else seconds)
            balance: dict[int, dict[int, float]] = {}
            for v, (src, dst, _) in zip(flow, tensor.steps, strict=True):
                balance.setdefault(src, {})[v] = -1.0
                balance.setdefault(dst, {})[v] = 1.0
            for v, state in zip(lp.picks[tensor.producer], tensor.made, strict=True):
                balance.setdefault(state, {})[v] = 1.0
            for v, state in zip(lp.picks[consumer], wanted, strict=True):
                of_state = balance.setdefault(state, {})
                of_state[v] = of_state.get(v, 0.0) - 1.0  # nothing is left where a class feeds itself
            # one balance follows from the others, since as much is made as wanted; HiGHS 1.15 was seen to loop for
            # ever in presolve when it was there too
            for entries in list(balance.values())[:-1]:
                lp.row(entries, 0.0, 0.0)
            if shared:
                paid = paid or lp.add(seconds[a] for a in costly)
                for v, a in zip(paid, costly, strict=True):
                    lp.row({v: 1.0, flow[a]: -1.0}, 0.0, math.inf)


def _shared_bytes(problem: Problem, lp: Matrix) -> None:
    """Add the peak, and bytes that several items keep in common."""
    largest = max((max(item.peak_bytes) for item in problem.items if item.peak_bytes), default=0.0)
    if largest:
        (peak,) = lp.add([0.0])
        lp.peak = peak, largest
        for picks, item in zip(lp.picks, problem.items, strict=True):
            if any(item.peak_bytes):
                parts = {v: -b / largest for v, b in zip(picks, item.peak_bytes, strict=True) if b}
                lp.row({peak: 1.0, **parts}, 0.0, math.inf)
    for common in problem.shared:
        (kept,) = lp.add([common.seconds])
        lp.shared.append(kept)
        for i, rows in common.users:
            entries = {kept: 1.0, **{lp.picks[i][s]: -1.0 for s in rows}}
            item, recomputing = common.recomputed or (0, ())
            for v in [lp.picks[item][s] for s in recomputing]:
                entries[v] = entries.get(v, 0.0) + 1.0
            lp.row(entries, 0.0, math.inf)


def _conditions(problem: Problem, lp: Matrix) -> None:
    """Add the strategies that may be picked only with some of another item."""
    for condition in problem.only_with:
        entries = {lp.picks[condition.item][s]: 1.0 for s in condition.rows}
        for v in (lp.picks[condition.of_item][s] for s in condition.of_rows):
            entries[v] = entries.get(v, 0.0) - 1.0  # a class may read what another of it makes
        lp.row({v: share for v, share in entries.items() if share}, -math.inf, 0.0)


def _overlaps(problem: Problem, lp: Matrix) -> None:
    """Add the seconds of sides that overlap, so that they count once."""
    for overlap in problem.overlaps:
        most = max(seconds for side in overlap.sides for _, of_item in side for seconds in of_item)
        (hidden,) = lp.add([-most])
        for side in overlap.sides:
            parts = {lp.picks[i][s]: -b / most for i, of_item in side for s, b in enumerate(of_item) if b}
            lp.row({hidden: 1.0, **parts}, -math.inf, 0.0)
