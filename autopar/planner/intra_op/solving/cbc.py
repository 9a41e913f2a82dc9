"""CBC, through PuLP, in the place of HiGHS: a second solver of the same programs, with the same methods."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pulp

from autopar.planner.effort import EFFORT
from autopar.planner.intra_op.building.integer_program import Choice, MomentBytes, NoChoice, Problem
from autopar.planner.intra_op.solving.program_matrix import Matrix, matrix

for _solver in vars(pulp.apis).values():
    # PuLP keeps the errors of solvers that are not installed, and with them the frames of whoever imported this module
    # first: a model in one of their variables would never be freed.
    if isinstance(_error := getattr(_solver, "err", None), BaseException):
        _error.__traceback__ = None


class ByCbc:
    """A problem for CBC: solved at once, whatever it is."""

    def __init__(self, problem: Problem, cpu_seconds: float) -> None:
        self.problem, self.cpu_seconds = problem, cpu_seconds

    def limit(self, n_bytes: float | None) -> None:
        """Set the limit, as :class:`~.highs.HighsProgram` does."""
        if self.problem.limit_bytes is not None:
            self.problem = replace(self.problem, limit_bytes=n_bytes)

    def nearest(self) -> Choice:
        """Return a solution within a wide gap."""
        return self.solve(EFFORT.rough_gap)

    def add(self, moment: MomentBytes) -> None:
        """Add a moment that must fit."""
        self.problem = replace(self.problem, moments=(*self.problem.moments, moment))

    def lower(self, _number: int, n_bytes: float) -> None:
        """Lower the limit of all moments."""
        if self.problem.limit_bytes is not None:
            self.limit(self.problem.limit_bytes - n_bytes)

    def is_rough(self, _gap: float) -> bool:
        """Return False: CBC gives no choices near the relaxation."""
        return False

    @property
    def end(self) -> None:
        """The end of the simplex method, which CBC does not give."""
        return None

    def begin_at(self, end: object) -> None:
        """Ignore where an earlier program ended."""

    def at_price(self, _factor: float) -> Choice | None:
        """Return None: CBC prices no bytes."""
        return None

    def whole(self) -> Choice | None:
        """Return None: nothing is known before the problem is solved."""
        return None

    def least(self) -> float:
        """Return 0: nothing is known before the problem is solved."""
        return 0.0

    def fewest_bytes(self) -> None:
        """Return None: CBC gives no relaxation."""
        return None

    def pairs(self) -> Iterator[tuple[Choice, Choice]]:
        """Yield nothing: CBC gives no relaxation."""
        return iter(())

    def hull(self, _prices: Sequence[float] = EFFORT.byte_prices, _peak_share: float = 1.0) -> list[Choice]:
        """Return the fastest choice alone."""
        self.limit(None)
        return [self.solve()]

    def solve(self, gap: float = 0.0, _worth_seconds: float = math.inf) -> Choice:
        """Solve the program, as :meth:`~.highs.HighsProgram.solve` does."""
        problem = self.problem
        lp = matrix(problem)
        model, columns = _pulp(lp)
        model.solve(_cbc()(msg=False, timeLimit=self.cpu_seconds, timeMode="cpu", gapRel=gap, threads=1))
        values = [[columns[v].varValue for v in picks] for picks in lp.picks]
        if pulp.LpStatus[model.status] == "Infeasible" or any(v is None for row in values for v in row):
            raise NoChoice("no choice of strategies satisfies the constraints")
        objective = pulp.value(model.objective) / lp.scale
        picked = tuple(row.index(max(row)) for row in values)
        proven = model.sol_status == pulp.LpSolutionOptimal  # where time ran out its status is that of an optimum, too
        exact = gap == 0.0 or problem.limit_bytes is None
        status = "time limit" if not proven else "optimal" if exact else "within gap"
        if not proven:
            bound = min(objective, self._relaxed(model) / lp.scale)
        else:
            bound = objective if exact else objective * (1 - gap)
        return Choice(picked, objective, bound, status, "cbc", binds=problem.limit_bytes is not None)

    def _relaxed(self, model: pulp.LpProblem) -> float:
        """Return the objective of the relaxation, which no choice is below; 0 if that takes too long."""
        model.solve(_cbc()(msg=False, timeLimit=self.cpu_seconds, timeMode="cpu", threads=1, mip=False))
        return float(pulp.value(model.objective)) if model.sol_status == pulp.LpSolutionOptimal else 0.0


def _cbc() -> type:
    """Return CBC as its own program (``pulp[cbc]``) if it is installed, else the one that PuLP 3 includes."""
    if pulp.COIN_CMD(msg=False).available():
        return pulp.COIN_CMD
    warnings.filterwarnings("ignore", message="PULP_CBC_CMD is deprecated")
    return pulp.PULP_CBC_CMD


def _pulp(lp: Matrix) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return the program in PuLP, with its columns."""
    model = pulp.LpProblem("autopar", pulp.LpMinimize)
    columns = [
        model.add_variable(f"v{k}", 0, None if up == math.inf else up, pulp.LpInteger if whole else pulp.LpContinuous)
        for k, (up, whole) in enumerate(zip(lp.upper, lp.whole, strict=True))
    ]
    for r, (low, high) in enumerate(zip(lp.low, lp.high, strict=True)):
        entries = range(lp.start[r], lp.start[r + 1])
        terms = pulp.LpAffineExpression([(columns[lp.columns[e]], lp.values[e]) for e in entries])
        sense = pulp.LpConstraintEQ if low == high else pulp.LpConstraintLE if low == -math.inf else pulp.LpConstraintGE
        model.addConstraint(pulp.LpConstraint(terms, sense, f"r{r}", high if low == -math.inf else low))
    model.setObjective(pulp.LpAffineExpression([(v, c) for v, c in zip(columns, lp.cost, strict=True) if c]))
    return model, columns
