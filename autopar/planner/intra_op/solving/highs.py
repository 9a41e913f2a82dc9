"""Integer programs in HiGHS, solved to whole choices.

The only file besides :mod:`.relaxation` and :mod:`.cbc` with solvers.

HiGHS solves in process (highspy); CBC, through PuLP, is the fallback. One thread and a fixed seed: same problem, same
answer. See :mod:`autopar.planner.intra_op.building.integer_program` for the mathematics; the names are those there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT, PATIENT, SolverWork
from autopar.planner.intra_op.building.integer_program import Beaten, Choice, NoChoice, Problem
from autopar.planner.intra_op.solving.relaxation import NOTHING, Point, Relaxation

if TYPE_CHECKING:
    from autopar.planner.intra_op.solving.cbc import ByCbc

try:
    import highspy
except ImportError:  # CBC solves then
    highspy = None  # type: ignore[assignment]

ITERATIONS = 2**31 - 1
"""HiGHS's own limit of simplex iterations: none."""


Program: TypeAlias = "HighsProgram | ByCbc"


def program(problem: Problem, *, effort: SolverWork = PATIENT, solver: str = "auto") -> Program:
    """Return a problem that may be solved several times, with several limits.

    ``effort`` is that of one run, after which the best solution so far is returned with its gap; ``solver`` is
    ``highs``, ``cbc`` or ``auto`` (HiGHS if highspy is installed).
    """
    if _pick(solver) == "cbc":
        from autopar.planner.intra_op.solving.cbc import ByCbc

        return ByCbc(problem, effort.cpu_seconds)
    return HighsProgram(problem, effort)


