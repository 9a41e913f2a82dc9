"""Why a layout is not the plan: the memory that it lacks, or the part of a step that takes longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf

from autopar.plans.plan import Plan
from autopar.plans.prices import bytes_together
from autopar.report import Facts
from autopar.words.texts import show_bytes, show_seconds
from cost_models.schedules import Timeline


@dataclass(frozen=True)
class Refusal:
    """Memory that a layout needs and a device does not have.

    Attributes:
        needed_bytes: bytes on the fullest device.
        limit_bytes: bytes that a plan may fill there.
        largest: the largest part of the needed bytes, of which ``largest_bytes`` are.
    """

    needed_bytes: float
    limit_bytes: float
    largest: str
    largest_bytes: int

    @property
    def text(self) -> str:
        """The reason in words: ``refused: 71.2 of 67.1 GiB, activations``."""
        return f"refused: {of_limit(self.needed_bytes, self.limit_bytes)}, {self.largest}"


@dataclass(frozen=True)
class BesidePlan:
    """A layout beside the plan.

    Attributes:
        layout: its words.
        seconds: seconds of a step; None if the layout is impossible.
        memory_bytes: bytes on the fullest device; None if the layout is impossible.
        reason: why it is not the plan.
        refusal: None unless it does not fit.
        error: why the layout is impossible; None if it is not.
    """

    layout: str
    seconds: float | None
    memory_bytes: float | None
    reason: str
    refusal: Refusal | None = None
    error: str | None = None

    @property
    def order(self) -> tuple[int, float]:
        """The place among others: those that fit by seconds, others by bytes that lack, impossible ones last."""
        if self.error is not None:
            return 2, inf
        if self.refusal is not None:
            return 1, self.refusal.needed_bytes - self.refusal.limit_bytes
        return 0, inf if self.seconds is None else self.seconds


def of_limit(needed_bytes: float, limit_bytes: float) -> str:
    """Return two numbers of bytes in one unit: ``71.2 of 67.1 GiB``, with as many digits as tell them apart."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if limit_bytes >= size:
            a, b = needed_bytes / size, limit_bytes / size
            digits = next((n for n in (1, 2, 3) if f"{a:.{n}f}" != f"{b:.{n}f}"), 6)
            return f"{a:.{digits}f} of {b:.{digits}f} {unit}"
    return f"{show_bytes(needed_bytes)} of {show_bytes(limit_bytes)}"


def memory_parts(plan: Plan) -> dict[str, int]:
    """Return the bytes of the fullest device by part.

    Working memory is left out where it is negative: it then says that the others are not all there at once.
    """
    groups = [[plan.stages[s].price for s in of] for of in plan.schedule.stages_of_rank]
    prices = max(groups, key=bytes_together)
    return {
        "parameters": sum(p.parameter_bytes for p in prices),
        "gradients": sum(p.gradient_bytes for p in prices),
        "optimizer": sum(p.optimizer_bytes for p in prices),
        "gathered copies": sum(p.gathered_bytes for p in prices),
        "activations": sum(p.activation_bytes - p.again_bytes for p in prices) + max(p.again_bytes for p in prices),
        "working memory": max(0, *(p.working_bytes for p in prices)),
    }


def refusal(plan: Plan, needed_bytes: float, limit_bytes: float) -> Refusal | None:
    """Return what a plan lacks; None if it fits."""
    if needed_bytes <= limit_bytes:
        return None
    parts = memory_parts(plan)
    largest = max(parts, key=lambda name: parts[name])
    return Refusal(needed_bytes, limit_bytes, largest, parts[largest])


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
            "reason": each.reason, "refused": None if each.refusal is None else asdict(each.refusal),
            "error": each.error,
        } for rank, each in enumerate(rows, 1)
    ]  # fmt: skip
