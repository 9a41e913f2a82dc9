"""Fit the factors of engines on GPUs to measured rows: one for steps of decodes, one for steps with prefills.

    python benchmarks/fit_serving.py serving_silicon.csv

Prints the lines of hardware_profiles/data/engines.toml, with the errors on the half that was fitted (workers of 2 and 8
devices) and on the other one. Rows of dense models decide; those with experts where an engine has no others on a GPU.
All other numbers of that file, and those of small_rates.toml, were read off the same half by steps of single numbers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from serving import CLUSTERS, ENGINES, Case, cluster_named, fitted, off, price, read_cases

from hardware_profiles.engines import Engine, engine_named

OF_FIRST = 0.3
"""Weight of the time to the first token beside that of the time per token."""
MOST = 1.0
"""Logarithmic errors above this count as this: rows where a full cache decides whether requests wait for minutes."""
STEPS = (0.08, 0.04, 0.02, 0.01)


def loss(cases: list[Case], engine: Engine) -> float:
    """Return the mean logarithmic error of both times."""
    total = 0.0
    for case in cases:
        times = price(case, engine)
        total += min(MOST, abs(math.log(times.token_seconds / case.token)))
        total += OF_FIRST * min(MOST, abs(math.log(times.first_token_seconds / case.first)))
    return total / len(cases)


def with_factors(engine: Engine, device: str, decode: float, prefill: float) -> Engine:
    """Return an engine with other factors on one GPU."""
    return replace(engine, factors={**engine.factors, device: decode},
                   prefill_factors={**engine.prefill_factors, device: prefill})  # fmt: skip


def fit(cases: list[Case], engine: Engine, device: str) -> tuple[float, float]:
    """Return both factors by steps that get smaller, from 1 on."""
    best = [1.0, 1.0]
    value = loss(cases, with_factors(engine, device, *best))
    for step in STEPS:
        better = True
        while better:
            better = False
            for index in (0, 1):
                for sign in (1, -1):
                    trial = list(best)
                    trial[index] *= 1 + sign * step
                    if (found := loss(cases, with_factors(engine, device, *trial))) < value - 1e-5:
                        best, value, better = trial, found, True
    return best[0], best[1]


def main(path: str) -> None:
    """Print factors and errors."""
    sound = [case for case in read_cases(path) if not case.suspect]
    for backend, name in ENGINES.items():
        engine = engine_named(name)
        for system in CLUSTERS:
            rows = [case for case in sound if case.engine == backend and case.system == system]
            rows = [case for case in rows if not case.mixture] or rows
            half = [case for case in rows if fitted(case)]
            if len(half) < 8:
                continue
            device = cluster_named(system).device(0).name
            decode, prefill = fit(half, engine, device)
            engine = with_factors(engine, device, decode, prefill)
            said = ""
            rest = [case for case in rows if not fitted(case)]
            for part, chosen in (("fitted", half), ("held out", rest)):
                priced = [(case, price(case, engine)) for case in chosen]
                said += f"; {part} {len(priced)} rows, {off(priced):.1%} per token, "
                said += f"{off(priced, True):.1%} to the first"
            print(f"{name} on {device}: factor {decode:.3g}, with prefills {prefill:.3g}{said}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
