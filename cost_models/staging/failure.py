"""Explanation why nothing fits: which limit is in the way, and by how much the nearest attempt misses it."""

from __future__ import annotations

from dataclasses import replace

from cost_models.schedules.schedule_kinds import Fill

from .dynamic import solve
from .estimate import evaluate
from .table import INF, StageTable, table, timed
from .words import NothingFits, StagingEstimate, StagingProblem

ATTEMPT_WIDTH = 1024
"""Labels for each block: an attempt is there to be shown, not to be the best."""
PRECISION = 1e-3
"""The precision of the memory that would be needed."""
STEP, NEAR, LONG_STEP = 4, 100, 1000
"""By what the memory is multiplied until something fits: by little up to NEAR times what there is, then by much."""
HOPELESS = 1e12
"""Times the memory there is; where nothing fits in that, memory is not what is in the way."""
SHOWN = 8
"""Blocks that a message lists."""


def explain(problem: StagingProblem, n_microbatches: int, fill: Fill) -> NothingFits:
    """Return the exception to raise when a search came back empty."""
    whole = table(problem)
    lacking = _lacking(whole)
    if lacking:
        return NothingFits(lacking)
    if not fill.allows(1, n_microbatches):
        return NothingFits(f"{fill.label} does not allow {n_microbatches} microbatches on one group of devices")
    attempt = _least_memory(whole, fill, n_microbatches)
    if attempt is None:
        return NothingFits(_counts(problem))
    worst = max(attempt.stages, key=lambda s: s.needed_bytes / s.memory_bytes)
    excess = max(s.needed_bytes - s.memory_bytes for s in attempt.stages)
    c = worst.choice
    advice = "" if problem.recompute != "never" else ", or allow recomputing"
    return NothingFits(
        f"memory: the nearest attempt ({len(attempt.stages)} stages, {attempt.schedule}, {attempt.n_microbatches} "
        f"microbatches) needs {worst.needed_bytes / 1e9:.4g} GB on each device of blocks {c.first}-{c.last} on "
        f"{c.submesh}, which has {worst.memory_bytes / 1e9:.4g} GB: {excess / 1e9:.4g} GB too much, with "
        f"{worst.in_flight:g} microbatches in flight and {c.n_recomputed} of {c.last - c.first + 1} blocks recomputed; "
        f"use smaller microbatches, more devices or more stages{advice}",
        excess,
    )


def _lacking(table: StageTable) -> str:
    """Return a message about blocks for which no stage has a cost at all."""
    n = table.problem.n_blocks
    possible = [False] * n
    for (first, last), run in table.run_of.items():
        if table.rows_of[run] < table.rows_of[run + 1]:
            possible[first : last + 1] = [True] * (last - first + 1)
    missing = [i for i in range(n) if not possible[i]]
    if not missing:
        return ""
    names = ", ".join(map(str, missing[:SHOWN])) + (" ..." if len(missing) > SHOWN else "")
    return f"no submesh can run blocks {names} ({len(missing)} of {n}): every cost is None"


def _attempt(table: StageTable, fill: Fill, m: int, factor: float) -> StagingEstimate | None:
    """Return any plan with `factor` times the memory."""
    counts = [None] if fill.by_distance else range(1, table.problem.stage_limit + 1)
    cuts = []
    for n in counts:
        if n is not None and not fill.allows(n, m):
            continue
        best = solve(table, timed(table, fill, m, n, factor), fill, m, n, INF, ATTEMPT_WIDTH).best
        cuts += list(best.values())
    if not cuts:
        return None
    return evaluate(table.problem, fill, m, min(cuts, key=lambda f: f[0])[1])


def _least_memory(table: StageTable, fill: Fill, m: int) -> StagingEstimate | None:
    """Return a plan that fits in nearly the least multiple of the memory; None if none fits in any."""
    low, high = 1.0, 2.0
    best = None
    while best is None:
        best = _attempt(table, fill, m, high)
        if best is None:
            if high > HOPELESS:
                return None
            low, high = high, high * (STEP if high < NEAR else LONG_STEP)
    while high > low * (1 + PRECISION):
        # What an attempt needs is often less than it was allowed.
        high = min(high, max(s.needed_bytes / s.memory_bytes for s in best.stages))
        middle = (low + high) / 2
        attempt = _attempt(table, fill, m, middle)
        if attempt is None:
            low = middle
        else:
            best, high = attempt, middle
    return best


def _counts(problem: StagingProblem) -> str:
    """Return a message about counts that do not go together, memory aside."""
    devices = " and ".join(f"{n} {t}" for t, n in problem.devices.items())
    if problem.all_devices:
        with_idle = replace(problem, all_devices=False)
        sizes = ", ".join(str(n) for n in sorted({s.n_devices for s in problem.submeshes}))
        return (
            f"devices: no at most {problem.stage_limit} stages on submeshes of {sizes} devices use all of {devices} "
            f"({'fewer would do' if with_idle.stage_limit else ''}); allow idle devices or more submeshes"
        )
    return (
        f"counts: {problem.n_blocks} blocks cannot be cut into at most {problem.stage_limit} stages on {devices}: "
        "the runs of blocks that have a cost do not join up, or their submeshes are too large together"
    )
