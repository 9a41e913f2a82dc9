"""How far measured steps of pipelined plans are from simulated ones, with a measured profile of each model.

    python benchmarks/prediction.py [--models gpt2 mlp] [--seconds 40] [--steps 7] [--rounds 2]

Of every model: its ops, the transfers and the executor are profiled on two processes (`autopar profile`), plans in two
stages are made with that profile for several schedules and numbers of microbatches, and run on two gloo ranks with one
thread each. Plans take turns, step by step. What stands in the profile was measured of ops and transfers, never of the
steps. Writes `hardware_profiles/measured/prediction_local.json`: all numbers, with those of each stage.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from speed_one_device import gpt2, llama
from speed_one_device import resnet18 as resnet18_of
from torch import nn

import autopar
from autopar import planfile as files
from autopar.planner.inter_op.replan import Replanner
from autopar.planner.intra_op.mesh_plan import Options
from autopar.planner.planning import in_stages
from autopar.plans.request import request_of
from autopar.profiling import document as profiles
from autopar.profiling.quiet import QUIET, CpuWatch, quietest, until_quiet
from autopar.runtime.as_module.spreading import pipelined
from hardware_profiles import load_cluster

OUT = Path(__file__).parent.parent / "hardware_profiles" / "measured" / "prediction_local.json"
CASES = [(schedule, count) for schedule in ("gpipe", "1f1b", "zb-h1") for count in (2, 4, 8)]
Made = tuple[nn.Module, dict[str, Any]]


class Mlp(nn.Module):
    """Eight layers of 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
        self.head = nn.Linear(1024, 100)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), labels)


def mlp() -> Made:
    return Mlp(), {"x": torch.randn(256, 1024), "labels": torch.randint(0, 100, (256,))}


def double(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1), nn.GroupNorm(4, c_out), nn.ReLU(),
        nn.Conv2d(c_out, c_out, 3, padding=1), nn.GroupNorm(4, c_out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Levels of 16, 32 and 64 channels; skip connections cross the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(3, 16), double(16, 32), double(32, 64)
        self.rise2, self.up2 = nn.ConvTranspose2d(64, 32, 2, stride=2), double(64, 32)
        self.rise1, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), double(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # [b 3 y x], [b y x]
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.bottom(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([self.rise2(y), b], dim=1))
        return F.cross_entropy(self.head(self.up1(torch.cat([self.rise1(y), a], dim=1))), labels)


def unet() -> Made:
    return UNet(), {"x": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4, 64, 64))}


def resnet18() -> Made:
    return resnet18_of()[0], {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 100, (4,))}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=2048, d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_decoder_layers=4, num_heads=8,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(2, 2048, (4, 96))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids.flip(1)}


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": mlp, "gpt2": gpt2, "llama": llama, "resnet18": resnet18, "unet": unet, "t5": t5,
}  # fmt: skip


def made(name: str) -> Made:
    torch.manual_seed(0)
    return MODELS[name]()


def rank(name: str, texts: list[str], steps: int, patience: float) -> list[dict[str, Any]]:
    """Seconds of every step and action, of plans in turn; waits ``patience`` seconds in all for a quiet machine."""
    model, kwargs = made(name)
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    runs = []
    for text in texts:
        plan = files.loads(text, captured.graph)
        module = pipelined(copy.deepcopy(model), captured, plan)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        batch = {k: v.repeat(plan.microbatches, *[1] * (v.dim() - 1)) for k, v in kwargs.items()}
        runs.append((module, optimizer, batch))
    found: list[list[tuple[float, float, Any]]] = [[] for _ in runs]
    for i in range(len(runs)):
        one_step(*runs[i])
    while patience > 0:  # all ranks see the same numbers, so they go the same way
        counts = [sum(row[1] <= QUIET for row in own) for own in found]
        if min(counts) >= steps:
            break
        i = counts.index(min(counts))
        patience -= until_quiet(patience)
        found[i].append(one_step(*runs[i]))
        patience -= found[i][-1][0] if found[i][-1][1] > QUIET else 0.0
    for i, own in enumerate(found):
        while len(own) < 3:
            own.append(one_step(*runs[i]))
    return [of_steps(own) for own in found]


def one_step(module: Any, optimizer: Any, batch: dict[str, Any]) -> tuple[float, float, Any]:
    """Seconds of a step, processors that others kept busy meanwhile, and when the actions were."""
    spans = module.record()
    dist.barrier()
    watch, start = CpuWatch(), time.perf_counter()
    module.train_step(**batch, optimizer=optimizer)
    dist.barrier()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    others, _ = watch.others()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), others, spans


