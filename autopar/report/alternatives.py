"""Why a layout is not the plan: the memory that it lacks, or the part of a step that takes longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf

from autopar.planner.layouts.pricing import PricedLayout
from autopar.plans.lacking_memory import LackingMemory, lacking_memory
from autopar.plans.plan import Plan
from autopar.report import Facts
from autopar.words.texts import show_seconds
from cost_models.schedules import Timeline


@dataclass(frozen=True)
class BesidePlan:
    """A layout beside the plan.

    Attributes:
        layout: its words.
        seconds: seconds of a step; None if the layout is impossible.
        memory_bytes: bytes on the fullest device; None if the layout is impossible.
        reason: why it is not the plan.
        lacking: None unless it does not fit.
        error: why the layout is impossible; None if it is not.
    """

    layout: str
    seconds: float | None
    memory_bytes: float | None
    reason: str
    lacking: LackingMemory | None = None
    error: str | None = None

    @property
    def order(self) -> tuple[int, float]:
        """The place among others: those that fit by seconds, others by bytes that lack, impossible ones last."""
        if self.error is not None:
            return 2, inf
        if self.lacking is not None:
            return 1, self.lacking.needed_bytes - self.lacking.limit_bytes
        return 0, inf if self.seconds is None else self.seconds


def beside_plan(
    layout: str, found: PricedLayout | None, error: str, reason: Callable[[PricedLayout], str]
) -> BesidePlan:
    """Return a layout with why it is not the plan.

    Args:
        layout: its words.
        found: its price; None if it has none.
        error: why it has none.
        reason: returns why a layout that fits is not the plan.
    """
    if found is None:
        return BesidePlan(layout, None, None, f"impossible: {error}", error=error)
    lacking = lacking_memory(found.plan, found.memory_bytes, found.limit_bytes)
    text = reason(found) if lacking is None else lacking.text
    return BesidePlan(layout, found.seconds, found.memory_bytes, text, lacking)


def step_parts(plan: Plan, timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a step of the group that computes longest, by part; they add up to about the step."""
    busy = timeline.busy_seconds
    longest = busy.index(max(busy))
    prices = [plan.stages[s].price for s in plan.schedule.stages_of_rank[longest]]
    return {
        "computing": sum(p.compute_seconds for p in prices),
        "collectives of activations": sum(p.activation_seconds for p in prices),
        "collectives of parameters": sum(p.exposed_seconds for p in prices),
        "executor": sum(p.overhead_seconds for p in prices),
        "optimizer": sum(p.optimizer_seconds for p in prices),
        "waiting for other stages": timeline.makespan_seconds - busy[longest],
    }


def reason_slower(seconds: float, parts: Mapping[str, float], best_seconds: float, best: Mapping[str, float]) -> str:
    """Return how much longer a layout takes than the plan, and the part that is to blame.

    Example: ``1.083 times the best: 12.3 ms more collectives of activations``.
    """
    times = f"{seconds / best_seconds:.3f} times the best"
    part = max(parts, key=lambda name: parts[name] - best[name], default=None)
    if part is None or seconds <= best_seconds or parts[part] <= best[part]:
        return times
    return f"{times}: {show_seconds(parts[part] - best[part])} more {part}"


def ranked(alternatives: Sequence[BesidePlan]) -> list[Facts]:
    """Return alternatives as values for JSON, in their order."""
    rows = sorted(alternatives, key=lambda each: each.order)
    return [
        {
            "layout": each.layout, "rank": rank, "seconds": each.seconds, "memory_bytes": each.memory_bytes,
            "reason": each.reason, "refused": None if each.lacking is None else asdict(each.lacking),
            "error": each.error,
        } for rank, each in enumerate(rows, 1)
    ]  # fmt: skip
