"""Fit the factors of engines on GPUs to measured rows: one for steps of decodes, one for steps with prefills.

    python benchmarks/fit_serving.py serving_silicon.csv [--left-out]

With ``--left-out`` each model, then each version of an engine, is priced by factors that were fitted without it. Else
prints the lines of hardware_profiles/data/engines.toml, with the errors on the half that was fitted (workers of 2 and 8
devices) and on the other one. Rows of dense models decide; those with experts where an engine has no others on a GPU.
All other numbers of that file, and those of small_rates.toml, were read off the same half by steps of single numbers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from statistics import mean

from serving import CLUSTERS, ENGINES, HEAD, Case, Priced, cluster_named, fitted, line, off, price, read_cases

from hardware_profiles.engines import Engine, engine_named

OF_FIRST = 0.3
"""Weight of the time to the first token beside that of the time per token."""
MOST = 1.0
"""Logarithmic errors above this count as this: rows where a full cache decides whether requests wait for minutes."""
LEAST = 8
"""Rows that a fit needs at least."""
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


def without(model: str, version: str, cases: list[Case], name: str) -> Engine:
    """Return an engine as it would be if one model, or one of its versions, had not been measured.

    A GPU whose rows are gone takes the mean of the other factors and 1; numbers of experts that it alone gave are gone.
    """
    kept = [c for c in cases if c.model != model and (c.engine, c.version) != (name, version)]
    engine = engine_named(ENGINES[name])
    factors, prefills = dict(engine.factors), dict(engine.prefill_factors)
    for system in CLUSTERS:
        device = cluster_named(system).device(0).name
        before = [c for c in cases if c.engine == name and c.system == system and fitted(c)]
        dense = [c for c in before if not c.mixture] or before
        half = [c for c in dense if c in kept]
        if len(half) == len(dense) or device not in factors:
            continue
        if len(half) >= LEAST:
            factors[device], prefills[device] = fit(half, engine, device)
        else:
            del factors[device]
            prefills.pop(device, None)
    formats = {"gpt-oss-120b": "mxfp4", "qwen3-235b-a22b": "fp8"}
    others = {c.model for c in kept if c.mixture and c.engine == name}
    known = {k: v for k, v in engine.expert_factors.items() if k.split()[0] in {formats[m] for m in others}}
    seen = {cluster_named(c.system).device(0).name for c in kept if c.mixture and c.engine == name}
    kernels, hosts = ({k: v for k, v in of.items() if k in seen}
                      for of in (engine.expert_kernels_on, engine.expert_host_on))  # fmt: skip
    general = mean((1.0, *factors.values()))
    return replace(engine, factors=factors, prefill_factors=prefills, general_factor=general, expert_factors=known,
                   expert_kernels_on=kernels, expert_host_on=hosts)  # fmt: skip


def left_out(path: str) -> None:
    """Print errors of rows of each model, and of each version of an engine, without which engines were fitted."""
    sound = [case for case in read_cases(path) if not case.suspect]
    print(HEAD)
    every: dict[bool, list[Priced]] = {False: [], True: []}
    for model in sorted({c.model for c in sound}):
        for name in sorted({c.engine for c in sound if c.model == model}):
            engine = without(model, "none", sound, name)
            rows = [(c, price(c, engine)) for c in sound if c.model == model and c.engine == name]
            every[rows[0][0].mixture] += rows
            print(line(f"{model} on {name}", rows), flush=True)
    for mixture, rows in every.items():
        print(line("models with experts" if mixture else "dense models", rows))
    for name, version in sorted({(c.engine, c.version) for c in sound}):
        engine = without("none", version, sound, name)
        rows = [(c, price(c, engine)) for c in sound if (c.engine, c.version) == (name, version)]
        print(line(f"{name} {version or 'of no recorded version'}", rows), flush=True)


def main(path: str) -> None:
    """Print factors and errors."""
    sound = [case for case in read_cases(path) if not case.suspect]
    for backend, name in ENGINES.items():
        engine = engine_named(name)
        for system in CLUSTERS:
            rows = [case for case in sound if case.engine == backend and case.system == system]
            rows = [case for case in rows if not case.mixture] or rows
            half = [case for case in rows if fitted(case)]
            if len(half) < LEAST:
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
    (left_out if "--left-out" in sys.argv[2:] else main)(sys.argv[1])
