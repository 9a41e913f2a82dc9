"""Pipelined plans on the command line: ``autopar simulate``, and what ``plan``, ``show`` and ``run`` do with them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.common import (
    Json,
    UsageError,
    check_values,
    load_and_capture,
    open_plan,
    optimizer_of,
    out,
    print_json,
    progress,
)
from autopar.cli.stages import describe

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.models import Loaded
    from autopar.pipeline import PipelinePlan
    from autopar.planner.inter_op.replan import Replanner
    from hardware_profiles import Cluster


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
    loaded, captured = load_and_capture(
        spec, named.get("batch"), named.get("seq"), folder=folder, device=device, parts=named.get("parts")
    )
    return loaded, captured, files.load(path, captured.graph)


def hardware_of(path: Path, plan: PipelinePlan) -> Cluster:
    """The cluster that a plan file names; a file of one's own is looked up beside the plan, then from here."""
    from autopar.planfile.form import cluster_named

    return cluster_named(plan.cluster, path.parent)


def what_if(path: Path, captured: Captured, plan: PipelinePlan) -> Replanner:
    """The plan to be asked "what if", and to be simulated."""
    from autopar.pins import pipeline_options
    from autopar.pipelines import check_ranks
    from autopar.planner.inter_op.replan import Replanner

    cluster = hardware_of(path, plan)
    check_ranks(plan, cluster.n_devices, f"devices are in cluster '{plan.cluster}'")
    return Replanner(captured.graph, plan, cluster, pipeline_options(plan))


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
        open_plan(path)
        raise UsageError(f"{path} is no pipelined plan; make one with autopar plan --stages")
    _, captured, plan = opened(path, model)
    check_trace(trace)
    asked = what_if(path, captured, plan)
    with progress("simulating"):
        plan, timeline = asked.simulated()
    if trace is not None:
        from autopar.report import trace as traces

        traces.write(trace, traces.predicted(timeline))
    describe(captured, plan, timeline, asked.cluster, as_json, {"trace": str(trace) if trace else None})


def show(path: Path, model: str | None, code: bool, as_json: bool) -> None:
    """``autopar show`` of a pipelined plan."""
    _, captured, plan = opened(path, model)
    if code:
        from autopar.lower.emit import lower
        from autopar.staging import cut

        graphs = cut(captured.graph, plan.starts)
        text = [lower(g.graph, c).code for g, c in zip(graphs, plan.stages, strict=True)]
        if as_json:
            print_json({"stages": text})
        else:
            print("\n".join(f"# stage {i}\n{t}" for i, t in enumerate(text)))
        return
    asked = what_if(path, captured, plan)
    describe(captured, *asked.simulated(), asked.cluster, as_json, {})


def cluster_of(path: Path) -> str:
    """The cluster that a pipelined plan is for."""
    from autopar.planfile import pipeline as files

    return str(files.read(path.read_text(encoding="utf-8"), str(path))["cluster"])


def make(
    loaded: Loaded, captured: Captured, hardware: Any, cluster: str, stages: str, schedule: list[str] | None,
    cuts: list[str] | None, microbatches: Sequence[int], mesh: Any, options: Any, output: Path | None, as_json: bool,
    recompute: bool = True,
) -> None:  # fmt: skip
    """``autopar plan --stages``.

    Args:
        microbatches: their number, the example inputs being one of them; or numbers to choose from, the example inputs
            being the batch; none for all that divide it.
        recompute: whether blocks may run again.
    """
    import sys
    from dataclasses import replace

    from autopar.pipelines import asked_for, planned, planned_in_parts
    from autopar.planfile import pipeline as files

    if stages != "auto" and not stages.isdigit():
        raise UsageError(f"--stages is '{stages}'; give a number of groups of devices, or auto")
    one = microbatches[0] if len(microbatches) == 1 else 1
    asked = asked_for("auto" if stages == "auto" else int(stages), schedule or None, one, mesh, options, cuts)
    asked = replace(asked, may_recompute=recompute)
    with progress("planning stages"):
        if len(microbatches) == 1:
            found = planned(captured, hardware, hardware.n_devices, asked, cluster)
        else:
            captured, found = planned_in_parts(
                loaded.model, captured, (loaded.args, loaded.kwargs), hardware, hardware.n_devices, asked,
                microbatches, cluster, runs=False,
            )  # fmt: skip
            loaded = replace(loaded, parts=found.plan.microbatches)
    text = files.dumps(found.plan, captured.graph, loaded.named(output.parent if output else Path()))
    if output is not None:
        written(output, text)
    if as_json:
        sys.stdout.write(text)
    else:
        describe(captured, found.plan, found.timeline, hardware, False, {"tried": found.tried})
        if output is not None:
            out().print(f"written to {output}")


def written(path: Path, text: str) -> None:
    """Write a plan file.

    Raises:
        PlanError: the folder is not there, or cannot be written to.
    """
    from autopar.errors import PlanError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the plan to {path}: {error.strerror}; choose a folder that exists") from error


def check_trace(path: Path | None) -> None:
    """Refuse a trace file that could not be written, before anything takes its time.

    Raises:
        UsageError: there is no such folder, or the file is no trace.
    """
    from autopar.report import trace as traces

    try:
        if path is not None:
            traces.known(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--trace {path}: {why}; give a new file, or a trace, in a folder that exists") from error


def verified(model: str, batch: int | None, seq: int | None, path: Path) -> list[dict[str, Any]]:
    """``autopar verify --plan`` of a pipelined plan."""
    from dataclasses import asdict

    from autopar.capture.parts import first_part
    from autopar.planfile import pipeline as files
    from autopar.verify import verify_pipeline

    named = files.read(path.read_text(encoding="utf-8"), str(path)).get("model") or {}
    loaded, captured = load_and_capture(model, batch, seq, device="cpu", parts=named.get("parts"))
    check_values(loaded, model)
    plan = files.load(path, captured.graph)
    args, kwargs = first_part((loaded.args, loaded.kwargs), loaded.parts or 1)
    with progress("verifying"):
        found = verify_pipeline(captured, loaded.model, args, kwargs, plan)
    return [{**asdict(found), "worst": found.worst}]


def run(path: Path, steps: int, lr: float, model: str | None, timeout: float, trace: Path | None) -> dict[str, Any]:
    """``autopar run`` of a pipelined plan: losses and seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return train(str(path), model, steps, lr)
    loaded, captured, plan = opened(path, model)
    check_values(loaded, str(model or path))
    check_trace(trace)
    from autopar.runtime.launch import run_local

    with progress(f"training {steps} steps on {plan.n_devices} processes"):
        ranks = run_local(train, plan.n_devices, str(path), model, steps, lr, timeout=timeout)
    if trace is not None:
        from autopar.report import trace as traces

        _, timeline = what_if(path, captured, plan).simulated()
        traces.write(trace, [*traces.predicted(timeline), *traces.measured([r["spans"] for r in ranks])])
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