def of_steps(rows: list[tuple[float, float, Any]]) -> dict[str, Any]:
    """Medians over the steps during which the machine did nothing else (or the quietest)."""
    kept = quietest(rows, lambda row: row[1], 1)
    actions: dict[str, list[float]] = {}
    for _, _, spans in kept:
        for what, _, begin, end in spans:
            kind = next(c for c in what if c in "FBIW")
            actions.setdefault(what[: what.index(kind) + 1], []).append(end - begin)
    return {
        "seconds": statistics.median(row[0] for row in kept), "of_all": statistics.median(row[0] for row in rows),
        "steps": len(kept), "others": max(row[1] for row in kept),
        "actions": {k: [statistics.median(v), min(v)] for k, v in actions.items()},
    }  # fmt: skip


def measure(name: str, seconds: float, steps: int, patience: float) -> dict[str, Any]:
    """One model: profile, plan, run."""
    model, kwargs = made(name)
    captured = autopar.capture(model, (), example_kwargs=kwargs)
    plain = load_cluster("local-x2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        began = time.perf_counter()
        document = profiles.profile(captured.graph, plain, "local-x2", name, profiles.ProfilingOptions(seconds))
        path.write_text(profiles.dumps(document), encoding="utf-8")
        took = time.perf_counter() - began
        cluster = load_cluster(path)
    rows, texts = [], []
    for schedule, count in CASES:
        asked = request_of({"stages": 2, "schedule": schedule, "microbatches": count, "mesh": "data=1"})
        found = in_stages({count: captured.graph}, cluster, 2, asked, "local-x2")
        old, _ = Replanner(captured.graph, found.plan, plain, Options()).simulated()
        times = found.timeline.times
        predicted = {
            f"{s}{kind}": times.seconds(s, kind) for s in range(2) for kind in ("FIW" if schedule == "zb-h1" else "FB")
        }
        texts.append(files.dumps(found.plan, captured.graph))
        rows.append({
            "model": name, "schedule": schedule, "microbatches": count, "simulated_seconds": found.plan.seconds,
            "simulated_without": old.seconds, "simulated_actions": predicted,
        })  # fmt: skip
    ranks = autopar.run_local(rank, 2, name, texts, steps, patience, timeout=1200 + patience)
    for i, row in enumerate(rows):
        row.update({f"measured_{k}": ranks[0][i][k] for k in ("seconds", "of_all", "steps", "others")})
        row["measured_actions"] = {k: v for r in ranks for k, v in r[i]["actions"].items()}
        row["error"] = row["measured_seconds"] / row["simulated_seconds"] - 1
        tell(row)
    return {"model": name, "profile_seconds": took, "load": document["provenance"]["load"], "rows": rows}


def tell(row: dict[str, Any]) -> None:
    """One line of a plan: its step, and every stage's actions, measured over simulated."""
    own, other = row["measured_seconds"], row["simulated_seconds"]
    actions = (
        f"{k} {1e3 * v[0]:.1f}/{1e3 * row['simulated_actions'][k]:.1f}"
        for k, v in sorted(row["measured_actions"].items())
    )
    print(
        f"{row['model']:8} {row['schedule']:5} {row['microbatches']}: measured {1e3 * own:6.1f} ms "
        f"({row['measured_steps']} steps beside {row['measured_others']:.2f} others), simulated {1e3 * other:6.1f} "
        f"({row['error']:+.1%}; fitted cluster {own / row['simulated_without'] - 1:+.1%})  " + "  ".join(actions),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seconds", type=float, default=30.0, help="for measuring a model's ops")
    parser.add_argument("--steps", type=int, default=3, help="quiet ones, of every plan")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine, a model")
    parser.add_argument("--out", type=Path, help=f"where to write the numbers; for all models {OUT.name}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    target = asked.out or (OUT if len(asked.models) == len(MODELS) else None)
    found: list[dict[str, Any]] = []
    for name in asked.models:
        found.append(measure(name, asked.seconds, asked.steps, asked.patience))
        document = {
            "date": datetime.date.today().isoformat(), "torch": torch.__version__, "processor": profiles.processor(),
            "processors": len(os.sched_getaffinity(0)), "load_before": round(load, 2), "steps": asked.steps,
            **summary([row for one in found for row in one["rows"]]), "models": found,
        }  # fmt: skip
        if target is not None:
            text = json.dumps(json.loads(json.dumps(document), parse_float=lambda x: float(f"{float(x):.4g}")))
            target.write_text(text.replace('{"model"', '\n{"model"') + "\n", encoding="utf-8")
    said = summary([row for one in found for row in one["rows"]])
    print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in said.items()))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors over plans: of all, and of those whose steps were measured on a quiet machine."""
    quiet = [row for row in rows if row["measured_others"] <= QUIET]
    return {
        "plans": len(rows), "mean_absolute_error": statistics.mean(abs(row["error"]) for row in rows),
        "worst_error": max((row["error"] for row in rows), key=abs), "quiet_plans": len(quiet),
        "quiet_mean_absolute_error": statistics.mean(abs(row["error"]) for row in quiet) if quiet else None,
        "without_profile": statistics.mean(abs(r["measured_seconds"] / r["simulated_without"] - 1) for r in rows),
    }  # fmt: skip


if __name__ == "__main__":
    main()
