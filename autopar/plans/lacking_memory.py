"""Memory that a plan needs and its devices do not have: how much, and the largest part of it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plans.plan import Plan
from autopar.plans.prices import bytes_together
from autopar.words.texts import show_bytes


@dataclass(frozen=True)
class LackingMemory:
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
        "buffers": sum(p.buffer_bytes for p in prices),
        "gathered copies": sum(p.gathered_bytes for p in prices),
        "weight versions": sum(p.version_bytes for p in prices),
        "activations": sum(p.activation_bytes - p.again_bytes for p in prices) + max(p.again_bytes for p in prices),
        "working memory": max(0, *(p.working_bytes for p in prices)),
    }


def largest_part(plan: Plan) -> tuple[str, int]:
    """Return the part of the fullest device that has most bytes, and these."""
    parts = memory_parts(plan)
    largest = max(parts, key=lambda name: parts[name])
    return largest, parts[largest]


def lacking_memory(plan: Plan, needed_bytes: float, limit_bytes: float) -> LackingMemory | None:
    """Return what a plan lacks; None if it fits."""
    if needed_bytes <= limit_bytes:
        return None
    return LackingMemory(needed_bytes, limit_bytes, *largest_part(plan))
