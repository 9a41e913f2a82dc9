"""The only file that knows a solver: a :class:`~autopar.planner.problem.Problem` becomes an integer program.

PuLP builds it; HiGHS solves it in process (highspy), CBC is the fallback. One thread and a fixed seed: same problem,
same answer. See :mod:`autopar.planner.problem` for the mathematics; the names here are the names there.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pulp

from autopar.errors import InfeasibleError
from autopar.planner.problem import Choice, Problem


def solve(problem: Problem, *, time_limit_seconds: float = 120.0, solver: str = "auto", gap: float = 0.0) -> Choice:
    """The cheapest strategies.

    Args:
        time_limit_seconds: after it, the best solution so far is returned with its gap.
        gap: relative distance from the proven bound at which the solver may stop; 0 asks for the optimum. It is used
            only where a memory limit binds, since the problem without one is easy.
        solver: ``highs``, ``cbc`` or ``auto`` (HiGHS if highspy is installed).

    Raises:
        InfeasibleError: no choice satisfies the memory limit and the reach of reshards.
    """
    name = _pick(solver)
    if name != "highs" or gap == 0.0 or problem.limit_bytes is None:
        return _solve_at_once(problem, name, time_limit_seconds, gap)
    return _solve_by_prices(problem, time_limit_seconds, gap)


def _solve_at_once(problem: Problem, name: str, time_limit_seconds: float, gap: float) -> Choice:
    model, x, _, scale = _build(problem)
    if name == "highs":
        backend = _highs(time_limit_seconds, gap)
    else:
        backend = _cbc()(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=1)
    model.solve(backend)
    values = [[v.varValue for v in row] for row in x]
    if pulp.LpStatus[model.status] == "Infeasible" or any(v is None for row in values for v in row):
        raise InfeasibleError("no choice of strategies satisfies the constraints")
    objective = pulp.value(model.objective) / scale
    bound = objective
    proven = pulp.LpStatus[model.status] == "Optimal"
    if name == "highs":
        info = model.solverModel.getInfo()
        if abs(info.mip_dual_bound) < 1e300:
            bound = min(objective, info.mip_dual_bound / scale)
        proven = model.solverModel.getModelStatus().name == "kOptimal"
    return _choice(problem, _picked(values), objective, bound, proven, name)


def _solve_by_prices(problem: Problem, time_limit_seconds: float, gap: float) -> Choice:
    r"""Lagrangian relaxation of the memory limit: bytes get a price, and the easy problem without limit is solved.

    For a price p of a byte, ``L(p) = min seconds + p (bytes - limit)`` is a lower bound, and the minimiser is a good
    choice. Two choices, one within the limit and one beyond, give the next price, at which both cost the same; when
    neither is beaten there, p maximises L. (Everett, Operations Research 11, 1963; Handler and Zang, Networks 10,
    1980.) What is left of the gap is closed by branch and bound on the problem with its limit, from the best choice.
    """
    limit = problem.limit_bytes
    assert limit is not None
    room = limit - problem.fixed_bytes
    model, x, common, scale = _build(replace(problem, limit_bytes=None))
    backend = _highs(time_limit_seconds, 0.0)
    model.solve(backend)
    if pulp.LpStatus[model.status] == "Infeasible":
        raise InfeasibleError("no choice of strategies satisfies the constraints")
    engine = model.solverModel
    flat = [(v.index, cost * scale, n) for row, item in zip(x, problem.items, strict=True)
            for v, cost, n in zip(row, item.seconds, item.n_bytes, strict=True)]  # fmt: skip
    flat.extend((v.index, 0.0, n) for v, n in common)
    columns = np.array([f[0] for f in flat], dtype=np.int32)
    seconds, n_bytes = np.array([f[1] for f in flat]), np.array([f[2] for f in flat])

    def at(price: float) -> tuple[tuple[int, ...], float, float]:
        """``(choice, seconds, bytes)`` at a price of a byte, in scaled seconds."""
        engine.changeColsCost(len(columns), columns, seconds + price * n_bytes)
        engine.run()
        solution = np.asarray(engine.getSolution().col_value)
        values = [[solution[v.index] for v in row] for row in x]
        picked = _picked(values)
        total = float(solution[columns] @ n_bytes)
        return picked, engine.getObjectiveValue() - price * total, total

    fast = at(0.0)
    if fast[2] <= room:
        return _choice(problem, fast[0], fast[1] / scale, fast[1] / scale, True, "highs")
    small = at(1e3 * max(1.0, fast[1]) / max(1.0, fast[2]))
    if small[2] > room:
        small = at(1e6 * max(1.0, fast[1]) / max(1.0, fast[2]))
    if small[2] > room:
        raise InfeasibleError("no choice of strategies satisfies the memory limit")
    best, bound = small, fast[1]
    for _ in range(40):
        price = (small[1] - fast[1]) / (fast[2] - small[2])
        here = at(price)
        bound = max(bound, here[1] + price * (here[2] - room))
        if here[2] <= room and here[1] < best[1]:
            best = here
        if here[1] + price * here[2] >= small[1] + price * small[2] - 1e-9 * abs(small[1]):
            break
        if best[1] - bound <= gap * best[1]:
            break
        small, fast = (here, fast) if here[2] <= room else (small, here)
    proven = best[1] - bound <= gap * best[1]
    if not proven:
        best, bound, proven = _close(engine, x, columns, seconds, n_bytes, room, best, bound, time_limit_seconds, gap)
    return _choice(problem, best[0], best[1] / scale, bound / scale, proven, "highs")


def _close(
    engine: Any, x: list[list[pulp.LpVariable]], columns: Any, seconds: Any, n_bytes: Any, room: float,
    best: tuple[tuple[int, ...], float, float], bound: float, time_limit_seconds: float, gap: float,
) -> tuple[tuple[tuple[int, ...], float, float], float, bool]:  # fmt: skip
    """Branch and bound with the limit as a constraint, started at the best choice known."""
    unit = max(room, 1.0)
    engine.changeColsCost(len(columns), columns, seconds)
    used = np.nonzero(n_bytes)[0]
    engine.addRow(-1e30, 1.0, len(used), columns[used], n_bytes[used] / unit)
    engine.setOptionValue("mip_rel_gap", gap)
    engine.setOptionValue("objective_bound", best[1])
    engine.setOptionValue("time_limit", time_limit_seconds)
    engine.run()
    info = engine.getInfo()
    bound = max(bound, min(info.mip_dual_bound, best[1]))
    if info.primal_solution_status == 2 and info.objective_function_value < best[1]:
        solution = np.asarray(engine.getSolution().col_value)
        picked = _picked([[solution[v.index] for v in row] for row in x])
        best = (picked, info.objective_function_value, float(solution[columns] @ n_bytes))
    return best, bound, best[1] - bound <= max(gap, 1e-9) * best[1]


def _choice(
    problem: Problem, picked: tuple[int, ...], objective: float, bound: float, proven: bool, name: str
) -> Choice:
    status = "time limit"
    if proven:
        status = "optimal" if objective - bound <= 1e-6 * abs(objective) else "within gap"
    return Choice(picked, objective + problem.fixed_seconds, bound + problem.fixed_seconds, status, name)


def _picked(values: Sequence[Sequence[float]]) -> tuple[int, ...]:
    return tuple(row.index(max(row)) for row in map(list, values))


def _highs(time_limit_seconds: float, gap: float) -> Any:
    return pulp.HiGHS(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=1, random_seed=0)


def _pick(solver: str) -> str:
    if solver != "auto":
        return solver
    return "highs" if pulp.HiGHS(msg=False).available() else "cbc"


def _cbc() -> type:
    """CBC as its own program (``pulp[cbc]``) if it is installed, else the one that PuLP 3 brings along."""
    if pulp.COIN_CMD(msg=False).available():
        return pulp.COIN_CMD
    warnings.filterwarnings("ignore", message="PULP_CBC_CMD is deprecated")
    return pulp.PULP_CBC_CMD


def _build(
    problem: Problem,
) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]], list[tuple[pulp.LpVariable, float]], float]:
    """The model, ``x`` by item and strategy, other variables that stand for bytes, and the scale of seconds."""
    model = pulp.LpProblem("autopar", pulp.LpMinimize)
    # Solvers have absolute tolerances, so seconds are scaled to about a thousand in all. The scale is a power of two,
    # and costs are rounded to multiples of 2**-20 (one part in 10**9 of the total), so that their sums are exact.
    total = sum(min(i.seconds) for i in problem.items) or max((max(i.seconds) for i in problem.items), default=0.0)
    scale = 2.0 ** round(math.log2(1e3 / total)) if total > 0 else 1.0

    def scaled(value: float) -> float:
        return round(value * scale * 2**20) / 2**20

    cost: list[tuple[pulp.LpVariable, float]] = []
    x: list[list[pulp.LpVariable]] = []
    for i, item in enumerate(problem.items):
        row = [model.add_variable(f"x{i}_{s}", 0, 1, cat=pulp.LpInteger) for s in range(len(item.seconds))]
        x.append(row)
        cost.extend((v, scaled(c)) for v, c in zip(row, item.seconds, strict=True) if c)
        model.addConstraint(
            pulp.LpConstraint(pulp.LpAffineExpression([(v, 1) for v in row]), pulp.LpConstraintEQ, f"one{i}", 1)
        )
    for t, tensor in enumerate(problem.tensors):
        shared = len(tensor.consumers) > 1
        y: list[pulp.LpVariable] = []
        for c, (consumer, wanted) in enumerate(tensor.consumers):
            flow = [model.add_variable(f"f{t}_{c}_{a}", 0) for a in range(len(tensor.steps))]
            if not shared:
                cost.extend((v, scaled(step[2])) for v, step in zip(flow, tensor.steps, strict=True) if step[2])
            balance: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
            for v, (src, dst, _) in zip(flow, tensor.steps, strict=True):
                balance[src].append((v, -1))
                balance[dst].append((v, 1))
            for s, state in enumerate(tensor.made):
                balance[state].append((x[tensor.producer][s], 1))
            for s, state in enumerate(wanted):
                balance[state].append((x[consumer][s], -1))
            # one balance follows from the others, since as much is made as wanted; HiGHS 1.15 was seen to loop for
            # ever in presolve when it was there too
            for state, terms in list(balance.items())[:-1]:
                model.addConstraint(
                    pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, f"b{t}_{c}_{state}", 0)
                )
            if shared:
                if not y:
                    y = [model.add_variable(f"y{t}_{a}", 0) for a in range(len(tensor.steps))]
                    cost.extend((v, scaled(step[2])) for v, step in zip(y, tensor.steps, strict=True) if step[2])
                for a, (v, f) in enumerate(zip(y, flow, strict=True)):
                    if tensor.steps[a][2]:
                        model.addConstraint(
                            pulp.LpConstraint(
                                pulp.LpAffineExpression([(v, 1), (f, -1)]), pulp.LpConstraintGE, f"y{t}_{c}_{a}", 0
                            )
                        )
    common: list[tuple[pulp.LpVariable, float]] = []
    largest = max((max(item.peak_bytes) for item in problem.items if item.peak_bytes), default=0.0)
    if largest:
        peak = model.add_variable("peak", 0)
        common.append((peak, largest))
        for i, (row, item) in enumerate(zip(x, problem.items, strict=True)):
            if any(item.peak_bytes):
                terms = [(peak, 1.0), *((v, -b / largest) for v, b in zip(row, item.peak_bytes, strict=True) if b)]
                model.addConstraint(
                    pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintGE, f"peak{i}", 0)
                )
    for h, held in enumerate(problem.held):
        kept = model.add_variable(f"h{h}", 0)
        common.append((kept, held.n_bytes))
        if held.seconds:
            cost.append((kept, scaled(held.seconds)))
        for i, rows in held.users:
            terms = [(kept, 1), *((x[i][s], -1) for s in rows)]
            model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintGE, f"h{h}_{i}", 0))
    if problem.limit_bytes is not None:
        unit = max(problem.limit_bytes, 1.0)
        terms = [
            (v, b / unit)
            for row, item in zip(x, problem.items, strict=True)
            for v, b in zip(row, item.n_bytes, strict=True)
            if b
        ]
        terms.extend((v, b / unit) for v, b in common)
        right = (problem.limit_bytes - problem.fixed_bytes) / unit
        model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintLE, "memory", right))
    model.setObjective(pulp.LpAffineExpression(cost))
    return model, x, common, scale
