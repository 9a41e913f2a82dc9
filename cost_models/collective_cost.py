"""The price of a collective on one mesh axis: numbers in, seconds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


@dataclass(frozen=True, eq=False)
class AxisCost:
    """The cost of collectives on one axis. Look the axis up once, then call `seconds` as often as needed.

    `terms[kind]` is (latency_seconds, seconds_per_byte, sharpness), bytes in the nccl-tests convention:

        all_reduce      the buffer of a rank            reduce_scatter  the full input of a rank
        all_gather      the gathered output of a rank   all_to_all      the local buffer of a rank
        broadcast       the buffer                      send_recv       the message, to the next rank

    seconds = (latency^p + (bytes * seconds_per_byte)^p)^(1/p) with p = sharpness (1: plain alpha + beta B).
    `others[kind]` has terms of the library's other algorithms; it takes the fastest for a size.
    `bottleneck` names the link that limits large all-reduces, for people.
    """

    name: str
    size: int
    terms: Mapping[str, tuple[float, float, float]]
    bottleneck: str = ""
    others: Mapping[str, tuple[tuple[float, float, float], ...]] = field(default_factory=dict)

    @property
    def latency_seconds(self) -> float:
        """Seconds of an all-reduce of no bytes."""
        return self.seconds("all_reduce", 0.0)

    def seconds(self, kind: str, n_bytes: float) -> float:
        """Return the seconds of one collective; 0 on an axis of size 1. Unknown kinds raise ValueError."""
        try:
            first = self.terms[kind]
        except KeyError:
            raise ValueError(f"unknown collective '{kind}', known: {', '.join(KINDS)}") from None
        if self.size == 1:
            return 0.0
        others = self.others.get(kind)
        if not others:
            return _seconds(*first, n_bytes)
        return min(_seconds(*terms, n_bytes) for terms in (first, *others))

    def times(self, factor: float) -> AxisCost:
        """Return the axis with collectives that take ``factor`` times as long."""

        def longer(terms: tuple[float, float, float]) -> tuple[float, float, float]:
            latency, per_byte, sharpness = terms
            return factor * latency, factor * per_byte, sharpness

        return replace(
            self, terms={kind: longer(terms) for kind, terms in self.terms.items()},
            others={kind: tuple(map(longer, several)) for kind, several in self.others.items()},
        )  # fmt: skip


def _seconds(latency: float, per_byte: float, sharpness: float, n_bytes: float) -> float:
    if sharpness == 1.0:
        return latency + per_byte * n_bytes
    return (latency**sharpness + (per_byte * n_bytes) ** sharpness) ** (1.0 / sharpness)


def abstract_terms(size: int, alpha: float, beta: float, constants: Mapping[str, float]) -> dict:
    """Return Alpa's formulas (alpa/shard_parallel LogicalDeviceMesh) as terms, n = size.

        all_reduce   alpha + beta 2(n-1)/n B + c    reduce_scatter  alpha + beta (n-1)/n B + c
        all_gather   alpha + beta (n-1)/n B + c     all_to_all      alpha + beta (n-1)/n^2 (n b) (n/2) + c

    with b the local buffer of the all-to-all. Not in Alpa: broadcast and send_recv, alpha + beta B.
    """
    n = size
    return {
        "all_reduce": (alpha + constants["all_reduce"], beta * 2 * (n - 1) / n, 1.0),
        "all_gather": (alpha + constants["all_gather"], beta * (n - 1) / n, 1.0),
        "reduce_scatter": (alpha + constants["reduce_scatter"], beta * (n - 1) / n, 1.0),
        "all_to_all": (alpha + constants["all_to_all"], beta * (n - 1) / 2, 1.0),
        "broadcast": (alpha, beta, 1.0),
        "send_recv": (alpha, beta, 1.0),
    }
