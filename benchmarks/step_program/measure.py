"""A step program against today's executor and the eager model: numbers, collectives, memory, host time.

``python benchmarks/step_program/measure.py --ranks 1 gpt2 llama`` on one device;
``--ranks 2`` on two gloo ranks; ``--pins`` asks for a plan's decisions. Results are lines of JSON. All ways run in one
process and take turns; seconds are CPU seconds of the thread, which other work on the machine touches less.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import MODELS
from passes import collectives_of
from running import Runs

import autopar
from autopar.allocations import Allocations
from autopar.capture import capture
from autopar.certificate import check, microbatch_run, peak_of
from autopar.lower.freed_tensors import EMPTIED
from autopar.planfile.writing import save
from autopar.plans.plan import StagePlan
from autopar.words.graph import Graph
from autopar.words.precision import parse_precision
from hardware_profiles import load_cluster

SINGLE = ("mixtral",)
"""Models that do not run in double precision."""


def made(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a model with a batch, in double precision where it can."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    if name in SINGLE:
        return model, args, kwargs

    def double(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return model.double(), tuple(map(double, args)), {k: double(v) for k, v in kwargs.items()}


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss among what a model gives."""
    return output if isinstance(output, torch.Tensor) else output[0] if isinstance(output, tuple) else output["loss"]


