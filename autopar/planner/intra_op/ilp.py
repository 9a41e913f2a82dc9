"""A :class:`~autopar.planner.intra_op.problem.Problem` becomes an integer program. Solvers are known here and in
:mod:`.by_cbc` alone.

HiGHS solves it in process (highspy), here; CBC, through PuLP, is the fallback. One thread and a fixed seed: same
problem, same answer. See :mod:`autopar.planner.intra_op.problem` for the mathematics; the names here are those there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.intra_op.by_cbc import ByCbc
from autopar.planner.intra_op.effort import PATIENT, Effort
from autopar.planner.intra_op.matrix import Matrix, matrix
from autopar.planner.intra_op.problem import PRICES, ROUGH, ROUNDING, Beaten, Choice, MomentBytes, NoChoice, Problem

try:
    import highspy
except ImportError:  # CBC solves then
    highspy = None  # type: ignore[assignment]

DEARER = (1.05, 1.2, 1.6, 3.0)
"""Times the relaxation's price of a byte, where the choice next to it does not fit."""
LARGE = 60_000
"""Columns from which presolve is worth its time: 11 s without it and 1 s with it at 117,000 (a mesh of three axes); at
17,000 it takes longer than the solution."""
NOTHING = 1e-6
"""A value of the relaxation below this is 0, one as near to 1 is 1: HiGHS's own tolerance."""
DECIDED = 16
"""Items that are decided in turn, at most, to come from the relaxation to a whole choice."""
NUDGE = 1e-3
"""By this part the price of a byte is moved to see the solutions on both sides of it."""
ITERATIONS = 2**31 - 1
"""HiGHS's own limit of simplex iterations: none."""
HULL_GAP = 0.01
"""How far the fastest choice may be from the best, where branch and bound is needed to find it."""


def program(
    problem: Problem, *, effort: Effort = PATIENT, solver: str = "auto"
) -> HighsProgram | ByCbc:
    """A problem that may be solved several times, with several limits.

    Args:
        effort: of one run; after it, the best solution so far is returned with its gap.
        solver: ``highs``, ``cbc`` or ``auto`` (HiGHS if highspy is installed).
    """
    if _pick(solver) == "cbc":
        return ByCbc(problem, effort.cpu_seconds)
    return HighsProgram(problem, effort)


@dataclass(frozen=True)
class _Point:
    """A solution, in scaled seconds; ``whole`` if every item picks exactly one strategy. ``n_bytes`` are those of all
    moments by what a byte of each is worth, ``most_bytes`` those of the fullest one."""

    picked: tuple[int, ...]
    seconds: float
    n_bytes: float
    bound: float
    whole: bool = True
    gap: float = 0.0
    byte_price: float = 0.0  # what one byte more of the limit would save
    most_bytes: float = 0.0
    values: Any = None


