"""The relaxation of an integer program in HiGHS: under a limit of its bytes, or at a price of a byte.

Whole choices are made of it in :mod:`.highs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT, SolverWork
from autopar.planner.intra_op.building.integer_program import ROUNDING, Choice, MomentBytes, NoChoice, Problem
from autopar.planner.intra_op.solving.engine import silent_engine
from autopar.planner.intra_op.solving.program_matrix import Matrix, matrix

try:
    import highspy
except ImportError:  # CBC solves then
    highspy = None  # type: ignore[assignment]

NOTHING = 1e-6
"""A value of the relaxation below this is 0, one as near to 1 is 1: HiGHS's own tolerance."""
BYTES_SIZE = 1000.0
"""What the limit's bytes are scaled to, where bytes are what is minimised."""


@dataclass(frozen=True)
class Point:
    """A solution, in scaled seconds; ``whole`` if every item picks exactly one strategy.

    ``n_bytes`` are those of all moments by the worth of a byte of each, ``most_bytes`` those of the fullest one.
    """

    picked: tuple[int, ...]
    seconds: float
    n_bytes: float
    bound: float
    whole: bool = True
    gap: float = 0.0
    byte_price: float = 0.0  # what one byte more of the limit would save
    most_bytes: float = 0.0
    values: Any = None