def local(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's part of a gradient."""
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def bytes_by_kind(seen: list[tuple[str, str, int]]) -> dict[str, tuple[int, int]]:
    """Return number and bytes of collectives by kind."""
    times: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, kind, n_bytes in seen:
        times[kind] += 1
        sizes[kind] += n_bytes
    return {kind: (times[kind], sizes[kind]) for kind in sorted(times)}


def rank(name: str, ranks: int, steps: int, plan: str | None, precision: str | None = None) -> dict[str, Any]:
    """Compare the ways on this rank."""
    warnings.simplefilter("ignore")
    if os.environ.get("STEP_DUMP"):
        faulthandler.dump_traceback_later(int(os.environ["STEP_DUMP"]), file=sys.stderr)
    torch.set_num_threads(1)
    model, args, kwargs = made(name)
    eager = copy.deepcopy(model)
    if precision:
        model = model.float()
        args, kwargs = ([x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args],
                        {k: x.float() if x.is_floating_point() else x for k, x in kwargs.items()})  # fmt: skip
        eager = copy.deepcopy(model)
    asked = {"plan": plan} if plan else {"precision": precision} if precision else {}
    pm = autopar.parallelize(model, ranks, kwargs or tuple(args), **asked)
    run = pm._autopar
    today = run.call_program
    began = time.thread_time()
    runs = Runs(pm)
    program = runs.program([])
    found: dict[str, Any] = {"model": name, "ranks": ranks, "built_s": time.thread_time() - began}
    functions, step = program.functions, program.step
    found |= {
        "calls": len(step.calls), "distinct": step.distinct, "opaque": len(step.opaque),
        "nodes": (functions.n_forward, functions.n_backward), "text": len(functions.text.splitlines()),
        "buckets": program.buckets, "nodes_today": len(run.stage.program.module.graph.nodes),
        "stored": sorted({f"{c.stored.text}>{c.used.text} {c.lifetime}" for c in run.stage.plan.params.values()}),
    }  # fmt: skip

    def one(way: str) -> tuple[torch.Tensor, float, float]:
        run.call_program = today if way == "today" else runs.call_program
        called = eager if way == "eager" else pm
        for p in called.parameters():
            p.grad = None
        start = time.thread_time()
        loss = loss_of(called(*args, **kwargs))
        middle = time.thread_time()
        loss.backward()
        return loss.detach(), middle - start, time.thread_time() - middle

    state = {k: v.clone() for k, v in pm.state_dict().items()} if any(True for _ in pm.buffers()) else None
    numbers: dict[str, Any] = {}
    for way in ("eager", "today", "program"):
        torch.manual_seed(7)
        if state is not None and way == "program":
            pm.load_state_dict(state)
        loss, *_ = one(way)
        grads = {k: None if p.grad is None else local(p.grad).clone() for k, p in (
            eager if way == "eager" else pm).named_parameters()}  # fmt: skip
        numbers[way] = loss, grads
    found["loss_diff"] = float((numbers["today"][0] - numbers["program"][0]).abs())
    found["loss_diff_eager"] = float((numbers["eager"][0] - numbers["program"][0]).abs())
    worst, unequal = 0.0, 0
    for k, a in numbers["today"][1].items():
        b = numbers["program"][1][k]
        if (a is None) != (b is None):
            unequal += 1
        elif a is not None:
            worst = max(worst, float((a - b).abs().max()) if a.numel() else 0.0)
    found["grad_diff"], found["unequal_none"] = worst, unequal
    ways = ["today", "program"] + (["eager"] if ranks == 1 else [])
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for i in range(steps + 3):
        for way in ways if i % 2 else ways[::-1]:
            _, a, b = one(way)
            if i >= 3:
                seconds[way].append((a, b))
    for way, each in seconds.items():
        found[f"{way}_ms"] = [
            round(1e3 * statistics.median(x[k] if k < 2 else sum(x) for x in each), 3) for k in range(3)
        ]
        found[f"{way}_min_ms"] = round(1e3 * min(map(sum, each)), 3)
    pairs = sorted(sum(p) / sum(t) for p, t in zip(seconds["program"], seconds["today"], strict=True))
    found["ratio"] = (
        round(pairs[len(pairs) // 4], 3),
        round(statistics.median(pairs), 3),
        round(pairs[3 * len(pairs) // 4], 3),
    )
    found["load"] = os.getloadavg()[0]
    leaves = [h.leaf for h in run.stage.held_params.values() if not h.alias]
    for way in ways:
        for p in pm.parameters():
            p.grad = None
        count = Allocations(EMPTIED)
        for x in leaves if way == "today" else ():
            count.note(x)
        with count:
            one(way)
        found[f"{way}_peak"] = count.peak_bytes
    if ranks > 1:
        for way in ways:
            counter = microbatch_run.CollectiveCount()
            with counter:
                one(way)
            found[f"{way}_collectives"] = bytes_by_kind(counter.seen)
        nodes = [n for n in step.graph.nodes if ":" not in n.meta.get("of", "") and n.meta.get("of") != "bucket"]
        found["of_activations"] = {f"{kind}": each for (_, kind), each in sorted(collectives_of(nodes).items())}
    return found


def certified(graph: Graph, plan: StagePlan) -> dict[str, Any]:
    """Return what the certificate counts of a plan: collectives of its program, and the peak beside what is stored."""

    class Kept(microbatch_run.CollectiveCount):
        last: Any = None

        def __init__(self) -> None:
            super().__init__()
            Kept.last = self

    before, microbatch_run.CollectiveCount = microbatch_run.CollectiveCount, Kept
    try:
        cluster = load_cluster(f"local-x{len(plan.devices)}")
        report = check(plan, graph, cluster)
        seen = list(Kept.last.seen)
    finally:
        microbatch_run.CollectiveCount = before
    peak = peak_of(plan, graph)
    stored = report.price.parameter_bytes + report.price.optimizer_bytes
    return {
        "certificate": bytes_by_kind(seen),
        "certificate_peak": peak.n_bytes - stored,
        "failures": report.failures[:2],
    }


def measured(name: str, ranks: int, steps: int, pins: dict[str, Any], precision: str | None) -> dict[str, Any]:
    """Return the results of one model."""
    if ranks == 1:
        return rank(name, 1, steps, None, precision)
    model, args, kwargs = made(name)
    if precision:
        model = model.float()
        args, kwargs = (tuple(x.float() if x.is_floating_point() else x for x in args),
                        {k: x.float() if x.is_floating_point() else x for k, x in kwargs.items()})  # fmt: skip
        pins = {**pins, "precision": precision}
    captured = capture(model, args, kwargs, precision=parse_precision(precision))
    plan = autopar.plan(model, f"local-x{ranks}", kwargs or args, captured=captured, stages=1, **pins)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.toml")
        save(path, plan, captured.graph)
        counted = certified(captured.graph, plan.only())
        found = autopar.run_local(
            rank, ranks, name, ranks, steps, path, precision, timeout=int(os.environ.get("STEP_TIMEOUT", "500"))
        )
    return {**found[0], "pins": pins, **counted, "grad_diff_other": found[1]["grad_diff"]}


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--pins", default="{}", help='JSON: pins of the plan, such as {"params": {"*.weight": "S0 use"}}'
    )
    parser.add_argument("--precision", help="such as bf16-mixed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.models:
        try:
            row = measured(name, options.ranks, options.steps, json.loads(options.pins), options.precision)
            print(json.dumps(row), flush=True)
        except Exception as error:
            if os.environ.get("STEP_RAISE"):
                raise
            print(json.dumps({"model": name, "error": f"{type(error).__name__}: {str(error)[-600:]}"}), flush=True)


if __name__ == "__main__":
    main()
