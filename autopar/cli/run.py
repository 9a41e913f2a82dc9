"""``autopar run``: train a few steps under a plan on processes of this machine, or inside torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.common import (
    Json,
    UsageError,
    bound,
    check_values,
    model_of,
    on_ranks,
    open_plan,
    optimizer_of,
    out,
    print_json,
    progress,
    show_seconds,
)


def run(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    steps: Annotated[int, typer.Option("--steps", help="Training steps.")] = 10,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate of the optimizer that the plan names.")] = 1e-3,
    model: Annotated[str | None, typer.Option("--model", help="The model, if not the one that the file names.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for everything.")] = 600.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the last step's timeline (pipelined plans), for Perfetto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model under a plan, and compare the predicted with the measured seconds of a step.

    One process per device of the plan's mesh is started on this machine, with one thread each. Under torchrun the
    ranks are those of torchrun. The batch is the model's example inputs, the same in every step.

    Examples: autopar run plan.json --steps 20; torchrun --nproc-per-node 4 -m autopar run plan.json
    """
    if steps < 1:
        raise UsageError(f"--steps is {steps}; it is 1 or more")
    from autopar.cli import pipeline

    if pipeline.is_pipeline(path):
        found = pipeline.run(path, steps, lr, model, timeout, trace)
        if int(os.environ.get("RANK", "0")) == 0:
            found.pop("spans", None)
            _report(found, pipeline.cluster_of(path), as_json)
        return
    if trace is not None:
        raise UsageError(f"--trace is for pipelined plans, {path} is none")
    document = open_plan(path)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        result = train(str(path), model, steps, lr)
        if int(os.environ.get("RANK", "0")) == 0:
            _report(result, document.raw["cluster"], as_json)
        return
    loaded, captured = model_of(document, path, model)
    spec = model or str((document.model or {})["spec"])
    if not spec.startswith("hf:"):  # those are made here without values, and by the ranks with them
        check_values(loaded, spec)
    plan, _ = bound(document, captured)  # all that can be wrong with the plan is said before processes start
    if captured.graph.loss is None:
        raise UsageError("the model has no scalar loss among its outputs, so it cannot be trained; return the loss")
    from autopar.runtime.launch import run_local

    with progress(f"training {steps} steps on {plan.n_devices} processes"):
        result = run_local(train, plan.n_devices, str(path), model, steps, lr, timeout=timeout)[0]
    result["predicted_seconds"] = plan.price.seconds
    _report(result, document.raw["cluster"], as_json)


def train(path: str, model: str | None, steps: int, lr: float) -> dict[str, Any]:
    """What one rank does: losses and seconds of every step."""
    import time

    import torch
    import torch.distributed as dist

    document = open_plan(Path(path))
    torch.manual_seed(0)
    loaded, captured = model_of(document, Path(path), model, device="cpu")
    check_values(loaded, model or str((document.model or {})["spec"]))
    plan, _ = bound(document, captured)
    pm = on_ranks(loaded, captured, plan)
    params = [p for p in pm.parameters() if p.requires_grad]
    optimizer = optimizer_of(plan.optimizer, params, lr)
    losses, seconds = [], []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        loss = pm.train_step(*loaded.args, optimizer=optimizer, microbatches=plan.microbatches, **loaded.kwargs)
        losses.append(float(loss))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "seconds": seconds, "predicted_seconds": plan.price.seconds}


def _report(result: dict[str, Any], cluster: str, as_json: bool) -> None:
    steps = sorted(result["seconds"][1:] or result["seconds"])
    median = steps[len(steps) // 2]
    result = {**result, "measured_seconds": median, "cluster": cluster}
    if as_json:
        print_json(result)
        return
    from rich.table import Table

    table = Table("step", "loss", "seconds", header_style="bold")
    shown = list(enumerate(zip(result["losses"], result["seconds"], strict=True)))
    for k, (loss, seconds) in shown if len(shown) <= 12 else [*shown[:4], *shown[-4:]]:
        if len(shown) > 12 and k == shown[-4][0]:
            table.add_row("...", "", "")
        table.add_row(str(k), f"{loss:.6f}", show_seconds(seconds))
    console = out()
    console.print(table)
    console.print(
        f"measured here: {show_seconds(median)} a step (median without the first); predicted for "
        f"{result['cluster']}: {show_seconds(result['predicted_seconds'])}; ratio "
        f"{median / result['predicted_seconds']:.2f}"
    )
