"""Schedules that the planner searches for: the best order for the planned stages' own times, within their memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.planner.effort import EFFORT
from autopar.plans.plan import StagePlan
from cost_models.schedules import (
    ASYNCHRONOUS_KINDS,
    KNOWN,
    SCHEDULES,
    Schedule,
    Times,
    live_per_stage,
    parse_kind,
    search,
)

SEARCHED = "searched"
"""The name of a schedule that is searched for, one stage a group."""
START = "1f1b"
"""Stages of a searched schedule are planned for this one, which keeps the fewest microbatches in flight."""


def check_name(name: str) -> None:
    """Refuse a name that is no schedule of a pipeline."""
    if name == SEARCHED:
        return
    if name.partition(":")[0] not in KNOWN:
        raise PlanError(
            f"no schedule '{name}'; use {', '.join(SCHEDULES)} or {SEARCHED}, or one that changes the training result: "
            + ", ".join(ASYNCHRONOUS_KINDS)
        )
    try:
        parse_kind(name)
    except ValueError as error:
        raise PlanError(str(error)) from None


def better_order(
    stages: Sequence[StagePlan], start: Schedule, timing: Times, limits: Sequence[float]
) -> tuple[tuple[StagePlan, ...], Schedule]:
    """Return a schedule at least as good as ``start``, whose groups hold no more bytes than their limits.

    The stages' prices then count the microbatches that it keeps in flight.
    """
    actions = 3 * start.n_stages * start.n_microbatches
    schedule = search(
        timing, start.n_microbatches, start.stages_of_rank, limit_bytes=limits,
        exact_nodes=EFFORT.exact_order_states if actions <= EFFORT.exact_order_actions else 0,
    ).schedule  # fmt: skip
    live = live_per_stage(schedule)
    return tuple(s.with_in_flight(n) for s, n in zip(stages, live, strict=True)), schedule
