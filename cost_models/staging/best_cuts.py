"""The best cuts: a narrow search first, then the exact one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules.schedule_kinds import Fill, fill_of

from .dynamic import solve
from .estimate import bounded, evaluate
from .failure import explain
from .table import INF, StageTable, table, timed
from .words import NothingFits, StageChoice, StagingEstimate, StagingProblem

NARROW = (64, 512)
"""Labels for each block in the first passes, which find good plans to measure the rest by."""
FAR = 0.8
"""Where the first pass leaves the bound below this share of the best plan, plans of equal sizes are tried too."""
ALL_DEPTHS = 12
"""Up to so many stages, a schedule that needs a search for each number of stages gets all of them."""
GUIDED = 3
"""Numbers of stages that are searched where a narrow pass of 1F1B has shown which are good."""
WIDTH = 1024
"""Labels for each block in the exact pass. Where more would be needed the result says so by its lower bound."""


def stage(
    problem: StagingProblem, n_microbatches: int, schedule: str | Fill = "1f1b", *, n_candidates: int = 1,
    width: int = WIDTH,
) -> list[StagingEstimate]:  # fmt: skip
    """Return the `n_candidates` best of the best cuts into every number of stages, best first.

    `problem` is that of a step with `n_microbatches`: costs are of one of them. Each candidate is the optimum for
    its number of stages; `lower_bound_seconds` below the first one's `seconds` means that `width` was reached, and by
    how much its optimality is unproved.
    """
    fill = fill_of(schedule)
    if min(n_microbatches, n_candidates, width) < 1:
        raise ValueError(
            f"{n_microbatches} microbatches, {n_candidates} candidates, width {width}: all must be at least 1"
        )
    whole = table(problem)
    depths = list(_depths(whole, fill, n_microbatches))
    best: dict[int, tuple[float, tuple[StageChoice, ...]]] = {}  # by number of stages

    def limit() -> float:
        seconds = sorted(value for value, _ in best.values())
        return seconds[n_candidates - 1] if len(seconds) >= n_candidates else INF

    def run(n_stages: int | None, width: int, only: NDArray[np.bool_] | None = None) -> float:
        """Take in what is found for a number of stages; what was not found takes at least so long."""
        times = timed(whole, fill, n_microbatches, n_stages)
        solved = solve(whole, times, fill, n_microbatches, n_stages, limit(), width, only)
        for n, cut in solved.best.items():
            best[n] = min(best.get(n, cut), cut, key=lambda c: c[0])
        return solved.bound_seconds

    # A wide pass is spared for depths that a narrower one, or the bound before any pass, shows to be behind or done.
    bound_of = dict.fromkeys(depths, 0.0)
    for pass_width in [*(w for w in NARROW if w < width), width]:
        for depth in depths:
            if bound_of[depth] >= limit():
                continue
            bound_of[depth] = run(depth, pass_width)
            if pass_width == NARROW[0] and bound_of[depth] < FAR * limit():
                for only in _equal_sizes(whole):
                    run(depth, pass_width, only)
    if not best:
        raise explain(problem, n_microbatches, fill)
    chosen = sorted((seconds, n, choices) for n, (seconds, choices) in best.items())
    bound = min([chosen[0][0], *bound_of.values()])
    return [bounded(evaluate(problem, fill, n_microbatches, c), bound) for _, _, c in chosen[:n_candidates]]


def _depths(whole: StageTable, fill: Fill, m: int) -> Iterator[int | None]:
    """Yield the numbers of stages that need a search of their own; None if one search finds them all."""
    limit = whole.problem.stage_limit
    if fill.by_distance:
        yield None
        return
    depths = list(range(1, limit + 1))
    if limit > ALL_DEPTHS:  # the best ones of 1F1B, by a narrow pass
        guide = fill_of("1f1b")
        best = solve(whole, timed(whole, guide, m, None), guide, m, None, INF, NARROW[0]).best
        depths = sorted(sorted(best, key=lambda n: best[n][0])[:GUIDED])
    yield from (n for n in depths if fill.allows(n, m))


def _equal_sizes(whole: StageTable) -> Iterator[NDArray[np.bool_]]:
    """Yield the rows of each size, whatever the device type."""
    sizes = np.array([s.n_devices for s in whole.problem.submeshes])[whole.submesh]
    return (sizes == size for size in np.unique(sizes))


__all__ = ["NothingFits", "stage"]
