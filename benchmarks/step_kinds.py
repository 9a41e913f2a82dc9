"""Seconds of training steps by kind of operator: priced for an H200 beside those measured on it.

    python benchmarks/step_kinds.py [MODEL ...]

The models and batches are those of benchmarks/first_hour.py, the measured seconds those of eager mode in
hardware_profiles/measured/h200. Nothing is computed: models have no values.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from gpu_rows.models import MODELS
from gpu_rows.op_kinds import kind_of

from autopar.api import capture
from autopar.planner.inter_op.estimating.block_costs import ALONE
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from hardware_profiles import load_cluster

MEASURED = Path(__file__).parent.parent / "hardware_profiles" / "measured" / "h200"
STEPS = {
    "GPT-2": ("a step, GPT-2, bf16", "first_hour"), "Llama-1B": ("a step, Llama-1B, bf16", "first_hour"),
    "ResNet-50": ("a step, ResNet-50, bf16-mixed", "first_hour_after_mends"),
    "ViT-L": ("a step, ViT-L, bf16", "first_hour_after_mends"),
    "T5-large": ("a step, T5-large, bf16", "first_hour_after_mends"),
    "Mixtral-like": ("a step, Mixtral-like, bf16", "first_hour_after_mends"),
}  # fmt: skip
"""Rows of the measurements, and the file that each stands in."""
NO_KIND = "Command Buffer Full"
"""A wait of the profiler's, not an operator."""
OWN_KINDS = (("to.dtype", "copy"), ("expert_block", "matmul"))
"""Operators of the graph that are other ones where they were measured."""
CLUSTER = "dgx-h200"


def measured(name: str) -> tuple[dict[str, float], float]:
    """Seconds by kind of operator, and of the whole step, in eager mode."""
    row, file = STEPS[name]
    rows = json.loads((MEASURED / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    ways = next(each["data"]["ways"] for each in rows if each["name"] == row and "ways" in each["data"])
    kinds = dict(ways["eager"]["kinds"])
    for operator, seconds, _ in ways["eager"]["longest"]:
        if operator == NO_KIND:
            kinds[kind_of(operator)] -= seconds
    return kinds, ways["eager"]["seconds"]


def priced(name: str, cluster_name: str = CLUSTER) -> tuple[dict[str, float], float]:
    """Seconds by kind of operator, and of the whole step, on one device of a cluster."""
    with torch.device("meta"):
        model, batch = MODELS[name](False)
    dtype = torch.float32 if name == "ResNet-50" else torch.bfloat16
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    mixed = "bf16-mixed" if name == "ResNet-50" else None
    with torch.device("meta"):
        graph = capture(model.to(dtype).train(), batch, precision=mixed).graph
    cluster = load_cluster(cluster_name)
    plan = plan_graph(graph, cluster, ALONE, Options(), devices=(0,))
    prices, rules = pricer(cluster, ALONE, (0,)), rules_of(graph)
    seconds: defaultdict[str, float] = defaultdict(float)
    for node, rule in zip(graph.nodes, rules, strict=True):
        if node.kind == "op" and rule is not None:
            strategy = strategy_named(graph, node, rule, plan.ops[node.name])
            kind = next((k for part, k in OWN_KINDS if part in node.target), kind_of(node.target))
            seconds[kind] += prices.compute(graph, node, rule, strategy).total
    seconds["optimizer"] += plan.price.optimizer_seconds
    seconds["pointwise"] += plan.price.overhead_seconds
    return dict(seconds), sum(seconds.values())


def main(names: list[str]) -> None:
    print("| model | kind | priced ms | measured ms | error |\n|---|---|---|---|---|")
    for name in names or STEPS:
        (mine, whole), (theirs, step) = priced(name), measured(name)
        busy = sum(theirs.values())
        for kind in sorted({*mine, *theirs}, key=lambda k: -theirs.get(k, 0.0)):
            a, b = mine.get(kind, 0.0), theirs.get(kind, 0.0)
            if max(a, b) > 0.01 * busy:
                print(f"| {name} | {kind} | {1e3 * a:.2f} | {1e3 * b:.2f} | {a / b - 1:+.0%} |" if b else
                      f"| {name} | {kind} | {1e3 * a:.2f} | 0 | |")  # fmt: skip
        print(f"| {name} | device busy | {1e3 * whole:.2f} | {1e3 * busy:.2f} | {whole / busy - 1:+.0%} |")
        print(f"| {name} | step | {1e3 * whole:.2f} | {1e3 * step:.2f} | {whole / step - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
