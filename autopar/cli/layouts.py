"""``autopar plan`` without flags, ``--top`` and ``--like``: the search over everything, and layouts side by side."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.common import UsageError, out, progress, show_bytes, show_seconds

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.models import Loaded
    from autopar.planner.inter_op.layouts import Layout
    from autopar.planner.inter_op.stage_search import PipelineOptions, Planned
    from autopar.report.layouts import LayoutRow
    from hardware_profiles import Cluster


def is_searched(captured: Captured, loaded: Loaded) -> bool:
    """Whether pipelines can be looked at: the model returns a loss, and its batch has rows."""
    from autopar.capture.parts import rows_of
    from autopar.errors import CaptureError

    try:
        return captured.graph.loss is not None and rows_of((loaded.args, loaded.kwargs)) > 0
    except CaptureError:
        return False


def make(
    loaded: Loaded, captured: Captured, hardware: Cluster, cluster: str, options: Any, recompute: bool,
    like: str | None, top: int, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Plan over everything; print the best plan and, where they were asked for, other layouts beside it.

    Args:
        recompute: whether blocks may run again.
        like: a layout that is pinned and priced beside the best.
        top: how many of the best layouts are shown.
    """
    from autopar.cli import pipeline
    from autopar.cli.plan import summary
    from autopar.pipelines import planned_widely
    from autopar.planfile import dumps, save
    from autopar.planfile import pipeline as files
    from autopar.planner.inter_op.layouts import parse_layout
    from autopar.planner.inter_op.stage_search import PipelineOptions

    layout = parse_layout(like) if like is not None else None
    if top < 1:
        raise UsageError(f"--top is {top}; it is 1 or more")
    base = PipelineOptions(1, options=options, may_recompute=recompute, top=top)
    pinned = priced_like(loaded, captured, hardware, cluster, base, layout) if layout is not None else None
    example = (loaded.args, loaded.kwargs)
    with progress("planning: meshes, stages, schedules, microbatches"):
        part, found, simple = planned_widely(
            loaded.model, captured, example, hardware, hardware.n_devices, base, cluster, runs=False
        )
    folder = output.parent if output else Path()
    if simple is not None:
        named = loaded.named(folder)
        if output is not None:
            save(output, simple, captured.graph, named)
        if as_json:
            sys.stdout.write(dumps(simple, captured.graph, named))
            return
        summary(simple, output)
    else:
        text = files.dumps(found.plan, part.graph, replace(loaded, parts=found.plan.microbatches).named(folder))
        if output is not None:
            pipeline.written(output, text)
        if as_json:
            sys.stdout.write(text)
            return
        pipeline.describe(part, found.plan, found.timeline, hardware, False, {"tried": found.tried if top == 1 else ()})
        if output is not None:
            out().print(f"written to {output}")
    if top > 1 or pinned is not None:
        table(rows_of_layouts(found, hardware)[:top], pinned)
    if pinned is not None and layout is not None:
        times = pinned.seconds / found.plan.seconds
        out().print(f"  {layout.text}: {show_seconds(pinned.seconds)} a step, {times:.3f} times the best", markup=False)
        if layout.free:
            out().print(
                f"  {', '.join(layout.free)}: left to the planner, which keeps parameters and cuts sequences as is "
                "cheapest in this layout",
                markup=False,
            )


def priced_like(
    loaded: Loaded, captured: Captured, hardware: Cluster, cluster: str, base: PipelineOptions, layout: Layout
) -> LayoutRow:
    """The row of a layout that was asked for.

    Raises:
        PlanError, InfeasibleError: it cannot be, or does not fit.
    """
    from autopar.capture.parts import rows_of
    from autopar.errors import InfeasibleError
    from autopar.pipelines import planned_in_parts
    from autopar.report.layouts import layout_row

    example, n = (loaded.args, loaded.kwargs), hardware.n_devices
    asked = replace(layout.asked(captured.graph, base, n, rows_of(example)), top=1)
    with progress(f"planning {layout.text}"):
        try:
            part, found = planned_in_parts(
                loaded.model, captured, example, hardware, n, asked, (asked.microbatches,), cluster, runs=False
            )
        except InfeasibleError as error:
            raise InfeasibleError(f"--like {layout.text}: {error}") from error
    return layout_row(f"like {found.tried[0][0]}", found.plan, found.timeline, part.graph, hardware)


def rows_of_layouts(found: Planned, hardware: Cluster) -> list[LayoutRow]:
    """Rows of all layouts that were planned exactly, the fastest first."""
    from autopar.report.layouts import layout_row, with_front

    rows = [layout_row(f.what, f.plan, f.timeline, f.search.graph, hardware) for f in found.others]
    return with_front(rows)


def table(rows: list[LayoutRow], pinned: LayoutRow | None) -> None:
    """Layouts side by side; ``*`` marks those that no faster one beats in memory."""
    from rich.table import Table

    console = out()
    shown = Table("layout", header_style="bold")
    for name in ("a step", "idle", "memory", "tokens/s", "of peak", "front"):
        shown.add_column(name, justify="right")
    for row in [*rows, *([pinned] if pinned is not None else [])]:
        shown.add_row(
            row.what, show_seconds(row.seconds), f"{row.bubble:.1%}", show_bytes(row.memory_bytes),
            f"{row.tokens_per_second:,.0f}", f"{row.utilisation:.1%}", "*" if row.on_front else "",
        )  # fmt: skip
    console.print(shown)


__all__ = ["is_searched", "make", "priced_like", "rows_of_layouts", "table"]
