"""The best ways to cut: over schedules and microbatch counts, a narrow search first and then the exact one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .dynamic import solve
from .estimate import bounded, evaluate
from .failure import explain
from .fill import Fill, fill_of
from .table import INF, Table, table, timed
from .words import Candidate, Choice, NothingFits, Problem

NARROW = (64, 512)
"""Labels for each block in the first passes, which find good plans to measure the rest by."""
FAR = 0.8
"""Where the first pass leaves the bound below this share of the best plan, plans of equal sizes are tried too."""
ALL_DEPTHS = 12
"""Up to so many stages, a schedule that needs a search for each number of stages gets all of them; beyond, the
GUIDED numbers that are best for 1F1B."""
GUIDED = 3
WIDTH = 1024
"""Labels for each block in the exact pass. Where more would be needed the result says so by its lower bound."""


@dataclass(frozen=True)
class _Case:
    """One search: `n_stages` None for schedules that need one for all numbers of stages."""

    table: Table
    fill: Fill
    m: int
    n_stages: int | None


def stage(
    problem: Problem, n_microbatches: int, schedule: str | Fill = "1f1b", *, n_candidates: int = 1, width: int = WIDTH
) -> list[Candidate]:
    """The best cut into every number of stages; of these the `n_candidates` best, best first.

    Raises:
        ValueError: an unknown schedule, or a count below 1.
        NothingFits: there is no way, with the reason.
    """
    return search({n_microbatches: problem}, [schedule], n_candidates=n_candidates, width=width)


def search(
    problems: Mapping[int, Problem] | Callable[[int], Problem],
    schedules: Sequence[str | Fill] = ("1f1b",),
    microbatches: Sequence[int] | None = None,
    *,
    n_candidates: int = 1,
    width: int = WIDTH,
) -> list[Candidate]:
    """The best of all schedules, microbatch counts and numbers of stages: one candidate each, `n_candidates` in all.

    `problems` gives the problem of a step with m microbatches: costs are of one microbatch, whose size is that of the
    batch divided by m. As a function it needs `microbatches`. Each candidate is the optimum for its schedule, m and
    number of stages; `lower_bound_seconds` below the first one's `seconds` means that `width` was reached, and by how
    much its optimality is unproved. Raises as `stage` does.
    """
    if callable(problems):
        if microbatches is None:
            raise ValueError("a function of problems needs a list of microbatches")
        problems = {m: problems(m) for m in microbatches}
    fills = [fill_of(s) for s in schedules]
    if min(problems, default=0) < 1 or n_candidates < 1 or width < 1 or not fills:
        raise ValueError(
            f"microbatches {sorted(problems)}, {len(fills)} schedules, {n_candidates} candidates, width {width}: "
            "all must be at least 1"
        )
    cases = list(_cases(problems, fills))
    pool: dict[tuple[int, int], tuple[float, tuple[Choice, ...]]] = {}  # (case, stages) -> the best

    def limit() -> float:
        values = sorted(v for v, _ in pool.values())
        return values[n_candidates - 1] if len(values) >= n_candidates else INF

    def run(i: int, width: int, only: NDArray[np.bool_] | None = None) -> None:
        case = cases[i]
        times = timed(case.table, case.fill, case.m, case.n_stages)
        found = solve(case.table, times, case.fill, case.m, case.n_stages, limit(), width, only)
        for n, best in found.best.items():
            pool[i, n] = min(pool.get((i, n), best), best, key=lambda b: b[0])
        if only is None:
            bound_of[i] = found.bound_seconds

    # A wide pass is spared for cases that a narrower one, or the bound before any pass, shows to be behind or done.
    bound_of = [0.0] * len(cases)
    for pass_width in [*(w for w in NARROW if w < width), width]:
        for i, case in enumerate(cases):
            if bound_of[i] >= limit():
                continue
            run(i, pass_width)
            if pass_width == NARROW[0] and bound_of[i] < FAR * limit():
                for only in _equal_sizes(case.table):
                    run(i, pass_width, only)
    if not pool:
        raise explain(problems, fills)
    chosen = sorted(((v, cases[i].m, n, i, c) for (i, n), (v, c) in pool.items()), key=lambda x: x[:4])
    bound = min([chosen[0][0], *bound_of])
    return [bounded(evaluate(problems[m], cases[i].fill, m, c), bound) for _, m, _, i, c in chosen[:n_candidates]]


def _cases(problems: Mapping[int, Problem], fills: Sequence[Fill]) -> Iterator[_Case]:
    for m, problem in sorted(problems.items()):
        own = table(problem)
        depths: list[int] | None = None
        for fill in fills:
            if fill.by_distance:
                yield _Case(own, fill, m, None)
                continue
            depths = depths or _depths(own, m)
            for n in depths:
                if m >= fill.least(n):
                    yield _Case(own, fill, m, n)


def _depths(own: Table, m: int) -> list[int]:
    """Numbers of stages to search: the best ones of 1F1B, by a narrow pass."""
    limit = own.problem.stage_limit
    if limit <= ALL_DEPTHS:
        return list(range(1, limit + 1))
    guide = fill_of("1f1b")
    best = solve(own, timed(own, guide, m, None), guide, m, None, INF, NARROW[0]).best
    return sorted(sorted(best, key=lambda n: best[n][0])[:GUIDED])


def _equal_sizes(own: Table) -> Iterator[NDArray[np.bool_]]:
    """Rows of each size, whatever the device type."""
    sizes = np.array([s.n_devices for s in own.problem.submeshes])[own.submesh]
    return (sizes == size for size in np.unique(sizes))


__all__ = ["NothingFits", "search", "stage"]
