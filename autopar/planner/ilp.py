"""The only file that knows a solver: a :class:`~autopar.planner.problem.Problem` becomes an integer program.

PuLP builds it; HiGHS solves it in process (highspy), CBC is the fallback. One thread and a fixed seed: same problem,
same answer. See :mod:`autopar.planner.problem` for the mathematics; the names here are the names there.
"""

from __future__ import annotations

import warnings
from collections import defaultdict

import pulp

from autopar.errors import InfeasibleError
from autopar.planner.problem import Choice, Problem


def solve(
    problem: Problem, *, time_limit_seconds: float = 120.0, solver: str = "auto", gap: float = 0.0
) -> Choice:
    """The cheapest strategies.

    Args:
        time_limit_seconds: after it, the best solution so far is returned with its gap.
        gap: relative distance from the proven bound at which the solver may stop; 0 asks for the optimum.
        solver: ``highs``, ``cbc`` or ``auto`` (HiGHS if highspy is installed).

    Raises:
        InfeasibleError: no choice satisfies the memory limit and the reach of reshards.
    """
    model, x, scale = _build(problem)
    name = _pick(solver)
    if name == "highs":
        backend = pulp.HiGHS(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=1, random_seed=0)
    else:
        backend = _cbc()(msg=False, timeLimit=time_limit_seconds, gapRel=gap, threads=1)
    model.solve(backend)
    status = pulp.LpStatus[model.status]
    values = [[v.varValue for v in row] for row in x]
    if status == "Infeasible" or any(v is None for row in values for v in row):
        raise InfeasibleError("no choice of strategies satisfies the constraints")
    picked = tuple(max(range(len(row)), key=lambda s, row=row: (row[s], -s)) for row in values)
    objective = pulp.value(model.objective) / scale
    bound = objective
    proven = status == "Optimal"
    if name == "highs" and getattr(model, "solverModel", None) is not None:
        info = model.solverModel.getInfo()
        if abs(info.mip_dual_bound) < 1e300:
            bound = min(objective, info.mip_dual_bound / scale)
        proven = model.solverModel.getModelStatus().name == "kOptimal"
    return Choice(picked, objective + problem.fixed_seconds, bound + problem.fixed_seconds,
                  "optimal" if proven else "time limit", name)  # fmt: skip


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


def _build(problem: Problem) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]], float]:
    model = pulp.LpProblem("autopar", pulp.LpMinimize)
    # seconds are scaled so that costs are near one: solvers have absolute tolerances
    total = sum(min(i.seconds) for i in problem.items) or max((max(i.seconds) for i in problem.items), default=0.0)
    scale = 1e3 / total if total > 0 else 1.0
    cost: list[tuple[pulp.LpVariable, float]] = []
    x: list[list[pulp.LpVariable]] = []
    for i, item in enumerate(problem.items):
        row = [model.add_variable(f"x{i}_{s}", 0, 1, cat=pulp.LpInteger) for s in range(len(item.seconds))]
        x.append(row)
        cost.extend((v, c * scale) for v, c in zip(row, item.seconds, strict=True) if c)
        model.addConstraint(
            pulp.LpConstraint(pulp.LpAffineExpression([(v, 1) for v in row]), pulp.LpConstraintEQ, f"one{i}", 1)
        )
    for t, tensor in enumerate(problem.tensors):
        shared = len(tensor.consumers) > 1
        y: list[pulp.LpVariable] = []
        for c, (consumer, wanted) in enumerate(tensor.consumers):
            flow = [model.add_variable(f"f{t}_{c}_{a}", 0) for a in range(len(tensor.steps))]
            if not shared:
                cost.extend((v, step[2] * scale) for v, step in zip(flow, tensor.steps, strict=True) if step[2])
            balance: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
            for v, (src, dst, _) in zip(flow, tensor.steps, strict=True):
                balance[src].append((v, -1))
                balance[dst].append((v, 1))
            for s, state in enumerate(tensor.made):
                balance[state].append((x[tensor.producer][s], 1))
            for s, state in enumerate(wanted):
                balance[state].append((x[consumer][s], -1))
            for state, terms in balance.items():
                model.addConstraint(
                    pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, f"b{t}_{c}_{state}", 0)
                )
            if shared:
                if not y:
                    y = [model.add_variable(f"y{t}_{a}", 0) for a in range(len(tensor.steps))]
                    cost.extend((v, step[2] * scale) for v, step in zip(y, tensor.steps, strict=True) if step[2])
                for a, (v, f) in enumerate(zip(y, flow, strict=True)):
                    if tensor.steps[a][2]:
                        model.addConstraint(
                            pulp.LpConstraint(
                                pulp.LpAffineExpression([(v, 1), (f, -1)]), pulp.LpConstraintGE, f"y{t}_{c}_{a}", 0
                            )
                        )
    if problem.limit_bytes is not None:
        unit = max(problem.limit_bytes, 1.0)
        terms = [
            (v, b / unit)
            for row, item in zip(x, problem.items, strict=True)
            for v, b in zip(row, item.n_bytes, strict=True)
            if b
        ]
        right = (problem.limit_bytes - problem.fixed_bytes) / unit
        model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintLE, "memory", right))
    model.setObjective(pulp.LpAffineExpression(cost))
    return model, x, scale
