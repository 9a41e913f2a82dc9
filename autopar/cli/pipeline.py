"""Pipelined plans on the command line: ``autopar simulate``, and what ``plan``, ``show`` and ``run`` do with them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.common import (
    Json,
    UsageError,
    check_values,
    load_and_capture,
    optimizer_of,
    out,
    print_json,
    progress,
    show_bytes,
    show_mesh,
    show_seconds,
)

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.models import Loaded
    from autopar.pipeline import PipelinePlan
    from cost_models.pipeline import Timeline


def is_pipeline(path: Path) -> bool:
    """Whether a plan file is that of a pipeline."""
    from autopar.pipelines import is_pipeline_file

    return is_pipeline_file(path)


def opened(path: Path, model: str | None = None, device: str = "meta") -> tuple[Loaded, Captured, PipelinePlan]:
    """A pipelined plan with its model.

    Raises:
        UsageError: the file does not name its model and none is given.
    """
    from autopar.planfile import pipeline as files

    raw = files.read(path.read_text(encoding="utf-8"), str(path))
    named = raw.get("model") or {}
    spec = model or named.get("spec")
    if spec is None:
        raise UsageError(f"{path} does not say which model it is for; give it with --model PATH.py:factory")
    folder = path.parent if model is None else None
    loaded, captured = load_and_capture(spec, named.get("batch"), named.get("seq"), folder=folder, device=device)
    return loaded, captured, files.load(path, captured.graph)


def simulated(captured: Captured, plan: PipelinePlan) -> Timeline:
    """The plan's step, action by action, priced anew on its cluster."""
    from autopar.planner.pipeline import timing_of
    from autopar.staging import cut
    from cost_models.pipeline import simulate as run
    from hardware_profiles import load_cluster

    timing, _ = timing_of(cut(captured.graph, plan.starts), plan.stages, plan.schedule, load_cluster(plan.cluster))
    return run(plan.schedule, timing)


def describe(captured: Captured, plan: PipelinePlan, timeline: Timeline, as_json: bool, more: dict[str, Any]) -> None:
    """Tables of the stages, the schedule as a grid, the bubble."""
    from cost_models.pipeline import grid

    live = timeline.live_per_stage
    t = timeline.times
    stages: list[dict[str, Any]] = []
    for number, choice in enumerate(plan.stages):
        price = choice.plan.price
        stages.append({
            "stage": number, "first": choice.first, "devices": list(choice.devices), "mesh": dict(choice.mesh),
            "forward_seconds": t.forward_seconds[number], "input_seconds": t.input_seconds[number],
            "weight_seconds": t.weight_seconds[number], "step_seconds": price.parameter_seconds,
            "in_flight": live[number], "parameter_bytes": price.parameter_bytes,
            "gradient_bytes": price.gradient_bytes, "optimizer_bytes": price.optimizer_bytes,
            "gathered_bytes": price.gathered_bytes, "activation_bytes": price.activation_bytes,
        })  # fmt: skip
    facts = {
        "schedule": plan.schedule.name, "microbatches": plan.microbatches, "devices": plan.n_devices,
        "cluster": plan.cluster, "seconds": plan.seconds, "makespan_seconds": timeline.makespan_seconds,
        "bubble_fraction": timeline.bubble_fraction, "idle_seconds": list(timeline.idle_seconds), "stages": stages,
        "transfers": [
            {"source": e.source, "target": e.target, "forward_seconds": e.forward_seconds,
             "backward_seconds": e.backward_seconds} for e in t.edges
        ], **more,
    }  # fmt: skip
    if as_json:
        print_json(facts)
        return
    from rich.table import Table

    console = out()
    groups = plan.schedule.n_ranks
    console.print(
        f"[bold]{groups} group{'s' if groups != 1 else ''}[/bold] of devices on {plan.cluster}, schedule "
        f"{plan.schedule.name}, {plan.microbatches} microbatches, {plan.n_devices} devices"
    )
    table = Table("stage", "begins at", "devices", "mesh", "forward", "backward: inputs", "weights", "in flight",
                  "state", "activations", header_style="bold")  # fmt: skip
    for s in stages:
        state = s["parameter_bytes"] + s["gradient_bytes"] + s["optimizer_bytes"] + s["gathered_bytes"]
        held = s["devices"]
        table.add_row(
            str(s["stage"]), s["first"], f"{held[0]}..{held[-1]}" if len(held) > 2 else ",".join(map(str, held)),
            show_mesh(tuple(s["mesh"].items())), show_seconds(s["forward_seconds"]), show_seconds(s["input_seconds"]),
            show_seconds(s["weight_seconds"]), str(s["in_flight"]), show_bytes(state),
            show_bytes(s["activation_bytes"]),
        )  # fmt: skip
    console.print(table)
    text = grid(timeline)
    if max(map(len, text.splitlines()), default=0) <= 400:
        console.print(text, markup=False, soft_wrap=True)
    console.print(
        f"a step: {show_seconds(plan.seconds)}; schedule {show_seconds(timeline.makespan_seconds)}, of which "
        f"{timeline.bubble_fraction:.1%} idle"
    )
    for what, seconds in more.get("tried", ())[:8]:
        console.print(f"  tried: {show_seconds(seconds):>8}  {what}", markup=False)


