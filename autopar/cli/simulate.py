"""``autopar simulate``: a step of a plan, action by action."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.common import Json, ModelOption, PlanPath, Trust, UsageError, opened, progress
from autopar.cli.stages import describe


def simulate(
    path: PlanPath,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a timeline for ui.perfetto.dev, or add it to an existing one.")
    ] = None,
    model: ModelOption = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Simulate a step of a plan, action by action: makespan, bubble, idle time, microbatches in flight.

    Example: autopar simulate plan.json --trust --trace out.json
    """
    captured, replanner = opened(path, model, trust=trust)
    check_trace(trace)
    with progress("simulating"):
        plan, timeline = replanner.simulated()
    if trace is not None:
        from autopar.report import trace as traces

        traces.write(trace, traces.predicted(timeline))
    describe(captured, plan, timeline, replanner.cluster, as_json, {"trace": str(trace) if trace else None})


def check_trace(path: Path | None) -> None:
    """Refuse a trace path that cannot be written, before the command spends time."""
    from autopar.report import trace as traces

    if path is not None and os.path.islink(path):
        raise UsageError(f"--trace {path} is a link, and links are not followed: give the file itself")
    try:
        if path is not None:
            traces.known(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--trace {path}: {why}; give a new file, or a trace, in a folder that exists") from error
