"""Seconds of steps from few prices: a loop over thousands of steps asks for a few dozen only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from .work import Prefill, StepBatch

CHUNKS = (1 / 16, 1 / 4, 1 / 2, 1.0)
"""Parts of the most new tokens of a step at which steps with prefills are priced."""


class StepTable:
    """Prices of steps between which it interpolates: decodes by number and context, prefills by new tokens.

    A step with both is that of its prefills, what their past adds, and what the decodes add to a full one.
    """

    def __init__(
        self, step: Callable[[StepBatch], float], in_flight: int, input_tokens: int, output_tokens: int, prefix: int,
        tokens_per_step: int,
    ):  # fmt: skip
        self.step = step
        self.low, self.high = float(input_tokens), float(input_tokens + output_tokens)
        self.counts = _counts(in_flight)
        self.rows: dict[int, tuple[float, float]] = {}
        self.prompt = max(1, input_tokens - prefix)
        self.prefix = prefix
        most = max(1, min(tokens_per_step, self.prompt * max(1, in_flight)))
        self.sizes = sorted({max(1, round(part * most)) for part in CHUNKS} | {min(most, self.prompt)})
        self.chunks: dict[int, float] = {}
        self.past_slope: float | None = None
        self.adds: dict[int, tuple[float, float]] = {}
        self.in_flight = in_flight

    def decode(self, decodes: int, context: float) -> float:
        """Return the seconds of a step of so many decodes, whose mean context is given."""
        at = bisect_right(self.counts, decodes) - 1
        if at >= len(self.counts) - 1:
            return self._row(self.counts[-1], context)
        few, many = self.counts[at], self.counts[at + 1]
        part = (decodes - few) / (many - few)
        low = self._row(few, context)
        return low + part * (self._row(many, context) - low) if part else low

    def _row(self, decodes: int, context: float) -> float:
        ends = self.rows.get(decodes)
        if ends is None:
            ends = (self.step(StepBatch((), decodes, self.low)), self.step(StepBatch((), decodes, self.high)))
            self.rows[decodes] = ends
        return ends[0] + (ends[1] - ends[0]) * (context - self.low) / (self.high - self.low)

    def mixed(self, new: int, past_work: float, decodes: int, context: float) -> float:
        """Return the seconds of a step with prefills.

        Args:
            new: new tokens of all its prefills.
            past_work: sum over new tokens of those of the same request in the cache before the step.
            decodes: requests that get a token in it.
            context: their mean context.
        """
        seconds = self._chunk(new) + self._past(past_work)
        if decodes:
            low, high = self._added(decodes)
            seconds += low + (high - low) * (context - self.low) / (self.high - self.low)
        return seconds

    def _chunk(self, new: int) -> float:
        sizes = self.sizes
        at = min(max(bisect_right(sizes, new) - 1, 0), len(sizes) - 2) if len(sizes) > 1 else 0
        low = self._priced(sizes[at])
        if len(sizes) == 1:
            return low * max(1.0, new / sizes[0])
        high = self._priced(sizes[at + 1])
        return max(min(low, high) * 0.5, low + (high - low) * (new - sizes[at]) / (sizes[at + 1] - sizes[at]))

    def _prefills(self, new: int) -> tuple[Prefill, ...]:
        whole, rest = divmod(new, self.prompt)
        return (Prefill(self.prompt, 0),) * whole + ((Prefill(rest, 0),) if rest else ())

    def _priced(self, new: int) -> float:
        if new not in self.chunks:
            self.chunks[new] = self.step(StepBatch(self._prefills(new)))
        return self.chunks[new]

    def _past(self, past_work: float) -> float:
        if past_work <= 0:
            return 0.0
        if self.past_slope is None:
            new, past = min(self.sizes[-1], self.prompt), max(self.prompt, self.prefix)
            with_past = self.step(StepBatch((Prefill(new, past),)))
            self.past_slope = max(0.0, with_past - self.step(StepBatch((Prefill(new, 0),)))) / (new * past)
        return past_work * self.past_slope

    def _added(self, decodes: int) -> tuple[float, float]:
        """Return what decodes add to a step with prefills, at the shortest and longest context."""
        most = self.adds.get(0)
        if most is None:
            few = max(1, self.in_flight)
            alone = self._prefills(self.sizes[-1])
            base = self._priced(self.sizes[-1])
            most = self.adds[0] = (
                max(0.0, self.step(StepBatch(alone, few, self.low)) - base) / few,
                max(0.0, self.step(StepBatch(alone, few, self.high)) - base) / few,
            )
        return most[0] * decodes, most[1] * decodes


def _counts(in_flight: int) -> list[int]:
    """Return numbers of decodes at which steps are priced: powers of two, and the most."""
    found = [1]
    while found[-1] * 2 < in_flight:
        found.append(found[-1] * 2)
    return sorted({*found, max(1, in_flight)})
