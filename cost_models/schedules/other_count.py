"""A schedule for another number of microbatches, on the same ranks with the same stages each."""

from __future__ import annotations

from .actions import Schedule
from .best_order import search
from .schedule_kinds import KNOWN, allows, build
from .timeline import live_per_rank
from .times import times


def with_microbatches(schedule: Schedule, n_microbatches: int) -> Schedule:
    """Return the same kind of schedule for `n_microbatches`, with no more in flight on any rank.

    Where the kind does not exist for that number (rounds that do not come out even), needs more memory, or has no name
    by which it could be built, an order is searched that needs no more.
    """
    n_stages, n_ranks = schedule.n_stages, schedule.n_ranks
    if n_microbatches == schedule.n_microbatches:
        return schedule
    most = live_per_rank(schedule)
    if schedule.name in KNOWN and allows(schedule.name, n_stages, n_ranks, n_microbatches):
        schedule_of_count = build(schedule.name, n_stages, n_ranks, n_microbatches)
        fits = all(n <= limit for n, limit in zip(live_per_rank(schedule_of_count), most, strict=True))
        if fits and schedule_of_count.stages_of_rank == schedule.stages_of_rank:
            return schedule_of_count
    return search(times(n_stages), n_microbatches, schedule.stages_of_rank, limit_live=most, swaps=0).schedule
