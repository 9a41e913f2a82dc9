"""Prices from measurements: ops at sizes that were measured, corrected formulas elsewhere, transfers in between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from hardware_profiles.measured import OTHER, Correction, Measured, Points

from .collectives import AxisCost


def between(points: Points, n_bytes: float) -> float:
    """Seconds at a size: on the line between its neighbours, beyond the last one by the last slope."""
    if n_bytes <= points[0][0] or len(points) == 1:
        return points[0][1]
    i = min(max(bisect_left(points, (n_bytes, 0.0)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (y1 - y0) * (n_bytes - x0) / (x1 - x0))


def corrected(
    measured: Measured, kind: str, forward_seconds: float, backward_seconds: float, differentiable: bool
) -> tuple[float, float]:
    """Forward and backward seconds of an op that was not measured, from what the formulas say."""
    rule = measured.corrections.get(kind) or measured.corrections[OTHER]
    (base, factor), (back_base, back_factor) = rule.forward, rule.backward
    backward = back_base + back_factor * backward_seconds if differentiable else 0.0
    return base + factor * forward_seconds, backward


def fit_correction(computed: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """``(seconds, factor)``, both >= 0, of the line through measured over computed seconds with the least squares of
    relative errors."""
    rows = [(c / m, 1 / m) for c, m in zip(computed, measured, strict=True) if m > 0]  # factor * c/m + base * 1/m = 1
    if not rows:
        return 0.0, 1.0
    cc, cb, bb = (sum(f(c, b) for c, b in rows) for f in (lambda c, b: c * c, lambda c, b: c * b, lambda c, b: b * b))
    c1, b1 = sum(c for c, _ in rows), sum(b for _, b in rows)
    det = cc * bb - cb * cb
    if det > 1e-9 * cc * bb:
        factor, base = (c1 * bb - b1 * cb) / det, (b1 * cc - c1 * cb) / det
        if factor >= 0 and base >= 0:
            return base, factor
    only_factor, only_base = (c1 / cc if cc else 0.0), b1 / bb
    errors = [sum((f * c + s * b - 1) ** 2 for c, b in rows) for s, f in ((0.0, only_factor), (only_base, 0.0))]
    return (0.0, only_factor) if errors[0] <= errors[1] else (only_base, 0.0)


@dataclass(frozen=True, eq=False)
class MeasuredAxis(AxisCost):
    """An axis whose collectives were measured between two devices; more devices cost more as the formulas say.

    Attributes:
        measured: whose transfers these are.
        pair: the same links with two devices, by formula.
    """

    measured: Measured | None = None
    pair: AxisCost | None = field(default=None)

    def seconds(self, kind: str, n_bytes: float) -> float:
        """The time of one collective; 0 on an axis of size 1. Raises ValueError for an unknown kind."""
        plain = super().seconds(kind, n_bytes)
        assert self.measured is not None and self.pair is not None
        points = self.measured.transfers.get(kind)
        if self.size == 1 or points is None:
            return plain
        here = between(points, n_bytes)
        if self.size == 2:
            return here
        formula = self.pair.seconds(kind, n_bytes)
        return here * plain / formula if formula > 0 else plain


__all__ = ["Correction", "MeasuredAxis", "between", "corrected", "fit_correction"]