class Relaxation:
    """A problem in HiGHS whose items may be divided between strategies.

    Without a memory limit that binds, its vertices are almost always whole choices, which are then optimal.
    """

    def __init__(self, problem: Problem, effort: SolverWork) -> None:
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
        """Add a moment that must fit, keeping the basis."""
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
    def end(self) -> object:
        """The basis at which the simplex method ended."""
        return self.engine.getBasis()

    def begin_at(self, end: Any) -> None:
        """Let the simplex method begin where it ended in a program of the same columns and rows, with other numbers."""
        if end is not None and len(end.col_status) == self.engine.getNumCol():
            if len(end.row_status) == self.engine.getNumRow():
                self.engine.setBasis(end)

    def _note_moments(self) -> None:
        """Note the bytes of all moments by column, of those that have any."""
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

    def _weigh_peak(self, share: float) -> None:
        """Let that share of the peak's bytes have a price."""
        self.peak_share = share
        self.priced = self.n_bytes.copy()
        if self.peak is not None:
            self.priced[self.columns == self.peak[0]] *= share

    def limit(self, n_bytes: float | None) -> None:
        """Set another limit; a problem without one keeps none."""
        self.room = math.inf if n_bytes is None else n_bytes
        self._relaxed: Point | None = None
        self._bound_memory(self.room)

    def _bound_memory(self, n_bytes: float) -> None:
        self._bound = n_bytes
        if self.lp.fullest is not None:
            n_bytes = 0.0  # less than the column
        for row, unseen in zip(self.memory_rows, self.unseen, strict=False):
            self.engine.changeRowBounds(row, -math.inf, (n_bytes - unseen) / self.unit)

    def relaxed(self) -> Point | None:
        """Return the optimum of the relaxation; None if the solver stopped before it."""
        engine = self.engine
        limited = self._bound < math.inf and self.lp.fullest is None
        many = self.effort.iterations
        if limited:
            many = max(EFFORT.iterations_before_check, engine.getNumCol() // EFFORT.columns_an_iteration)
        status = self._solved(min(many, self.effort.iterations))
        if status == "kIterationLimit" and many < self.effort.iterations:
            basis = engine.getBasis()
            if self._has_no_room():
                status = "kInfeasible"
            else:
                engine.setBasis(basis)
                status = self._solved(self.effort.iterations)
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

    def _solved(self, iterations: int, of_bytes: bool = False) -> str:
        """Let the simplex method go on for at most `iterations`, and return the status in which it ends.

        ``of_bytes``: bytes are what is minimised.
        """
        engine = self.engine
        engine.setOptionValue("solve_relaxation", True)
        engine.setOptionValue("simplex_iteration_limit", iterations)
        self._watch_the_clock()
        cold = not engine.getBasis().valid  # from what was solved before the simplex goes on
        large = EFFORT.presolve_columns_of_bytes if of_bytes else EFFORT.presolve_columns
        engine.setOptionValue("presolve", "on" if cold and engine.getNumCol() > large else "off")
        engine.run()
        return str(engine.getModelStatus().name)

    def _has_no_room(self) -> bool:
        """Return whether moments, by their last weights, have more bytes in any choice than the limit leaves.

        The simplex method may take minutes to find that rows have no solution: 33 s for 80 layers on a mesh of two
        axes, where the choice of the fewest bytes takes 0.7 s.
        """
        weights = self.weights
        for _ in range(EFFORT.weighings):
            found = self._least_bytes(weights)
            if found is None or found[0] > self.room * (1 + ROUNDING):
                return found is not None
            of_moments = self.by_moment @ found[1].values[self.columns] + np.array(self.unseen)
            over = np.maximum(of_moments - self.room, 0.0)
            if not over.any():
                return False
            weights = (weights + over / over.sum()) / 2  # what is too full counts for more
        return False

    def _least_bytes(self, weights: Any) -> tuple[float, Point] | None:
        """Return the least weighted sum of the moments' bytes, and its relaxation; None if it is not found in time."""
        every = np.arange(len(self.lp.cost), dtype=np.int32)
        costs, scale = np.zeros(len(every)), BYTES_SIZE / max(self.unit, 1.0)
        costs[self.columns] = scale * (weights @ self.by_moment)
        bound = self._bound
        self._bound_memory(math.inf)
        self.engine.changeColsCost(len(every), every, costs)
        self.engine.clearSolver()  # presolve is worth more than where the simplex method stands
        try:
            status = self._solved(self.effort.iterations, of_bytes=True)
            n_bytes = self.engine.getObjectiveValue() / scale
            point = self._point(0.0) if status == "kOptimal" else None
        finally:
            self.engine.clearSolver()  # what follows goes on from elsewhere
            self.engine.changeColsCost(len(every), every, np.array(self.lp.cost))
            self._charge(self.price)
            self._bound_memory(bound)
        if point is None:
            return None
        return n_bytes + float(weights @ np.array(self.unseen)), point

    def fewest_bytes(self) -> tuple[float, Choice] | None:
        """Return the least bytes of the first moment, and the choice nearest to that; None if not found in time."""
        found = self._least_bytes(np.eye(1, len(self.moments))[0])
        return (found[0], self.choice(replace(found[1], bound=0.0))) if found is not None else None

    def _relaxed_at(self, price: float) -> Point | None:
        """Return the relaxation at a price of a byte: whole, if it is with its peak, or one item's strategy, fixed."""
        self._charge(price)
        point = self.relaxed()
        if point is not None and not point.whole:
            point = self._below_peak(point.picked) or point
        if point is not None and not point.whole:
            point = self._decided_in_turn(point)
        return point

    def _decided_in_turn(self, point: Point) -> Point:
        """Return the relaxation with divided items fixed to their larger share, one by one, until all are whole."""
        columns: list[int] = []
        while not point.whole and len(columns) < EFFORT.rounded_items:
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

    def _below_peak(self, picked: tuple[int, ...]) -> Point | None:
        """Return the relaxation with no peak above a choice's: mostly the peak keeps a vertex from being whole."""
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

    def _watch_the_clock(self) -> None:
        """Let the next run end after the seconds that a user asked for, if any."""
        if self.effort.clock_seconds < math.inf:
            limit = self.engine.getRunTime() + self.effort.clock_seconds  # counts all runs
            self.engine.setOptionValue("time_limit", limit)

    def _charge(self, price: float) -> None:
        self.price = price
        self.engine.changeColsCost(len(self.columns), self.columns, self.costs + price * self.priced)

    def _point(self, bound: float) -> Point:
        values = np.asarray(self.engine.getSolution().col_value)
        of_moments = self.by_moment @ values[self.columns] + np.array(self.unseen)
        shares = values[self.flat]
        most = np.maximum.reduceat(shares, self.starts)
        largest = np.flatnonzero(shares == np.repeat(most, self.lengths))
        _, first = np.unique(self.row_of[largest], return_index=True)
        picked = tuple((largest[first] - self.starts).tolist())
        whole = bool((most > 1 - NOTHING).all())
        paid = self.price * float(values[self.columns] @ self.priced)
        return Point(
            picked, self.engine.getObjectiveValue() - paid, float(self.weights @ of_moments), bound - paid, whole,
            values=values, most_bytes=float(of_moments.max()),
        )  # fmt: skip

    def choice(self, point: Point) -> Choice:
        """Return a point as a choice, in seconds."""
        off = point.seconds - point.bound
        status = "time limit" if point.gap < 0 else "optimal"
        if point.gap >= 0 and off > ROUNDING * abs(point.seconds):
            status = "within gap"
        return Choice(
            point.picked, point.seconds / self.scale, point.bound / self.scale, status, "highs",
            self.room < math.inf and not (self._relaxed and self._relaxed.byte_price == 0.0),
            {"bytes": point.n_bytes},
        )  # fmt: skip

    def is_rough(self, gap: float) -> bool:
        """Return whether any whole choice near the relaxation will do, for so large a problem and so wide a gap."""
        return gap >= EFFORT.rough_gap and self.engine.getNumCol() > EFFORT.presolve_columns


def _engine(lp: Matrix) -> Any:
    """Return HiGHS with the program."""
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
    engine = silent_engine()
    for name, value in (("threads", 1), ("random_seed", 0)):
        engine.setOptionValue(name, value)
    engine.passModel(model)
    return engine