class HighsProgram(Relaxation):
    """A problem in HiGHS.

    The relaxation is solved first: without a memory limit that binds its vertices are almost always whole choices,
    which are then optimal. Branch and bound is for the rest.
    """

    def whole(self) -> Choice | None:
        """Return the optimum, if the relaxation is whole."""
        self._relaxed = self._relaxed or self.relaxed()
        return self.choice(self._relaxed) if self._relaxed is not None and self._relaxed.whole else None

    def least(self) -> float:
        """Return the seconds that no choice within the limit beats; 0 if the relaxation was not solved in time."""
        self._relaxed = self._relaxed or self.relaxed()
        return self._relaxed.bound / self.scale if self._relaxed is not None else 0.0

    def nearest(self) -> Choice:
        """Return the choice that the relaxation is most like, by its larger shares, whether that fits or not."""
        self._relaxed = self._relaxed or self.relaxed()
        if self._relaxed is None:
            raise InfeasibleError("the relaxation was not solved in time")
        return self.choice(self._relaxed)

    def pairs(self) -> Iterator[tuple[Choice, Choice]]:
        """Yield pairs of choices whose mixture solves the relaxation under the limit: a faster and a smaller one.

        A faster, larger one and a smaller.

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

    def _parts(self, relaxed: Point) -> tuple[Point, Point] | None:
        """Return the faster and the smaller choice between which a fractional solution is, if there are two."""
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
        """Return the bytes of a whole choice, by the worth of a byte at each moment."""
        items = self.problem.items
        peak = max((i.peak_bytes[k] for i, k in zip(items, picked, strict=True) if i.peak_bytes), default=0.0)
        of_moments = zip(self.weights, self.moments, strict=True)
        rows = sum(float(w) * moment.n_bytes(self.problem, picked) for w, moment in of_moments if w)
        return peak + rows + float(self.weights @ np.array(self.unseen))

    def hull(self, prices: Sequence[float] = EFFORT.byte_prices, peak_share: float = 1.0) -> list[Choice]:
        """Return the fastest choice and smaller ones, without limit: the best at rising prices of a byte.

        At price p all bytes of the fastest choice cost p times its seconds.

        ``peak_share``: of the peak's bytes that have a price: where other blocks have the same peak, they share it.
        """
        self._bound_memory(math.inf)
        self._weigh_peak(peak_share)
        points = [self._at(0.0, EFFORT.hull_gap)]
        unit = max(1.0, points[0].seconds) / max(1.0, points[0].n_bytes)
        for price in prices:
            point = self._relaxed_at(price * unit)  # the largest share of each is good enough, and no search
            points += [point] if point is not None else []
        self._charge(0.0)
        self._weigh_peak(1.0)
        self.limit(self.problem.limit_bytes)
        ordered = sorted({p.picked: p for p in points}.values(), key=lambda p: (p.seconds, p.n_bytes))
        return [self.choice(replace(p, bound=p.seconds)) for p in ordered]

    def _at(self, price: float, gap: float = 0.0) -> Point:
        """Return the best choice at a price of a byte, in scaled seconds."""
        point = self._relaxed_at(price)
        return point if point is not None and point.whole else self.best(gap)

    def solve(self, gap: float = 0.0, worth_seconds: float = math.inf) -> Choice:
        """Return the cheapest strategies.

        Args:
            gap: relative distance from the proven bound at which the solver may stop; 0 requires the optimum. It is
                used where the relaxation is not whole: where memory counts, and where collectives take as long as
                what they hide behind.
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
                raise Beaten(self.least())
            return self._within(gap)
        start: Point | None = None
        if gap > 0.0 and self._relaxed is not None:
            _, beside = self.around(self._relaxed)
            start = beside if beside.most_bytes <= self.room else self._smaller(self._relaxed)
            if start is not None and (start.seconds - start.bound <= gap * start.seconds or self.is_rough(gap)):
                return self.choice(replace(start, gap=gap))
        if self._relaxed and self.choice(self._relaxed).bound >= worth_seconds:
            raise Beaten
        return self.choice(self.best(gap, start))

    def _within(self, gap: float) -> Choice:
        """Return the cheapest strategies without a limit, or those next to the relaxation's if within the gap.

        As many collectives as a pass can hide divide parameters between two equally good options to store them: whole
        choices are near, and branch and bound takes a hundred times as long to prove it.
        """
        if gap > 0.0 and self._relaxed is not None and self.lp.fullest is None:
            near = self._decided_in_turn(self._relaxed)
            if near.whole and near.seconds - self._relaxed.bound <= gap * near.seconds:
                return self.choice(replace(near, bound=self._relaxed.bound, gap=gap))
        return self.choice(self.best(gap if self.lp.fullest is not None or self.problem.overlaps else 0.0))

    def around(self, relaxed: Point) -> tuple[Point, Point]:
        """Return the whole choices that are best a little below and above the relaxation's price of a byte."""
        price = relaxed.byte_price
        self._bound_memory(math.inf)
        least = relaxed.seconds + price * self.room  # of seconds and bytes together, at the price

        def near(price: float, fewer: bool) -> Point:
            self._charge(price)
            point = self._below_peak(relaxed.picked)  # mostly the peak of both, and whole at once
            if point is not None and point.whole and (point.n_bytes < self.room) == fewer:
                if point.seconds + price * point.n_bytes <= least * (1 + 2e-3):
                    return point
            return self._at(price)

        faster, smaller = near(price * (1 - EFFORT.price_nudge), False), near(price * (1 + EFFORT.price_nudge), True)
        self._charge(0.0)
        self._bound_memory(self.room)
        return replace(faster, bound=relaxed.bound), replace(smaller, bound=relaxed.bound)

    def at_price(self, factor: float) -> Choice | None:
        """Return the best choice, whatever its bytes, at ``factor`` times the relaxation's price; None if not found."""
        self._relaxed = self._relaxed or self.relaxed()
        if self._relaxed is None or not self._relaxed.byte_price:
            return None
        self._bound_memory(math.inf)
        point = self._relaxed_at(factor * self._relaxed.byte_price)
        self._charge(0.0)
        self._bound_memory(self.room)
        return self.choice(replace(point, bound=self._relaxed.bound)) if point is not None and point.whole else None

    def _smaller(self, relaxed: Point) -> Point | None:
        """Return the first whole choice that fits at rising prices of a byte, from the relaxation's on."""
        fitting = None
        self._bound_memory(math.inf)
        for factor in EFFORT.price_steps:
            point = self._relaxed_at(factor * relaxed.byte_price)
            if point is not None and point.whole and point.most_bytes <= self.room:
                fitting = replace(point, bound=relaxed.bound)
                break
        self._charge(0.0)
        self._bound_memory(self.room)
        return fitting

    def best(self, gap: float, start: Point | None = None) -> Point:
        """Return the optimum of branch and bound, from a choice that is known already."""
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


@contextmanager
def _at_most(engine: Any, steps: int) -> Iterator[None]:
    """Stop branch and bound after `steps` steps.

    HiGHS asks after every relaxation, dive and node whether to go on: on one thread, the same program is asked as often
    wherever it runs. (Its own limits of nodes leave out the root, where most of the time goes.)
    """
    taken = 0

    def go_on(_kind: object, _message: str, _of_solver: object, answer: Any, _nothing: object) -> None:
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


def _pick(solver: str) -> str:
    if solver != "auto":
        return solver
    return "highs" if highspy is not None else "cbc"
