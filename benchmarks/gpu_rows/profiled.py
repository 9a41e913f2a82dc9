"""``autopar profile`` on this device: a profile file, and the plan's seconds with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gpu_rows.models import make
from gpu_rows.table import Result


def profiled(device: str, quick: bool, seconds: float, output: str) -> Result:
    """Profile GPT-2 for some seconds, keep the file, and price GPT-2 with it."""
    import autopar
    from autopar.plans.clusters import get_cluster
    from autopar.plans.detection import cluster_of_ranks, record_here
    from autopar.profiling import document as documents

    name = "local-x1" if device == "cpu" else cluster_of_ranks([record_here()])
    model, batch = make("GPT-2", "cpu", quick, torch.float32 if device == "cpu" else torch.bfloat16)
    captured = autopar.capture(model, batch)
    options = documents.ProfilingOptions(seconds, 1, (), 4000, timeout=3 * seconds + 60, device=device)
    document = documents.profile(captured.graph, get_cluster(name), name, "GPT-2", options)
    Path(output).write_text(documents.dumps(document), encoding="utf-8")
    before, after = (
        autopar.plan(model, cluster, batch, captured=captured, mesh={"data": 1}).seconds for cluster in (name, output)
    )
    ops = len(document.get("ops", ())) or len(json.dumps(document)) // 100
    priced = f"{1e3 * before:.2f} ms by formulas, {1e3 * after:.2f} ms by the profile"
    said = f"{ops} ops measured; GPT-2 on one of {name}: {priced}"
    return Result(f"{said}; file {Path(output).name}", True, {"formulas": before, "profile": after})


__all__ = ["profiled"]
