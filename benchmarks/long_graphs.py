"""Graphs of thousands of operators: state-space and recurrent models whose scans are loops over time, planned on 2x2.

    python benchmarks/long_graphs.py [--only rwkv-64-4 ...]

Prints operators, CPU-seconds of capture and planning, and the gap that was proven, as the table of
docs/measurements/capture.md. Names are the family, the tokens of a row and the layers; the rest comes from the zoo of
the tests, at its sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

ZOO = ("zamba", "rwkv", "recurrent_gemma", "jamba")
LOOPS = ("mamba-64-4", "mamba-256-2", "rwkv-64-4")
HIDDEN, VOCAB, ROWS = 256, 512, 8


def prepared(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model and its example."""
    if name in ZOO:
        from zoo_wide import EVERY

        case = EVERY[name]()
        return case.model, case.args, case.kwargs
    from transformers import MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

    family, tokens, layers = name.split("-")
    common = {"hidden_size": HIDDEN, "num_hidden_layers": int(layers), "vocab_size": VOCAB, "use_cache": False}
    model: Any = MambaForCausalLM(MambaConfig(**common)) if family == "mamba" else RwkvForCausalLM(RwkvConfig(**common))
    ids = torch.randint(0, VOCAB, (ROWS, int(tokens)))
    return model.train(), (), {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=ZOO + LOOPS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    from family_trial import CLUSTER, MESH

    from autopar.capture import capture
    from autopar.planner.intra_op.mesh_plan import Options, plan_graph
    from hardware_profiles import load_cluster

    cluster = load_cluster(CLUSTER)
    print("| model | operators | capture s | plan s | gap |\n|---|---|---|---|---|")
    for name in asked.only:
        model, args, kwargs = prepared(name)
        began = time.process_time()
        captured = capture(model, args, kwargs)
        traced = time.process_time()
        plan = plan_graph(captured.graph, cluster, MESH, Options())
        planned = time.process_time()
        operators = sum(node.kind == "op" for node in captured.graph.nodes)
        gap = f"{plan.solution.gap:.1%}" if plan.solution is not None else "?"
        print(f"| {name} | {operators:,} | {traced - began:.1f} | {planned - traced:.1f} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
