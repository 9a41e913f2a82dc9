"""Shares of one group's memory for its stages, by what each needs when the group is fullest.

That is estimated where the search cuts the model. Where the cuts are given, it is what the stages' fastest plans need;
and a stage that does not fit its share is taken to need more (:func:`with_more`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.candidates import Candidate
from autopar.plans.plan import StagePlan


def with_needs(
    candidate: Candidate, stages_of_rank: Sequence[Sequence[int]], plans: Sequence[StagePlan]
) -> Candidate:
    """Return the candidate with what `plans` of its stages need, in bytes, instead of estimates."""
    n_bytes: dict[int, tuple[float, float]] = {}
    for of_group in stages_of_rank:
        for s in of_group:
            price, kept = plans[s].price, plans[s].kept_bytes
            lasting = price.memory_bytes - price.transient_bytes - plans[s].in_flight * kept
            n_bytes[s] = max(0.0, lasting) + max(0, price.transient_bytes) / len(of_group), float(kept)
    once = tuple(float(max(0, plan.price.transient_bytes)) for plan in plans)
    return replace(candidate, n_bytes=tuple(n_bytes[s] for s in range(len(plans))), once_bytes=once)


def with_more(candidate: Candidate, stage: int) -> Candidate:
    """Return the candidate with a stage that needs ``EFFORT.more_memory`` times as much of its group's memory."""
    static, kept = candidate.n_bytes[stage]
    n_bytes = list(candidate.n_bytes)
    n_bytes[stage] = EFFORT.more_memory * static, EFFORT.more_memory * kept
    return replace(candidate, n_bytes=tuple(n_bytes))


def share_of(
    stage: int, of_group: Sequence[int], live: Sequence[int], counted: Sequence[int], candidate: Candidate
) -> float:
    """Return the share of its group's memory that a stage is planned for, by estimated needs, or else equal."""
    if not candidate.n_bytes or len(of_group) == 1:
        return 1 / len(of_group)

    def need(s: int, in_flight: int) -> float:
        static, kept = candidate.n_bytes[s]
        return static + in_flight * kept

    needs = {s: need(s, live[s]) for s in of_group}
    n_parts = EFFORT.memory_parts * len(of_group) // 2
    if counted[stage] != live[stage]:
        return ceil(n_parts * need(stage, counted[stage]) / sum(needs.values())) / n_parts
    return _parts(needs, n_parts)[stage] / n_parts


def extra_bytes(stage: int, of_group: Sequence[int], candidate: Candidate) -> float:
    """Return the bytes that a stage may fill, in addition to its share, while the others do not work."""
    if len(of_group) == 1 or not candidate.once_bytes:
        return 0.0
    return candidate.once_bytes[stage] * (1 - 1 / len(of_group)) // EFFORT.memory_step * EFFORT.memory_step


def _parts(needs: Mapping[int, float], n_parts: int) -> dict[int, int]:
    """Return the number of equal parts of memory for each stage, so that none is short by more than rounding."""
    parts = dict.fromkeys(needs, 1)
    for _ in range(n_parts - len(needs)):
        parts[max(needs, key=lambda s: (needs[s] / parts[s], -s))] += 1
    return parts


def counted_in_flight(live: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return the microbatches in flight that each stage is planned for: those when its group is fullest.

    Where it keeps many more at another moment, it is these: a stage that is planned for one alone would keep so much of
    it that the group were fullest at that other moment.
    """
    return [n if EFFORT.many_more_in_flight * n >= at_most else at_most for n, at_most in zip(live, most, strict=True)]
