"""``autopar report``: a plan as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    MOST_LAYOUTS,
    ModelOption,
    PlanPath,
    Trust,
    UsageError,
    bound,
    model_of,
    open_plan,
    out,
    progress,
    show_bytes,
    what_if,
    within,
)
from autopar.cli.output_files import PAGE, Force, OutputFile

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.planfile import Document
    from autopar.plans.plan import Plan
    from autopar.report.layouts import LayoutRow
    from cost_models.schedules import Timeline
    from hardware_profiles import Cluster


def report(
    path: PlanPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.")] = Path("report.html"),
    top: Annotated[
        int,
        typer.Option("--top", help="Search again, and show this many of the best layouts next to the plan; takes "
                     "minutes for a large model.", callback=within(1, MOST_LAYOUTS)),
    ] = 1,
    model: ModelOption = None,
    trust: Trust = False,
    force: Force = False,
) -> None:  # fmt: skip
    """Write a plan as one HTML page: the sharded model, the schedule, memory, seconds, links.

    The page is self-contained and loads nothing: send it, open it anywhere. It is drawn from the plan file and the
    model that it names.

    Example: autopar report plan.json --trust -o report.html
    """
    from autopar.report.page.html_page import Subject, html_page

    file = OutputFile(output, PAGE, "--output", force)
    file.check()
    document = open_plan(path)
    _, captured = model_of(document, path, model, trust=trust)
    with progress("reading the plan"):
        replanner = what_if(captured, *bound(document, captured))
        plan, timeline = replanner.simulated()
    name = model if model is not None else str((document.model or {}).get("spec", "a model"))
    folder = path.parent if model is None else None
    layouts: list[LayoutRow] = []
    if top > 1:
        layouts = _layouts(name, folder, document, plan, timeline, captured, replanner.cluster, top)
    with progress("drawing"):
        page = html_page(Subject(name, captured.graph, replanner.graphs, plan, timeline, replanner.cluster, layouts))
    file.write(page)
    out().print(f"written to {output} ({show_bytes(len(page.encode()))}); open it in a browser", markup=False)


def _layouts(
    spec: str, folder: Path | None, document: Document, plan: Plan, timeline: Timeline, captured: Captured,
    cluster: Cluster, top: int,
) -> list[LayoutRow]:  # fmt: skip
    """Search for the best layouts under the plan's own constraints, and return them with the plan's.

    The plan's mesh, stages and microbatches do not constrain the search.
    """
    from dataclasses import replace

    from autopar.cli.common import load_and_capture
    from autopar.cli.layouts import rows_of_layouts
    from autopar.planner import planning
    from autopar.plans.replanner import PlanRequest
    from autopar.progress import heard
    from autopar.report.layouts import layout_row, with_front
    from autopar.report.page.tradeoff import THIS

    named = document.model or {}
    loaded, whole = load_and_capture(spec, named.get("batch"), named.get("seq"), folder=folder)
    example = (loaded.args, loaded.kwargs)
    if not planning.can_be_cut(whole.graph, example):
        raise UsageError("--top needs a model that returns its loss, and a batch with rows")
    pins = replace(plan.pins, stages=None, cuts=(), schedules=(), microbatches=None, mesh=None)
    wanted = PlanRequest(pins, plan.optimizer, top=top)
    with progress("planning") as say, heard(say):
        outcome = planning.find(
            loaded.model, whole, lambda: example, cluster, cluster.n_devices, wanted, plan.cluster, runs=False, say=say
        )
    this = layout_row(THIS, plan, timeline, captured.graph, cluster)
    others = [row for row in rows_of_layouts(outcome, cluster, top, ()) if not _same(row, this)]
    return with_front([this, *others])


def _same(a: LayoutRow, b: LayoutRow) -> bool:
    """Return True if two rows appear to be of one plan."""
    return abs(a.seconds / b.seconds - 1) < 1e-9 and a.memory_bytes == b.memory_bytes
