"""Backwards in halves: seconds, memory and gradients of a pipeline that is not compiled, compiled whole, and split.

``python benchmarks/split_backward.py gpt2 llama --schedule zb-h1 zb-v``: two gloo ranks, four microbatches, generated
Python (``backend="eager"``). Seconds are CPU seconds of the calling thread; the ways take turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from procs.cases import whole
from zoo import ZOO, as_float64

import autopar
from autopar.allocations import Allocations
from autopar.lower.freed_tensors import EMPTIED
from autopar.runtime.pipelines.stage_in_flight import Flight

WAYS = ("not compiled, split", "compiled, whole", "compiled, split")


def rank(name: str, schedule: str, steps: int) -> dict[str, Any]:
    """Compare the ways on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = as_float64(ZOO[name]())
    options: dict[str, Any] = {"stages": 2, "schedule": schedule, "microbatches": 4}
    plain, compiled = (
        autopar.parallelize(copy.deepcopy(case.model), 2, case.kwargs or case.args, **options, **more)
        for more in ({}, {"compile": {"backend": "eager"}})
    )
    modules = dict(zip(WAYS, (plain, compiled, compiled), strict=True))

    def step(way: str) -> tuple[float, float]:
        module = modules[way]
        module.zero_grad()
        torch.manual_seed(3)
        patched = mock.patch.object(Flight, "whole_backward", way == WAYS[1])
        with patched:
            cpu, wall = time.thread_time(), time.perf_counter()
            module.train_step(*case.args, **case.kwargs)
            return time.thread_time() - cpu, time.perf_counter() - wall

    found: dict[str, Any] = {"model": name, "schedule": schedule}
    gradients = {}
    for way in WAYS:
        step(way)
        gradients[way] = [None if p.grad is None else whole(p.grad).clone() for p in modules[way].parameters()]
    pairs = [(a, b) for way in WAYS[1:] for a, b in zip(gradients[WAYS[0]], gradients[way], strict=True)]
    found["equal"] = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for i in range(steps + 1):
        for k in range(len(WAYS)):
            way = WAYS[(i + k) % len(WAYS)]
            seconds[way].append(step(way))
    for way in WAYS:
        cpu, wall = (1e3 * statistics.median(x[k] for x in seconds[way][1:]) for k in (0, 1))
        count = Allocations(EMPTIED)
        with count:
            step(way)
        found[way] = f"CPU {cpu:.1f} ms, wall {wall:.0f} ms, peak {count.peak_bytes // 1000} KB"
    found["load"] = round(os.getloadavg()[0])
    return found


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--schedule", nargs="+", default=["zb-h1"])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    for name in options.models:
        for schedule in options.schedule:
            for found in autopar.run_local(rank, 2, name, schedule, options.steps, timeout=500):
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