def simulate(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="The file of a pipelined plan.")],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a timeline that ui.perfetto.dev opens; adds to the file.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model, if not the one that the file names.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a step of a pipelined plan, action by action: makespan, bubble, idle time, microbatches in flight.

    Example: autopar simulate plan.json --trace out.json
    """
    if not is_pipeline(path):
        raise UsageError(f"{path} is no pipelined plan; make one with autopar plan --stages")
    _, captured, plan = opened(path, model)
    with progress("simulating"):
        timeline = simulated(captured, plan)
    if trace is not None:
        from autopar.report import trace as traces

        traces.write(trace, traces.predicted(timeline))
    describe(captured, plan, timeline, as_json, {"trace": str(trace) if trace else None})


def show(path: Path, model: str | None, code: bool, as_json: bool) -> None:
    """``autopar show`` of a pipelined plan."""
    _, captured, plan = opened(path, model)
    if code:
        from autopar.lower.emit import lower
        from autopar.staging import cut

        graphs = cut(captured.graph, plan.starts)
        text = [lower(g.graph, c.plan).code for g, c in zip(graphs, plan.stages, strict=True)]
        if as_json:
            print_json({"stages": text})
        else:
            print("\n".join(f"# stage {i}\n{t}" for i, t in enumerate(text)))
        return
    describe(captured, plan, simulated(captured, plan), as_json, {})


def cluster_of(path: Path) -> str:
    """The cluster that a pipelined plan is for."""
    from autopar.planfile import pipeline as files

    return str(files.read(path.read_text(encoding="utf-8"), str(path))["cluster"])


def make(
    loaded: Loaded, captured: Captured, hardware: Any, cluster: str, stages: str, schedule: list[str] | None,
    cuts: list[str] | None, microbatches: int, mesh: Any, options: Any, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """``autopar plan --stages``."""
    import sys

    from autopar.pipelines import asked_for, planned
    from autopar.planfile import pipeline as files

    if stages != "auto" and not stages.isdigit():
        raise UsageError(f"--stages is '{stages}'; give a number of groups of devices, or auto")
    asked = asked_for("auto" if stages == "auto" else int(stages), schedule or None, microbatches, mesh, options, cuts)
    with progress("planning stages"):
        found = planned(captured, hardware, hardware.n_devices, asked, cluster)
    text = files.dumps(found.plan, captured.graph, loaded.named(output.parent if output else Path()))
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(text)
    else:
        describe(captured, found.plan, found.timeline, False, {"tried": found.tried})
        if output is not None:
            out().print(f"written to {output}")


def verified(model: str, batch: int | None, seq: int | None, path: Path) -> list[dict[str, Any]]:
    """``autopar verify --plan`` of a pipelined plan."""
    from dataclasses import asdict

    from autopar.planfile import pipeline as files
    from autopar.verify import verify_pipeline

    loaded, captured = load_and_capture(model, batch, seq, device="cpu")
    check_values(loaded, model)
    plan = files.load(path, captured.graph)
    with progress("verifying"):
        found = verify_pipeline(captured, loaded.model, loaded.args, loaded.kwargs, plan)
    return [{**asdict(found), "worst": found.worst}]


def run(path: Path, steps: int, lr: float, model: str | None, timeout: float, trace: Path | None) -> dict[str, Any]:
    """``autopar run`` of a pipelined plan: losses and seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return train(str(path), model, steps, lr)
    loaded, captured, plan = opened(path, model)
    check_values(loaded, str(model or path))
    from autopar.runtime.launch import run_local

    with progress(f"training {steps} steps on {plan.n_devices} processes"):
        ranks = run_local(train, plan.n_devices, str(path), model, steps, lr, timeout=timeout)
    if trace is not None:
        from autopar.report import trace as traces

        traces.write(
            trace, [*traces.predicted(simulated(captured, plan)), *traces.measured([r["spans"] for r in ranks])]
        )
    return {**ranks[0], "predicted_seconds": plan.seconds}


def train(path: str, model: str | None, steps: int, lr: float) -> dict[str, Any]:
    """What one rank does: losses and seconds of every step, and the spans of the last."""
    import torch
    import torch.distributed as dist

    from autopar.runtime.agree import ensure_process_group
    from autopar.runtime.pipeline import PipelineModule

    torch.manual_seed(0)
    ensure_process_group()
    loaded, captured, plan = opened(Path(path), model, device="cpu")
    pm = PipelineModule(loaded.model, captured, plan)
    optimizer = optimizer_of(plan.optimizer, list(pm.parameters()), lr)
    losses, seconds, spans = [], [], []
    for step in range(steps):
        if step == steps - 1:
            spans = pm.record()
        dist.barrier()
        start = time.perf_counter()
        losses.append(float(pm.train_step(*loaded.args, optimizer=optimizer, **loaded.kwargs)))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "seconds": seconds, "predicted_seconds": plan.seconds, "spans": spans}
