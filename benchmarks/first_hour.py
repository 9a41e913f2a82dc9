"""The first hour on GPUs: what is right, how fast, how well predicted; as one table and one JSON file.

    python benchmarks/first_hour.py [--device cuda|cpu] [--ranks N] [--quick] [--seconds 480]

Nothing here needs the network. Rows stand in the order of what they tell. Each has a limit of seconds and runs in a
process that it cannot take others down with; the JSON file is written again after every row, so that running out of
time loses nothing. ``--device cpu`` runs the same on processors. The rows are in ``benchmarks/gpu_rows``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_rows.dropout import with_dropout
from gpu_rows.generating import generated
from gpu_rows.kernels import kernels
from gpu_rows.profiled import profiled
from gpu_rows.programs import program
from gpu_rows.ranks import beside_others, on_ranks
from gpu_rows.rates import rates
from gpu_rows.rules import rules
from gpu_rows.steps import steps
from gpu_rows.table import Result, Row, Table
from gpu_rows.workers import Workers

from autopar.cli.common import UsageError, where_to_run
from autopar.errors import AutoparError
from autopar.plans.detection import cluster_of_ranks, record_here


@dataclass(frozen=True)
class PlanRequest:
    """A row to be run: its name, its function and arguments, and its limit in seconds."""

    name: str
    fn: Callable[..., Result]
    args: tuple[Any, ...]
    limit: float


def machine(n: int, device: str, said: str) -> dict[str, str]:
    """What this machine is."""
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": f"{torch.__version__}, Python {sys.version.split()[0]}",
        "runs on": f"{said}, {platform.machine()}, {os.cpu_count()} cores",
    }
    if device == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        about["libraries"] = f"CUDA {torch.version.cuda}, NCCL {version}, cuDNN {torch.backends.cudnn.version()}"
        record = record_here()
        about["GPU"] = f"{record.product}, {record.memory_bytes / 2**30:.1f} GiB"
        try:
            about["taken for"] = cluster_of_ranks([record] * n)
        except AutoparError as error:
            about["taken for"] = f"FAILED: {error}"
    return about


def rows(n: int, device: str, quick: bool, output: Path) -> Iterator[PlanRequest]:
    """All rows in the order of what they tell."""

    def ranks(name: str, check: str, *args: Any, limit: float = 60.0) -> PlanRequest:
        return PlanRequest(name, on_ranks, (n, device, limit, check, *args), limit)

    def step(name: str, *ways: str, precision: str = "bf16", limit: float = 60.0, **options: Any) -> PlanRequest:
        if quick or device == "cpu":
            precision = "float32"
        shown = "".join(f", {key} {value}" for key, value in options.items())
        args = (name, ways, precision, device, quick, options)
        return PlanRequest(f"a step, {name}, {precision}{shown}", steps, args, limit)

    def whole(name: str, layers: int, plans: int = 2) -> PlanRequest:
        return PlanRequest(f"program on 2x2, {name}", program, (name, device, quick, layers, plans), 60.0)

    yield PlanRequest("rules on the device", rules, (device, quick), 120.0)
    yield step("GPT-2", "eager", "autopar", "compile", "step", "compiled", *(["recorded"] if device != "cpu" else []))
    yield step("Llama-1B", "eager", "autopar")
    yield step("GPT-2", "eager", "autopar", dropout=0.1)
    yield whole("GPT-2", 2)
    yield ranks("collectives and channels", "collectives")
    yield ranks("random bits", "random_bits")
    yield ranks("numbers, best plan", "same_numbers", {})
    half = {"stages": 2, "schedule": "1f1b", "microbatches": 4}
    if n > 1 and n % 2 == 0 and not quick:
        yield ranks("numbers, 1f1b", "same_numbers", half)
        yield ranks("numbers, zb-h1", "same_numbers", {**half, "schedule": "zb-h1"})
        yield ranks("no waiting, 1f1b", "no_waiting", half)
    yield ranks("no waiting, best plan", "no_waiting", {})
    if not quick:
        yield ranks("a step as a CUDA graph", "cuda_graph")
    yield PlanRequest("generate, GPT-2", generated, ("GPT-2", device, quick), 60.0)
    if not quick:
        yield PlanRequest("generate, Llama-1B", generated, ("Llama-1B", device, quick), 60.0)
    yield PlanRequest("kernels", kernels, (device, quick, 2.0 if quick else 60.0), 90.0)
    yield PlanRequest("rates under load", rates, (device, quick, 2.0 if quick else 80.0), 120.0)
    if not quick:
        file = output.with_name(f"profile_{output.stem}.json")
        yield PlanRequest("autopar profile", profiled, (device, quick, 40.0, str(file)), 110.0)
    yield whole("Llama-1B", 2)
    yield whole("ResNet-50", 1)
    if not quick:
        yield step("Llama-1B", "eager", "autopar", precision="bf16-mixed")
        yield step("ResNet-50", "eager", "autopar", precision="bf16-mixed")
        yield step("ViT-L", "eager", "autopar")
        yield step("T5-large", "eager", "autopar")
        yield step("Mixtral-like", "eager", "autopar")
        yield PlanRequest("dropout kernels", with_dropout, (device, quick), 60.0)
        yield whole("ViT-L", 2)
        yield whole("T5-large", 1)
        yield whole("Mixtral-like", 1)
        yield ranks("one compiled graph", "compiled", limit=90.0)
        yield step("Llama-1B", "eager", "compile", "step", "compiled", "recorded", limit=240.0)
    yield ranks("memory, best plan", "memory", {})
    yield ranks("a small training", "training")
    if n > 1 and not quick:
        yield PlanRequest("a step, all ranks", beside_others, (n, device, 240.0), 240.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=0, help="processes; default: one for each GPU, 2 on the CPU")
    parser.add_argument("--quick", action="store_true", help="small models, one check of each kind")
    parser.add_argument("--seconds", type=float, default=480.0, help="no row begins after so many seconds")
    parser.add_argument("--only", default="", help="rows whose names contain one of these words, separated by |")
    parser.add_argument("--output", type=Path, default=Path("first_hour.json"))
    asked = parser.parse_args()
    began = time.perf_counter()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.device == "cuda" and not gpus:
        print("torch finds no GPU here, so there is nothing to check; --device cpu runs the same on processors")
        return 0
    n = asked.ranks or (gpus if asked.device == "cuda" else 2)
    try:
        device, said = where_to_run(asked.device, n)
    except UsageError as error:
        print(error)
        return 2
    workers = Workers(device)
    try:
        about = machine(n, device, said)
        for name, value in about.items():
            print(f"  {name}: {value}", flush=True)
        table = Table(asked.output, about)
        wanted = [word for word in asked.only.split("|") if word]
        for row in rows(n, device, asked.quick, asked.output):
            if wanted and not any(word in row.name for word in wanted):
                continue
            left = asked.seconds - (time.perf_counter() - began)
            if left < 5.0:
                table.add(Row(row.name, Result("left out: the time is over")))
                continue
            limit = 180.0 if asked.quick else min(row.limit, left)
            table.add(workers.row(row.name, row.fn, *row.args, limit=limit))
    finally:
        workers.end()
    table.show()
    print(f"written to {asked.output}; send it back, or the table above")
    return 1 if table.failed or about.get("taken for", "").startswith("FAILED") else 0


if __name__ == "__main__":
    sys.exit(main())
