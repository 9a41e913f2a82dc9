"""Every way to cut, one after the other: what the dynamic program is tested against. For small problems only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

from cost_models.schedules import Fill, fill_of
from cost_models.staging import StageChoice, StagingEstimate, StagingProblem, evaluate


def exhaustive(problem: StagingProblem, n_microbatches: int, schedule: str | Fill = "1f1b") -> list[StagingEstimate]:
    """The best candidate of every number of stages that has one, best first; empty if nothing fits."""
    fill = fill_of(schedule)
    problem = replace(problem, cost=cache(problem.cost), transfer=cache(problem.transfer))
    best: dict[int, StagingEstimate] = {}
    for n in range(1, problem.stage_limit + 1):
        if not fill.allows(n, n_microbatches):
            continue
        for cuts in combinations(range(1, problem.n_blocks), n - 1):
            ends = zip((0, *cuts), (*cuts, problem.n_blocks))
            options = [
                [c for c in _choices(problem, a, b - 1) if _fits(problem, c, fill.in_flight(i, n, n_microbatches))]
                for i, (a, b) in enumerate(ends)
            ]
            for choices in _product(problem, options, dict(problem.devices)):
                found = evaluate(problem, fill, n_microbatches, choices)
                if n not in best or found.seconds < best[n].seconds:
                    best[n] = found
    return sorted(best.values(), key=lambda c: c.seconds)


def _choices(problem: StagingProblem, first: int, last: int) -> Iterator[StageChoice]:
    blocks = last - first + 1
    counts = {"never": (0,), "stage": (0, blocks), "blocks": range(blocks + 1)}[problem.recompute]
    return (StageChoice(first, last, s, q) for s in problem.submeshes for q in counts)


def _fits(problem: StagingProblem, c: StageChoice, in_flight: float) -> bool:
    cost = problem.cost(c.first, c.last, c.submesh)
    if cost is None or (c.n_recomputed and cost.recomputed_bytes is None):
        return False
    needed = cost.needed_bytes(c.n_recomputed, c.last - c.first + 1, in_flight)
    return needed <= problem.memory_bytes[c.submesh.device_type]


def _product(
    problem: StagingProblem, options: list[list[StageChoice]], left: dict[str, int]
) -> Iterator[tuple[StageChoice, ...]]:
    """One choice a stage, with no more devices than there are."""
    if not options:
        if not problem.all_devices or not any(left.values()):
            yield ()
        return
    for c in options[0]:
        kind, size = c.submesh.device_type, c.submesh.n_devices
        if size <= left[kind]:
            for others in _product(problem, options[1:], {**left, kind: left[kind] - size}):
                yield (c, *others)
