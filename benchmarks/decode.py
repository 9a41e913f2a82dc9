"""How far measured decode steps are from the plan's, with a measured profile of this machine.

    python benchmarks/decode.py [--layouts rows heads stages] [--seconds 40] [--steps 60] [--patience 60]

A decoder with caches in its buffers (``tests/cached_decoder.py``) makes one token of each row in a step. The operators
of that step, the transfers and the executor are profiled on two processes (`autopar profile`); its program is planned
forward alone with that profile, with rows or heads cut, and in two stages, and runs on two gloo ranks with one thread
each. Nothing in the profile was measured of steps. Prints for each layout the seconds of a step, predicted and
measured (the median of those beside which the machine did least else), and the memory, predicted and counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar import certificate, planfile
from autopar.planner.planning import in_stages, on_best_mesh
from autopar.plans.plan import Plan
from autopar.plans.request import request_of
from autopar.plans.stage_graphs import cut
from autopar.profiling import document as profiles
from autopar.profiling.quiet import CpuWatch, quietest, until_quiet
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster, load_cluster

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from cached_decoder import Sizes, made, prompt_of

SIZES = Sizes(vocab=4000, batch=8, length=512, layers=6, heads=8, kv_heads=8, dim=512, rope=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"mesh": "data=2", "constraints": {"blocks.*.attention.*": {"data": "b"}}},
    "heads": {"mesh": "tensor=2", "constraints": {"blocks.*.attention.q": {"tensor": "n"},
              "blocks.*.attention.k": {"tensor": "n"}, "blocks.*.attention.v": {"tensor": "n"},
              "blocks.*.mlp.0": {"tensor": "n"}}},
    "stages": {"mesh": "data=1", "stages": 2},
}  # fmt: skip
"""What is asked of the plan."""


def decoder() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """Return the model in float32, frozen, and a call of one token."""
    model = made(SIZES, torch.float32).requires_grad_(False)
    tokens, _ = prompt_of(SIZES, 1)
    return model, (tokens, torch.tensor([SIZES.length // 2]))


def planned(captured: autopar.capture.Captured, cluster: Cluster, asked: dict[str, Any]) -> Plan:
    """Return the plan of a decode step."""
    request = request_of({**asked, "microbatches": 1})
    request = replace(request, pins=replace(request.pins, mode="inference"))
    if "stages" in asked:
        return in_stages({1: captured.graph}, cluster, 2, request, "local-x2").plan
    return on_best_mesh(captured, cluster, 2, request, "local-x2").plan


def rank(plan: str, steps: int, patience: float) -> dict[str, float]:
    """Return the seconds of a step: the median of the quietest, the fastest, and what the thread worked in it."""
    model, example = decoder()
    pm = autopar.parallelize(model, 2, example, mode="inference", plan=plan, verify_capture=False)
    rows: list[tuple[float, float, float]] = []
    with torch.no_grad():
        for _ in range(5):
            pm(*example)
        for _ in range(steps):
            patience -= until_quiet(max(patience, 0.0)) if patience > 0 else 0.0
            dist.barrier()
            watch, began, worked = CpuWatch(), time.perf_counter(), time.thread_time()
            for _ in range(5):
                pm(*example)
            seconds = (time.perf_counter() - began) / 5
            rows.append((seconds, watch.others()[0], (time.thread_time() - worked) / 5))
    kept = quietest(rows, lambda row: row[1], 3)
    return {
        "median": statistics.median(row[0] for row in kept), "least": min(row[0] for row in rows),
        "others": max(row[1] for row in kept), "worked": statistics.median(row[2] for row in rows),
    }  # fmt: skip


def main() -> None:
    """Profile, plan, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--seconds", type=float, default=40.0, help="for measuring operators")
    parser.add_argument("--steps", type=int, default=60, help="times five steps of each layout")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine, a layout")
    asked = parser.parse_args()
    model, example = decoder()
    captured = autopar.capture(model, example)
    meshes = (Mesh.of(data=2), Mesh.of(tensor=2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        options = profiles.ProfilingOptions(asked.seconds, meshes=meshes)
        document = profiles.profile(captured.graph, load_cluster("local-x2"), "local-x2", "decoder", options)
        path.write_text(profiles.dumps(document), encoding="utf-8")
        cluster = load_cluster(path)
    load = document["provenance"]["load"]
    print(f"{json.dumps(asdict(SIZES))}, float32; load of the machine while profiling: {load}")
    for name in asked.layouts:
        plan = planned(captured, cluster, LAYOUTS[name])
        counted = [
            certificate.peak_of(stage, part.graph).n_bytes
            for stage, part in zip(plan.stages, cut(captured.graph, plan.starts), strict=True)
        ]
        said = [stage.price.memory_bytes for stage in plan.stages]
        with tempfile.TemporaryDirectory() as folder:
            planfile.save(path := Path(folder) / "plan.json", plan, captured.graph)
            ranks = autopar.run_local(rank, 2, str(path), asked.steps, asked.patience, timeout=900)
        seconds = max(found["median"] for found in ranks)
        least = max(found["least"] for found in ranks)
        worked, computed = max(found["worked"] for found in ranks), max(s.price.compute_seconds for s in plan.stages)
        computed += max(s.price.overhead_seconds for s in plan.stages)
        caches = sorted({s.text for of in plan.stages for b, s in of.buffers.items() if "cache" in b})
        print(
            f"{name:6} caches {','.join(caches):5} predicted {1e3 * plan.seconds:6.2f} ms, measured "
            f"{1e3 * seconds:6.2f} ms ({seconds / plan.seconds - 1:+.0%}; least {1e3 * least:.2f} ms "
            f"{least / plan.seconds - 1:+.0%}; beside {max(found['others'] for found in ranks):.2f} others)   "
            f"computing predicted {1e3 * computed:.2f} ms, worked {1e3 * worked:.2f} ms "
            f"({worked / computed - 1:+.0%})   memory predicted {max(said) / 2**20:.2f} MiB, counted "
            f"{max(counted) / 2**20:.2f} MiB ({max(said) / max(counted) - 1:+.1%})", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
