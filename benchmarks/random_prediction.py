"""How far measured steps and memory are from predicted ones, over random plans on local ranks with a profile.

    python benchmarks/random_prediction.py [--plans 4] [--ranks 1 2 4] [--models mlp gpt2 llama resnet18 t5]

For each model and number of ranks: the operators are profiled (`autopar profile`, whole and as cut), plans are made
with random wishes (a mesh or stages with a schedule, microbatches, random pins of operators, recomputation), and each
is run on gloo ranks with one thread each. Prints a line a plan, and the medians. No plan was looked at before; those
that the model cannot have are drawn anew. Where ranks outnumber the processors, seconds say little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prediction import MODELS, made

import autopar
from autopar import planfile as files
from autopar.capture.microbatches import first_part
from autopar.errors import AutoparError
from autopar.profiling import document as profiles
from autopar.profiling.by_kind import peak_bytes
from autopar.profiling.quiet import QUIET, CpuWatch, quietest, until_quiet
from autopar.rules.registry import rules_of
from autopar.rules.strategy import options_of
from autopar.words.labels import op_labels
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
DRAWS = 20
"""Draws for one plan until the model can have one."""


def plan_options(graph: Any, ranks: int, rows: int, rng: random.Random) -> dict[str, Any]:
    """Random wishes for so many ranks."""
    given: dict[str, Any] = {"microbatches": rng.choice([m for m in (1, 2, 4) if rows % m == 0])}
    stages = rng.choice([n for n in (1, 2, 4) if ranks % n == 0])
    if stages > 1:
        given |= {"stages": stages, "schedule": rng.choice(SCHEDULES)}
        given["microbatches"] = rng.choice([m for m in (2, 4) if rows % m == 0 and m >= stages] or [stages])
    each = ranks // stages
    shapes = [{"a": each}] if each < 4 else [{"a": each}, {"a": 2, "b": each // 2}]
    given["mesh"] = rng.choice(shapes)
    labels, rules = op_labels(graph), rules_of(graph)
    hot = [i for i, node in graph.of_kind("op") if node.hot and rules[i] is not None]
    pins: dict[str, dict[str, str]] = {}
    for i in rng.sample(hot, min(len(hot), 3)) if each > 1 else ():
        options = [o for o in options_of(graph, graph.nodes[i], rules[i]) if o]
        if options:
            pins[labels[graph.nodes[i].name]] = {rng.choice(list(given["mesh"])): rng.choice(options)}
    return given | {"constraints": pins, "recompute": rng.choice(["none", ()])}


def rank(name: str, text: str, steps: int, patience: float) -> dict[str, Any]:
    """Seconds of the quietest steps of a plan, and this rank's most bytes."""
    model, batch = made(name)
    plan_of = json.loads(text)
    torch.set_num_threads(1)
    module = autopar.parallelize(model, dist.get_world_size(), batch, plan=plan_of["path"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        module.train_step(**batch, optimizer=optimizer, **plan_of["more"])

    step()
    rows = []
    for _ in range(steps):
        patience -= until_quiet(patience)
        dist.barrier()
        watch, start = CpuWatch(), time.perf_counter()
        step()
        dist.barrier()
        seconds = time.perf_counter() - start
        rows.append((seconds, watch.others()[0]))
    kept = quietest(rows, lambda row: row[1], 3)
    state = [x for one in optimizer.state.values() for x in one.values() if isinstance(x, torch.Tensor)]
    most = peak_bytes(step, [*module.parameters(), *state], batch, "cpu")
    return {"seconds": statistics.median(row[0] for row in kept), "others": max(row[1] for row in kept), "bytes": most}


def measure(name: str, ranks: int, plans: int, seconds: float, steps: int, seed: int) -> list[dict[str, Any]]:
    """One model on so many ranks."""
    rng, rows = random.Random(f"{name} {ranks} {seed}"), []
    model, batch = made(name)
    n_rows = next(iter(batch.values())).shape[0]
    plain = load_cluster(f"local-x{ranks}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        captured = autopar.capture(model, (), example_kwargs=batch)
        meshes = (Mesh.of(a=ranks),) if ranks > 1 else ()
        options = profiles.ProfilingOptions(seconds, min(2, ranks), meshes)
        path.write_text(profiles.dumps(profiles.profile(captured.graph, plain, plain.name, name, options)))
        for number in range(plans):
            for _ in range(DRAWS):
                given = plan_options(captured.graph, ranks, n_rows, rng)
                try:
                    plan = autopar.plan(model, str(path), batch, captured=captured, **given)
                    break
                except AutoparError:
                    continue
            else:
                continue
            file = Path(folder) / f"{number}.json"
            part = first_part(((), batch), plan.microbatches)[1]
            files.save(file, plan, autopar.capture(model, (), example_kwargs=part).graph)
            more = {"microbatches": plan.microbatches} if len(plan.stages) == 1 else {}
            text = json.dumps({"path": str(file), "more": more})
            ranked = autopar.run_local(rank, ranks, name, text, steps, 30.0, timeout=600)
            predicted = max(stage.price.memory_bytes for stage in plan.stages)
            row = {
                "model": name, "ranks": ranks, "wishes": {k: str(v) for k, v in given.items()},
                "predicted": plan.seconds, "measured": ranked[0]["seconds"], "others": ranked[0]["others"],
                "predicted_bytes": predicted, "measured_bytes": max(r["bytes"] for r in ranked),
            }  # fmt: skip
            rows.append(row)
            tell(row)
    return rows


def tell(row: dict[str, Any]) -> None:
    """One line of a plan."""
    own, other = row["measured"], row["predicted"]
    most, counted = row["measured_bytes"], row["predicted_bytes"]
    print(
        f"{row['model']:8} {row['ranks']} {row['wishes']}: {1e3 * own:.1f} ms, predicted {1e3 * other:.1f} "
        f"({other / own - 1:+.0%}); {most / 2**20:.1f} MiB, predicted {counted / 2**20:.1f} "
        f"({counted / most - 1:+.1%}); others {row['others']:.2f}",
        flush=True,
    )


def ranks_agree(rows: list[dict[str, Any]]) -> float:
    """Spearman's correlation of predicted and measured seconds."""
    orders = [[i for _, i in sorted((row[key], i) for i, row in enumerate(rows))] for key in ("predicted", "measured")]
    places = [{i: place for place, i in enumerate(order)} for order in orders]
    n = len(rows)
    return 1 - 6 * sum((places[0][i] - places[1][i]) ** 2 for i in range(n)) / max(1, n * (n * n - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=4, help="of a model on a number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt2", "llama", "resnet18", "t5"], choices=MODELS)
    parser.add_argument("--seconds", type=float, default=30.0, help="for a profile")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row for ranks in asked.ranks for name in asked.models
        for row in measure(name, ranks, asked.plans, asked.seconds, asked.steps, asked.seed)
    ]  # fmt: skip
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    of_bytes = [row["predicted_bytes"] / row["measured_bytes"] - 1 for row in rows]
    quiet = [abs(e) for e, row in zip(errors, rows, strict=True) if row["others"] <= QUIET]
    print(
        f"{len(rows)} plans: seconds median {statistics.median(map(abs, errors)):.1%} (quiet ones "
        f"{statistics.median(quiet) if quiet else float('nan'):.1%}), order {ranks_agree(rows):.2f}; memory median "
        f"{statistics.median(map(abs, of_bytes)):.1%}, {min(of_bytes):+.1%} to {max(of_bytes):+.1%}"
    )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
