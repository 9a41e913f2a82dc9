"""Curves of few numbers, fitted to measurements.

The loss is the weighted absolute logarithmic error: small and large sizes count alike, and a bad row does little harm.
Used by the scripts that distil the built-in profiles, and for measuring a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hardware_profiles import CollectiveCurve, EfficiencyCurve

FIRST_STEP, LARGEST_STEP = 0.5, 1.0
"""First step of the search; its parameters are logarithms and logits, so 1 is large."""
LONGER, SHORTER = 1.5, 0.6
"""Factors of the step after a round that helped, and after one that did not."""
SMALLEST_STEP = 1e-5
"""Last step of the search, far below the resolution of measurements."""

MOST_FRACTION = 1.2
"""The most of the data-sheet bandwidth. Above 1, because switches that add up save wire bytes."""
MOST_RAMP = 1.5
"""Below 2, with which a ring of two would have no rate at all."""
LEAST_SHARPNESS = 0.3
"""Exponent p of ``(latency^p + transfer^p)^(1/p)``; 1 is their sum."""


def search(loss: Callable[[np.ndarray], float], start: Sequence[float], rounds: int = 400) -> np.ndarray:
    """Return a local minimum of `loss` near `start`, by trying steps along random orthogonal directions.

    The step grows after a round that helped and shrinks after one that did not. Deterministic: the seed is
    fixed.
    """
    best, step = np.asarray(start, dtype=float), FIRST_STEP
    value, random = loss(best), np.random.default_rng(0)
    for _ in range(rounds):
        directions, _ = np.linalg.qr(random.normal(size=(len(best), len(best))))
        improved = False
        for direction in (*directions, *-directions):
            trial = best + step * direction
            if (trial_value := loss(trial)) < value:
                best, value, improved = trial, trial_value, True
        step = min(step * LONGER, LARGEST_STEP) if improved else step * SHORTER
        if step < SMALLEST_STEP:
            break
    return best


def fit_collective(
    n: np.ndarray,
    steps: np.ndarray,
    wire_seconds: np.ndarray,
    seconds: np.ndarray,
    weights: np.ndarray,
    *,
    outside: np.ndarray | None = None,
    with_ramp: bool = True,
    with_base: bool = True,
    source: str = "",
) -> tuple[CollectiveCurve, float]:
    """Fit the curve of one collective on one kind of link; also return its median absolute log error.

    All arrays have one entry per measurement: `n` ranks in the ring, dependent `steps`, `wire_seconds` the
    time of the wire bytes at the data-sheet bandwidth, measured `seconds`, `weights`, and latency spent
    `outside` this link.

        latency = outside + base + steps * step,   rate = fraction * (1 - ramp / n)
        seconds = (latency^p + (wire_seconds / rate)^p)^(1/p)
    """
    outside = np.zeros_like(seconds) if outside is None else outside
    weights = weights / weights.sum()
    log_seconds = np.log(seconds)

    def unpack(x: np.ndarray) -> tuple[float, float, float, float, float]:
        fraction = MOST_FRACTION / (1 + np.exp(-x[2]))
        ramp = MOST_RAMP / (1 + np.exp(-x[4])) if with_ramp else 0.0
        return (
            np.exp(x[0]) if with_base else 0.0,
            np.exp(x[1]),
            fraction,
            ramp,
            LEAST_SHARPNESS + (1 - LEAST_SHARPNESS) / (1 + np.exp(-x[3])),
        )

    def log_model(x: np.ndarray) -> np.ndarray:
        base, step, fraction, ramp, p = unpack(x)
        latency = outside + base + steps * step
        return np.log(latency**p + (wire_seconds / (fraction * (1 - ramp / n))) ** p) / p

    floor = float(seconds.min())
    start = [np.log(floor / 2), np.log(floor / 10), 1.0, 1.0, -1.0][: 5 if with_ramp else 4]
    best = search(lambda x: float(weights @ np.abs(log_model(x) - log_seconds)), start)
    error = float(np.median(np.abs(log_model(best) - log_seconds)))
    base, step, fraction, ramp, p = (float(f"{value:.3g}") for value in unpack(best))
    return CollectiveCurve(base, step, fraction, ramp, p, source), error


def gemm_seconds(
    curve: EfficiencyCurve,
    shapes: np.ndarray,
    peak_flops: float | np.ndarray,
    element_bytes: float,
    memory_bytes_per_second: float | np.ndarray,
    launch_seconds: float,
    cast_bytes: float = 0.0,
) -> np.ndarray:
    """Return `op_seconds` of matrix products for shapes [row, (m, n, k)] at once -> seconds [row].

    `cast_bytes` are moved for each of the m k elements of the first factor before the product, which is then read in a
    narrower type.
    """
    m, n, k = shapes.T.astype(float)
    tiles = (m + curve.half_m) * (n + curve.half_n) + curve.half_mn
    compute = 2 * tiles * (k + curve.half_k) / (peak_flops * curve.fraction)
    memory = element_bytes * (m * k + k * n + m * n) / memory_bytes_per_second
    return launch_seconds + np.maximum(compute, memory) + cast_bytes * m * k / memory_bytes_per_second


def fit_gemm(
    shapes: np.ndarray,
    seconds: np.ndarray,
    peak_flops: float | np.ndarray,
    element_bytes: float,
    memory_bytes_per_second: float | np.ndarray,
    launch_seconds: float,
    source: str = "",
    casts: bool = False,
) -> tuple[EfficiencyCurve, float, float]:
    """Fit the efficiency curve of matrix products; also return its median absolute log error, and the cast's bytes.

    shapes [row, (m, n, k)], seconds [row]; rates are numbers, or one per row where several devices share a
    curve; `memory_bytes_per_second` is what memory really gives. The model is `gemm_seconds`; the launch time
    is given, not fitted, because op_seconds adds that of the device. `casts`: the seconds contain a cast of the first
    factor, whose bytes for each element are fitted too and are no part of the curve. They look like a large `half_n`,
    which is therefore that of m: products are alike in both.
    """
    log_seconds = np.log(seconds)

    def unpack(x: np.ndarray) -> tuple[EfficiencyCurve, float]:
        fraction = float(0.99 / (1 + np.exp(-x[0])))
        half_m, *last, half_k, half_mn = (float(f"{value:.3g}") for value in np.exp(x[1:]))
        half_n, cast_bytes = (half_m, last[0]) if casts else (last[0], 0.0)
        return EfficiencyCurve(fraction, half_m, half_n, half_k, half_mn, source=source), cast_bytes

    def errors(curve: EfficiencyCurve, cast_bytes: float) -> np.ndarray:
        model = gemm_seconds(
            curve, shapes, peak_flops, element_bytes, memory_bytes_per_second, launch_seconds, cast_bytes
        )
        return np.abs(np.log(model) - log_seconds)

    start = [1.0, *np.log([30.0, 5.0 if casts else 30.0, 30.0, 3e4])]
    curve, cast_bytes = unpack(search(lambda x: float(errors(*unpack(x)).mean()), start))
    return curve, float(np.median(errors(curve, cast_bytes))), cast_bytes