class HighsProgram:
    """A problem in HiGHS.

    The relaxation is solved first: without a memory limit that binds its vertices are almost always whole choices,
    which are then optimal. Branch and bound is for the rest.
    """

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem, self.effort = problem, effort
        lp = matrix(problem)
        self.scale, self.lp = lp.scale, lp
        self.engine = _engine(lp)
        self.rows = [np.array(picks, dtype=np.int32) for picks in lp.picks]
        self.lengths = np.array([len(row) for row in self.rows])
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)[:-1]))
        self.flat, self.row_of = np.concatenate(self.rows), np.repeat(np.arange(len(self.rows)), self.lengths)
        self.peak = lp.peak
        self.moments = list(problem.rows)
        self.unseen = [0.0] * len(self.moments)  # bytes that plans had at a moment beside those of its row
        self.memory_rows = lp.memory
        self.unit = lp.unit
        self.price, self.peak_share = 0.0, 1.0
        self._note_moments()
        self.limit(problem.limit_bytes)

    def add(self, moment: MomentBytes) -> None:
        """One more moment that must fit; what was solved is gone on from."""
        self.moments.append(moment)
        self.unseen.append(0.0)
        entries = self.lp.memory_row(moment)
        columns, shares = np.array(list(entries), dtype=np.int32), np.array(list(entries.values()))
        self.engine.addRow(-math.inf, math.inf, len(columns), columns, shares)
        self.memory_rows.append(self.engine.getNumRow() - 1)
        self._note_moments()
        self.limit(self.room)

    def lower(self, number: int, n_bytes: float) -> None:
        """Leave so much more of the limit to what the row of a moment does not see."""
        self.unseen[number] += n_bytes
        self.limit(self.room)

    @property
    def end(self) -> Any:
        """Where the simplex method stands: the basis."""
        return self.engine.getBasis()

    def begin_at(self, end: Any) -> None:
        """Let the simplex method begin where it ended in a program of the same columns and rows, with other numbers."""
        if end is not None and len(end.col_status) == self.engine.getNumCol():
            if len(end.row_status) == self.engine.getNumRow():
                self.engine.setBasis(end)

    def _note_moments(self) -> None:
        """Bytes of all moments by column: of those that have any."""
        by_moment = [self.lp.bytes_of(moment) for moment in self.moments]
        columns = sorted({v for entries in by_moment for v in entries})
        self.columns = np.array(columns, dtype=np.int32)
        self.by_moment = np.array([[entries.get(v, 0.0) for v in columns] for entries in by_moment])
        self.costs = np.array(self.lp.cost)[self.columns]
        self._weigh(np.ones(len(by_moment)))

    def _weigh(self, duals: Any) -> None:
        """Let bytes be those of all moments, by what a byte of each is worth."""
        self.weights = duals / duals.sum()
        self.n_bytes = self.weights @ self.by_moment
        self._weigh_peak(self.peak_share)

    def limit(self, n_bytes: float | None) -> None:
        """Another limit; a problem that was given none keeps none."""
        self.room = math.inf if n_bytes is None else n_bytes
        self._relaxed: _Point | None = None
        self._bound_memory(self.room)

    def _bound_memory(self, n_bytes: float) -> None:
        if self.lp.fullest is not None:
            n_bytes = 0.0  # less than the column
        for row, unseen in zip(self.memory_rows, self.unseen, strict=False):
            self.engine.changeRowBounds(row, -math.inf, (n_bytes - unseen) / self.unit)

    def whole(self) -> Choice | None:
        """The optimum, if the relaxation is whole.

        Raises:
            InfeasibleError: nothing satisfies the limit.
        """
        self._relaxed = self._relaxed or self.relaxed()
        return self.choice(self._relaxed) if self._relaxed is not None and self._relaxed.whole else None

    def least(self) -> float:
        """Seconds that no choice within the limit beats; 0 if the relaxation was not solved in time.

        Raises:
            InfeasibleError: nothing satisfies the limit.
        """
        self._relaxed = self._relaxed or self.relaxed()
        return self._relaxed.bound / self.scale if self._relaxed is not None else 0.0

    def nearest(self) -> Choice:
        """The larger shares of the relaxation: what it is most like, whether that fits or not.

        Raises:
            InfeasibleError: nothing satisfies the limit, or the solver was not done in time.
        """
        self._relaxed = self._relaxed or self.relaxed()
        if self._relaxed is None:
            raise InfeasibleError("the relaxation was not solved in time")
        return self.choice(self._relaxed)

    def pairs(self) -> Iterator[tuple[Choice, Choice]]:
        """Two choices whose mixture solves the relaxation under the limit: a faster, larger one and a smaller.

        A class of folded blocks that picks one strategy by 0.3 and another by 0.7 means that 0.3 of its blocks pick
        the one: so blocks that mix the two choices come close to the bound, where one choice for all blocks may be far
        from it. Both choices carry the bound, in seconds, that no plan within the limit beats, whether its blocks
        differ or not: the mean over the blocks of any plan is a solution of the relaxation.

        Yields:
            ``(faster, smaller)``, first as read from the relaxation itself, if it is like a mixture of two choices
            (their seconds are then what their bytes are worth at its price, and more in truth), then those found a
            little below and above its price of a byte. None if the relaxation is whole, or was not solved in time.
        """
        if self.whole() is not None or self._relaxed is None or self.problem.limit_bytes is None:
            return
        parts = self._parts(self._relaxed)
        if parts is not None:
            yield self.choice(parts[0]), self.choice(parts[1])
        faster, smaller = self.around(self._relaxed)
        yield self.choice(faster), self.choice(smaller)

    def _parts(self, relaxed: _Point) -> tuple[_Point, _Point] | None:
        """A faster and a smaller choice between which a fractional solution lies: the larger shares of its items, and
        the smaller ones. None if an item has more than two, or if the limit is not between the two."""
        shares = relaxed.values[self.flat]
        many = np.add.reduceat((shares > NOTHING).astype(int), self.starts)
        if many.max() != 2:
            return None
        first, second = relaxed.picked, list(relaxed.picked)
        for i in np.flatnonzero(many == 2):
            row = shares[self.starts[i] : self.starts[i] + self.lengths[i]].copy()
            row[first[i]] = 0.0
            second[i] = int(row.argmax())
        points = []
        for picked in (first, tuple(second)):
            n_bytes = self._bytes(picked)
            seconds = relaxed.seconds - relaxed.byte_price * (n_bytes - self.room)
            points.append(replace(relaxed, picked=picked, whole=True, n_bytes=n_bytes, seconds=seconds, values=None))
        smaller, faster = sorted(points, key=lambda p: p.n_bytes)
        return (faster, smaller) if smaller.n_bytes <= self.room <= faster.n_bytes else None

    def _bytes(self, picked: Sequence[int]) -> float:
        """Bytes of a whole choice, by what a byte of each moment is worth."""
        items = self.problem.items
        peak = max((i.peak_bytes[k] for i, k in zip(items, picked, strict=True) if i.peak_bytes), default=0.0)
        of_moments = zip(self.weights, self.moments, strict=True)
        rows = sum(float(w) * moment.n_bytes(self.problem, picked) for w, moment in of_moments if w)
        return peak + rows + float(self.weights @ np.array(self.unseen))

    def hull(self, prices: Sequence[float] = PRICES, peak_share: float = 1.0) -> list[Choice]:
        """The fastest choice and smaller ones, without limit: the best at rising prices of a byte.

        At price p all bytes of the fastest choice cost p times its seconds.

        Args:
            peak_share: of the peak's bytes that have a price: where other blocks have the same peak, they share it.

        Raises:
            InfeasibleError: there is no choice at all.
        """
        self._bound_memory(math.inf)
        self._weigh_peak(peak_share)
        points = [self._at(0.0, HULL_GAP)]
        unit = max(1.0, points[0].seconds) / max(1.0, points[0].n_bytes)
        for price in prices:
            point = self._relaxed_at(price * unit)  # the largest share of each is good enough, and no search
            points += [point] if point is not None else []
        self._charge(0.0)
        self._weigh_peak(1.0)
        self.limit(self.problem.limit_bytes)
        ordered = sorted({p.picked: p for p in points}.values(), key=lambda p: (p.seconds, p.n_bytes))
        return [self.choice(replace(p, bound=p.seconds)) for p in ordered]

    def _at(self, price: float, gap: float = 0.0) -> _Point:
        """The best choice at a price of a byte, in scaled seconds."""
        point = self._relaxed_at(price)
        return point if point is not None and point.whole else self.best(gap)

    def _relaxed_at(self, price: float) -> _Point | None:
        """The relaxation at a price of a byte: whole, if it is with its peak, or one item's strategy, fixed."""
        self._charge(price)
        point = self.relaxed()
        if point is not None and not point.whole:
            point = self._below_peak(point.picked) or point
        if point is not None and not point.whole:
            point = self._decided_in_turn(point)
        return point

    def _decided_in_turn(self, point: _Point) -> _Point:
        """The relaxation with items that are divided decided as they mostly are, one after the other, until all are
        whole: of two halves that go together, the rest follows the first."""
        columns: list[int] = []
        while not point.whole and len(columns) < DECIDED:
            shares = np.maximum.reduceat(point.values[self.flat], self.starts)
            item = int(np.flatnonzero(shares < 1 - NOTHING)[0])
            columns.append(int(self.rows[item][point.picked[item]]))
            self.engine.changeColBounds(columns[-1], 1.0, 1.0)
            try:
                point = self.relaxed() or point
            except InfeasibleError:
                break
        for column in columns:
            self.engine.changeColBounds(column, 0.0, 1.0)
        return point

    def solve(self, gap: float = 0.0, worth_seconds: float = math.inf) -> Choice:
        """The cheapest strategies.

        Args:
            gap: relative distance from the proven bound at which the solver may stop; 0 asks for the optimum. It is
                used only where memory counts, since the problem without it is easy.
            worth_seconds: what takes as long is not worth branch and bound.

        Raises:
            InfeasibleError: no choice satisfies the memory limit and the reach of reshards.
            Beaten: branch and bound would be needed, for what takes at least ``worth_seconds``.
        """
        whole = self.whole()
        if whole is not None:
            return whole
        if self.problem.limit_bytes is None:
            if self.least() >= worth_seconds:
                raise Beaten
            return self.choice(self.best(gap if self.lp.fullest is not None else 0.0))
        start: _Point | None = None
        if gap > 0.0 and self._relaxed is not None:
            _, beside = self.around(self._relaxed)
            start = beside if beside.most_bytes <= self.room else self._smaller(self._relaxed)
            if start is not None and (start.seconds - start.bound <= gap * start.seconds or self.is_rough(gap)):
                return self.choice(replace(start, gap=gap))
        if self._relaxed and self.choice(self._relaxed).bound >= worth_seconds:
            raise Beaten
        return self.choice(self.best(gap, start))

    def relaxed(self) -> _Point | None:
        """The optimum of the relaxation; None if the solver stopped before it."""
        engine = self.engine
        engine.setOptionValue("solve_relaxation", True)
        engine.setOptionValue("simplex_iteration_limit", self.effort.iterations)
        self._watch_the_clock()
        cold = not engine.getBasis().valid  # from what was solved before the simplex goes on
        engine.setOptionValue("presolve", "on" if cold and engine.getNumCol() > LARGE else "off")
        engine.run()
        status = engine.getModelStatus().name
        if status == "kInfeasible":
            raise NoChoice("no choice of strategies satisfies the constraints")
        if status != "kOptimal":
            return None
        price = 0.0
        if self.problem.limit_bytes is not None:
            duals = np.maximum(0.0, -np.asarray(engine.getSolution().row_dual)[self.memory_rows])
            price = float(duals.sum()) / self.unit
            if price:
                self._weigh(duals)
        return replace(self._point(engine.getObjectiveValue()), byte_price=price)

    def around(self, relaxed: _Point) -> tuple[_Point, _Point]:
        """The whole choices that are best a little below and a little above the relaxation's price of a byte."""
        price = relaxed.byte_price
        self._bound_memory(math.inf)
        least = relaxed.seconds + price * self.room  # of seconds and bytes together, at the price

        def near(price: float, fewer: bool) -> _Point:
            self._charge(price)
            point = self._below_peak(relaxed.picked)  # mostly the peak of both, and whole at once
            if point is not None and point.whole and (point.n_bytes < self.room) == fewer:
                if point.seconds + price * point.n_bytes <= least * (1 + 2e-3):
                    return point
            return self._at(price)

        faster, smaller = near(price * (1 - NUDGE), False), near(price * (1 + NUDGE), True)
        self._charge(0.0)
        self._bound_memory(self.room)
        return replace(faster, bound=relaxed.bound), replace(smaller, bound=relaxed.bound)

    def at_price(self, factor: float) -> Choice | None:
        """The best choice, whatever its bytes, where each costs so many times what it is worth in the relaxation; None
        if memory does not bind that, or if the choice is not found without branch and bound.

        Raises:
            InfeasibleError: nothing satisfies the limit.
        """
        self._relaxed = self._relaxed or self.relaxed()
        if self._relaxed is None or not self._relaxed.byte_price:
            return None
        self._bound_memory(math.inf)
        point = self._relaxed_at(factor * self._relaxed.byte_price)
        self._charge(0.0)
        self._bound_memory(self.room)
        return self.choice(replace(point, bound=self._relaxed.bound)) if point is not None and point.whole else None

    def is_rough(self, gap: float) -> bool:
        """Whether any whole choice near the relaxation will do, for a problem so large and a gap so wide."""
        return gap >= ROUGH and self.engine.getNumCol() > LARGE

    def _smaller(self, relaxed: _Point) -> _Point | None:
        """The first whole choice that fits at rising prices of a byte, from the relaxation's on."""
        found = None
        self._bound_memory(math.inf)
        for factor in DEARER:
            point = self._relaxed_at(factor * relaxed.byte_price)
            if point is not None and point.whole and point.most_bytes <= self.room:
                found = replace(point, bound=relaxed.bound)
                break
        self._charge(0.0)
        self._bound_memory(self.room)
        return found

    def _below_peak(self, picked: tuple[int, ...]) -> _Point | None:
        """The relaxation with no peak above that of a choice: the peak is what makes a vertex not whole, mostly."""
        items = self.problem.items
        peaks = [i.peak_bytes or (0.0,) * len(i.n_bytes) for i in items]
        most = max(of_item[k] for of_item, k in zip(peaks, picked, strict=True))
        rows = zip(self.rows, peaks, strict=True)
        above = np.array([row[k] for row, of_item in rows for k, n in enumerate(of_item) if n > most])
        if self.peak is None or not most:
            return None
        column, largest = self.peak
        engine, zeros, ones = self.engine, np.zeros(len(above)), np.ones(len(above))
        engine.changeColsBounds(len(above), above, zeros, zeros)
        engine.changeColBounds(column, most / largest, math.inf)
        try:
            return self.relaxed()
        except InfeasibleError:
            return None
        finally:
            engine.changeColsBounds(len(above), above, zeros, ones)
            engine.changeColBounds(column, 0.0, math.inf)

    def best(self, gap: float, start: _Point | None = None) -> _Point:
        """By branch and bound, from a choice that is known already."""
        engine = self.engine
        engine.setOptionValue("solve_relaxation", False)
        engine.setOptionValue("presolve", "choose")
        engine.setOptionValue("mip_rel_gap", gap)
        engine.setOptionValue("simplex_iteration_limit", ITERATIONS)  # of one node's relaxation, here
        self._watch_the_clock()
        engine.clearSolver()  # presolve may hang on the relaxation's values, which HiGHS would complete to a solution
        if start is not None and start.most_bytes <= self.room:
            starting = highspy.HighsSolution()
            starting.col_value = list(start.values)
            engine.setSolution(starting)
        with _at_most(engine, self.effort.steps_of(engine.getNumNz())):
            engine.run()
        info, status = engine.getInfo(), engine.getModelStatus().name
        if info.primal_solution_status != 2:
            if status == "kInfeasible":
                raise NoChoice("no choice of strategies satisfies the constraints")
            raise InfeasibleError(
                "no choice of strategies was found in the work that the solver may do in one run; give it more time "
                "(time_limit)"
            )
        point = self._point(min(info.objective_function_value, info.mip_dual_bound))
        return replace(point, gap=gap if status == "kOptimal" else -1.0)

    def _watch_the_clock(self) -> None:
        """Where a user asked for seconds, let the next run end after so many."""
        if self.effort.clock_seconds < math.inf:
            limit = self.engine.getRunTime() + self.effort.clock_seconds  # counts all runs
            self.engine.setOptionValue("time_limit", limit)

    def choice(self, point: _Point) -> Choice:
        """As seconds."""
        off = point.seconds - point.bound
        status = "time limit" if point.gap < 0 else "optimal"
        if point.gap >= 0 and off > ROUNDING * abs(point.seconds):
            status = "within gap"
        return Choice(
            point.picked, point.seconds / self.scale, point.bound / self.scale, status, "highs",
            self.room < math.inf and not (self._relaxed and self._relaxed.byte_price == 0.0),
            {"bytes": point.n_bytes},
        )  # fmt: skip

    def _charge(self, price: float) -> None:
        self.price = price
        self.engine.changeColsCost(len(self.columns), self.columns, self.costs + price * self.priced)

    def _weigh_peak(self, share: float) -> None:
        """Let that share of the peak's bytes have a price."""
        self.peak_share = share
        self.priced = self.n_bytes.copy()
        if self.peak is not None:
            self.priced[self.columns == self.peak[0]] *= share

    def _point(self, bound: float) -> _Point:
        values = np.asarray(self.engine.getSolution().col_value)
        of_moments = self.by_moment @ values[self.columns] + np.array(self.unseen)
        shares = values[self.flat]
        most = np.maximum.reduceat(shares, self.starts)
        largest = np.flatnonzero(shares == np.repeat(most, self.lengths))
        _, first = np.unique(self.row_of[largest], return_index=True)
        picked = tuple((largest[first] - self.starts).tolist())
        whole = bool((most > 1 - NOTHING).all())
        paid = self.price * float(values[self.columns] @ self.priced)
        return _Point(
            picked, self.engine.getObjectiveValue() - paid, float(self.weights @ of_moments), bound - paid, whole,
            values=values, most_bytes=float(of_moments.max()),
        )  # fmt: skip


