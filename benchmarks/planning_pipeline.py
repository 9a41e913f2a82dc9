"""How long it takes to plan a pipeline for a large cluster, in CPU-seconds of this process after capture, and memory.

    python benchmarks/planning_pipeline.py              all cases, each in a process of its own
    python benchmarks/planning_pipeline.py 405b-512     one case

The search is over the number of groups, mesh shapes of 1 and 2 axes, the schedules 1F1B, ZB-H1, interleaved 1F1B and
ZB-V, what is recomputed, and how every parameter and gradient is kept (ZeRO). The number of microbatches is given. The
models are on the meta device: nothing is allocated.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

TWO_KINDS = Path(__file__).parent / "clusters" / "h100-a100-512.toml"

CASES = {
    # name: (hidden, ffn, heads, kv heads, layers, sequence, sequences of a microbatch, microbatches, cluster, devices)
    "405b-512": (16384, 53248, 128, 8, 126, 8192, 16, 16, "dgx-h100-x64", 512),
    "405b-512-more-microbatches": (16384, 53248, 128, 8, 126, 8192, 8, 32, "dgx-h100-x64", 512),
    "405b-2048": (16384, 53248, 128, 8, 126, 8192, 64, 16, "dgx-h100-x256", 2048),
    "405b-16384": (16384, 53248, 128, 8, 126, 8192, 128, 16, "dgx-h100-x2048", 16384),
    "405b-two-kinds-512": (16384, 53248, 128, 8, 126, 8192, 16, 16, str(TWO_KINDS), 512),
    "32-layers-512": (16384, 53248, 128, 8, 32, 8192, 16, 16, "dgx-h100-x64", 512),
    "64-layers-512": (16384, 53248, 128, 8, 64, 8192, 16, 16, "dgx-h100-x64", 512),
    "405b-128": (16384, 53248, 128, 8, 126, 8192, 4, 16, "dgx-h100-x16", 128),
    "70b-64": (8192, 28672, 64, 8, 80, 8192, 8, 16, "dgx-h100-x8", 64),
}


def measure(case: str) -> dict[str, float | str]:
    """Plan one case in this process."""
    warnings.simplefilter("ignore")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar.rules  # noqa: F401
    from autopar.capture import capture
    from autopar.planner.pipeline import PipelineOptions, plan_pipeline
    from hardware_profiles import load_cluster

    hidden, ffn, heads, kv_heads, layers, seq, batch, microbatches, cluster, n = CASES[case]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=128256, max_position_embeddings=seq, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    start = time.process_time()
    graph = capture(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}).graph
    captured = time.process_time()
    found = plan_pipeline(graph, load_cluster(cluster), n, PipelineOptions(microbatches=microbatches))
    planned = time.process_time()
    return {
        "case": case,
        "capture s": round(captured - start, 1),
        "plan s": round(planned - captured, 1),
        "GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "step s": round(found.plan.seconds, 2),
        "plan": found.tried[0][0],
        "blocks recomputed": sum(len(stage.plan.recompute) for stage in found.plan.stages),
    }


def main() -> None:
    """Print a line for every case."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True)
        print(done.stdout.strip() or f"{case}: {done.stderr.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
