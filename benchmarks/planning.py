"""How long planning takes, in CPU-seconds of this process, from model object to plan, and how much memory.

    python benchmarks/planning.py            all cases, each in a process of its own
    python benchmarks/planning.py llama-8b   one case

Models are on the meta device: nothing is allocated. Imports are not counted.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

CASES = {
    # name: (model, layers, cluster, mesh, batch, sequence, memory limit)
    "llama-8b": ("llama", 32, "dgx-h100-x8", (("data", 8), ("tensor", 8)), 16, 8192, None),
    "llama-8b-32-layers-free": ("llama", 32, "dgx-h100-x8", (("data", 8), ("tensor", 8)), 16, 8192, 1e15),
    "llama-126-layers-free": ("llama", 126, "dgx-h100-x8", (("data", 8), ("tensor", 8)), 16, 8192, 1e15),
    "llama-126-layers": ("llama", 126, "dgx-h100-x8", (("data", 8), ("tensor", 8)), 16, 8192, None),
    "llama-8b-in-24-GiB": ("llama", 32, "dgx-h100-x8", (("data", 8), ("tensor", 8)), 16, 8192, 24 * 2.0**30),
    "gpt2-8": ("gpt2", 12, "dgx-h100", (("data", 8),), 8, 1024, None),
    "gpt2-2x4": ("gpt2", 12, "dgx-h100", (("data", 2), ("tensor", 4)), 8, 1024, None),
    "gpt2-2x2x2": ("gpt2", 12, "dgx-h100", (("data", 2), ("seq", 2), ("tensor", 2)), 8, 1024, None),
}


def model_of(name: str, layers: int, seq: int):  # type: ignore[no-untyped-def]
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(n_layer=layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=seq,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(torch.bfloat16)


def measure(case: str) -> dict[str, float | str]:
    """Plan one case in this process."""
    warnings.simplefilter("ignore")
    import torch

    import autopar.rules  # noqa: F401
    from autopar.capture import capture
    from autopar.planner.search import Options, plan_graph
    from hardware_profiles import load_cluster

    kind, layers, cluster, mesh, batch, seq, limit = CASES[case]
    model = model_of(kind, layers, seq)
    with torch.device("meta"):
        ids = torch.zeros(batch, seq, dtype=torch.long)

    def timed(fn: Callable[[], object]) -> tuple[object, float]:
        start = time.process_time()
        return fn(), time.process_time() - start

    found, capture_seconds = timed(lambda: capture(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}))
    profile, load_seconds = timed(lambda: load_cluster(cluster))
    options = Options(memory_limit_bytes=limit)
    plan, plan_seconds = timed(lambda: plan_graph(found.graph, profile, mesh, options))  # type: ignore[attr-defined]
    return {
        "case": case, "nodes": len(found.graph.nodes), "capture_cpu_s": round(capture_seconds, 2),  # type: ignore[attr-defined]
        "plan_cpu_s": round(load_seconds + plan_seconds, 2),
        "total_cpu_s": round(capture_seconds + load_seconds + plan_seconds, 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "step_ms": round(plan.price.seconds * 1e3, 1),  # type: ignore[attr-defined]
        "status": f"{plan.solution.status}, gap {plan.solution.gap:.2%}",  # type: ignore[attr-defined]
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, timeout=600, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