@contextmanager
def _at_most(engine: Any, steps: int) -> Iterator[None]:
    """Stop branch and bound after so many steps.

    HiGHS asks after every relaxation, dive and node whether to go on: on one thread, the same program is asked as often
    wherever it runs. (Its own limits of nodes leave out the root, where most of the time goes.)
    """
    taken = 0

    def go_on(kind: Any, message: str, of_solver: Any, answer: Any, nothing: Any) -> None:
        nonlocal taken
        taken += 1
        answer.user_interrupt = taken > steps

    kind = highspy.cb.HighsCallbackType.kCallbackMipInterrupt
    callback_of = super(highspy.Highs, engine).setCallback
    callback_of(go_on, None)
    engine.startCallback(kind)
    try:
        yield
    finally:
        engine.stopCallback(kind)
        callback_of(None, None)


def _engine(lp: Matrix) -> Any:
    """HiGHS with the program."""
    n, m, kinds = len(lp.cost), len(lp.low), highspy.HighsVarType
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = n, m
    model.col_cost_, model.col_lower_, model.col_upper_ = np.array(lp.cost), np.zeros(n), np.array(lp.upper)
    model.integrality_ = [kinds.kInteger if w else kinds.kContinuous for w in lp.whole]
    model.row_lower_, model.row_upper_ = np.array(lp.low), np.array(lp.high)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.num_col_, model.a_matrix_.num_row_ = n, m
    model.a_matrix_.start_ = np.array(lp.start, dtype=np.int32)
    model.a_matrix_.index_ = np.array(lp.columns, dtype=np.int32)
    model.a_matrix_.value_ = np.array(lp.values, dtype=np.float64)
    engine = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        engine.setOptionValue(name, value)
    engine.passModel(model)
    return engine


def _pick(solver: str) -> str:
    if solver != "auto":
        return solver
    return "highs" if highspy is not None else "cbc"
