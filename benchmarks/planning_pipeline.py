"""How long it takes to plan a pipeline for a large cluster, in CPU-seconds of this process after capture, and memory.

    python benchmarks/planning_pipeline.py              all cases, each in a process of its own
    python benchmarks/planning_pipeline.py 405b-512     one case

The search is over the number of microbatches (what divides the batch, in powers of two), the number of groups, mesh
shapes of 1 and 2 axes, the schedules 1F1B, ZB-H1, interleaved 1F1B and ZB-V, what is recomputed, and how every
parameter and gradient is kept (ZeRO). The models are on the meta device: nothing is allocated. The graphs of other
sizes than the two captured ones are made within the time of planning.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).parent
TWO_KINDS = HERE / "clusters" / "h100-a100-512.toml"
ETHERNET = HERE.parent / "examples" / "clusters" / "v100-8x8-25g.toml"
NVLINK = HERE / "clusters" / "v100-8x8-nvlink.toml"

CASES = {
    # name: (hidden, ffn, heads, kv heads, layers, sequence, sequences of a batch, cluster, devices)
    "405b-512": (16384, 53248, 128, 8, 126, 8192, 256, "dgx-h100-x64", 512),
    "405b-2048": (16384, 53248, 128, 8, 126, 8192, 1024, "dgx-h100-x256", 2048),
    "405b-16384": (16384, 53248, 128, 8, 126, 8192, 2048, "dgx-h100-x2048", 16384),
    "405b-two-kinds-512": (16384, 53248, 128, 8, 126, 8192, 256, str(TWO_KINDS), 512),
    "32-layers-512": (16384, 53248, 128, 8, 32, 8192, 256, "dgx-h100-x64", 512),
    "64-layers-512": (16384, 53248, 128, 8, 64, 8192, 256, "dgx-h100-x64", 512),
    "405b-128": (16384, 53248, 128, 8, 126, 8192, 64, "dgx-h100-x16", 128),
    "70b-64": (8192, 28672, 64, 8, 80, 8192, 128, "dgx-h100-x8", 64),
}
GPT_39B = {
    # GPT-39B (Alpa's shape: 48 layers, 8192, 64 heads, 1,024 tokens), a batch of 1,024 sequences, 1F1B
    "gpt-39b-25-gbit": str(ETHERNET),
    "gpt-39b-nvlink": str(NVLINK),
}


def measure(case: str) -> dict[str, float | str]:
    """Plan one case in this process."""
    warnings.simplefilter("ignore")
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    import autopar.rules  # noqa: F401
    from autopar.capture import capture
    from autopar.capture.microbatches import numbers_of_parts, resized
    from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
    from autopar.words.graph import Graph
    from cost_models.schedules import usual
    from hardware_profiles import load_cluster

    gpt = case in GPT_39B
    if gpt:
        cluster, batch = GPT_39B[case], 1024
        n, seq = 64, 1024
        shape = GPT2Config(
            vocab_size=51200, n_positions=seq, n_embd=8192, n_layer=48, n_head=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
    else:
        hidden, ffn, heads, kv_heads, layers, seq, batch, cluster, n = CASES[case]
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=128256, max_position_embeddings=seq, use_cache=False,
        )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(shape).to(torch.float16) if gpt else LlamaForCausalLM(config).to(torch.bfloat16)

    def graph(rows: int) -> Graph:
        ids = torch.zeros(rows, seq, dtype=torch.long, device="meta")
        return capture(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}).graph

    start = time.process_time()
    whole, half = graph(batch), graph(batch // 2)
    captured = time.process_time()
    graphs = {m: resized(whole, half, batch, batch // 2, batch // m) for m in numbers_of_parts(batch)}
    asked = PipelineOptions(1, schedules=("1f1b",) if gpt else usual())
    found = plan_pipeline(graphs, load_cluster(cluster), n, asked)
    planned = time.process_time()
    return {
        "case": case,
        "capture s": round(captured - start, 1),
        "plan s": round(planned - captured, 1),
        "GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "step s": round(found.plan.seconds, 2),
        "plan": found.tried[0][0],
        "blocks recomputed": sum(len(stage.recompute) for stage in found.plan.stages),
    }


def main() -> None:
    """Print a line for every case."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    for case in (*CASES, *GPT_39B):
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True)
        print(done.stdout.strip() or f"{case}: {done.stderr.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
