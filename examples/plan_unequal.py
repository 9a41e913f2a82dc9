"""A GPT planned for a cluster of unequal devices, and simulated. ``python examples/plan_unequal.py [trace.json]``

Four H100, three A100 and two L40S: nine devices of three kinds, nodes of different sizes, and a link that is slower in
one direction (``examples/clusters/unequal.toml``). The planner may give stages different numbers of devices and layers.
Nothing is run. The trace of the simulated step opens in ui.perfetto.dev.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.planner.planning import in_stages
from autopar.plans.request import request_of
from autopar.plans.stage_graphs import cut
from autopar.report import trace
from cost_models.schedules import grid
from hardware_profiles import load_cluster

CONFIG = GPT2Config(
    vocab_size=50304, n_positions=1024, n_embd=2048, n_layer=24, n_head=16, use_cache=False, attn_implementation="sdpa"
)
MICROBATCHES = 16


def main(path: Path) -> None:
    cluster = load_cluster(Path(__file__).parent / "clusters" / "unequal.toml")
    print(cluster.describe())
    with torch.device("meta"):
        model, ids = GPT2LMHeadModel(CONFIG).bfloat16(), torch.zeros(4, 1024, dtype=torch.long)
    captured = autopar.capture(model, {"input_ids": ids, "labels": ids})
    request = request_of({"stages": "auto", "schedule": "1f1b", "microbatches": MICROBATCHES})
    found = in_stages({MICROBATCHES: captured.graph}, cluster, cluster.n_devices, request, cluster.name)
    plan, timeline = found.plan, found.timeline
    print(f"\n{plan.seconds * 1e3:.1f} ms a step, {timeline.bubble_fraction:.1%} of it idle")
    layers = []
    for stage, part in zip(plan.stages, cut(captured.graph, plan.starts), strict=True):
        kinds = " ".join(sorted({cluster.devices[d].name for d in stage.devices}))
        found_here = (re.match(r"transformer\.h\.(\d+)", node.module) for node in part.graph.nodes if node.hot)
        own = sorted({int(match[1]) for match in found_here if match})
        mesh = " x ".join(f"{name}={n}" for name, n in stage.mesh)
        held = f"layers {own[0]} to {own[-1]}" if own else "no layer"
        print(f"stage {part.number}: {held}, begins at {stage.first}, devices {list(stage.devices)} ({kinds}), {mesh}")
        layers += own
    assert sorted(set(layers)) == list(range(CONFIG.n_layer)), "no layer is lost"
    assert len({len(stage.devices) for stage in plan.stages}) > 1, "groups of different sizes"
    print(grid(timeline))
    print("the best of what was simulated:")
    for what, seconds in found.tried[:6]:
        print(f"  {seconds * 1e3:7.1f} ms  {what}")
    trace.write(path, trace.predicted(timeline))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    print(f"trace: {len(events)} events")
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") <= 1.001e6 * timeline.makespan_seconds


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "trace.json")
