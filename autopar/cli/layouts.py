"""``autopar plan`` without flags, ``--top`` and ``--like``: the search over everything, and layouts side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.common import out, progress, show_bytes, show_seconds

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.frontends.models import Loaded
    from autopar.planner.inter_op.layout_parsing import Layout
    from autopar.planner.planning import Outcome
    from autopar.plans.asked import Asked
    from autopar.report.layouts import LayoutRow
    from hardware_profiles import Cluster


def parsed(like: str | None) -> Layout | None:
    """The layout of ``--like``."""
    from autopar.planner.inter_op.layout_parsing import parse_layout

    return parse_layout(like) if like is not None else None


def show(
    outcome: Outcome, hardware: Cluster, top: int, layout: Layout | None, pinned: LayoutRow | None, path: Path | None,
    like_path: Path | None,
) -> None:  # fmt: skip
    """Print the best layouts, and one that was asked for beside them.

    Args:
        top: how many of the best layouts are shown.
        pinned: the row of ``layout``.
        path: of the plan file that was written.
        like_path: of the plan file of ``layout``.
    """
    if top > 1 or pinned is not None:
        table(rows_of_layouts(outcome, hardware, top, pinned))
    if pinned is not None and layout is not None:
        times = pinned.seconds / outcome.plan.seconds
        out().print(f"  {layout.text}: {show_seconds(pinned.seconds)} a step, {times:.3f} times the best", markup=False)
        if layout.is_default:
            out().print(
                "  with one row of the batch on every data rank in a microbatch (mbs=1); words such as mbs=2 or m=4 "
                "ask for others",
                markup=False,
            )
        if like_path is not None:
            out().print(f"  {like_path} has the plan of this layout", markup=False)
        elif path is not None:
            out().print(
                f"  {path} has the best plan, not this layout: that is written by --like-output", markup=False
            )
        if layout.free:
            out().print(
                f"  {', '.join(layout.free)}: left to the planner, which keeps parameters and cuts sequences as is "
                "cheapest in this layout",
                markup=False,
            )


def planned_like(
    loaded: Loaded, captured: Captured, hardware: Cluster, cluster: str, asked: Asked, layout: Layout
) -> Outcome:
    """The plan of a layout that was asked for.

    Raises:
        PlanError, InfeasibleError: it cannot be, or does not fit.
    """
    from autopar.capture.microbatches import rows_of
    from autopar.errors import InfeasibleError
    from autopar.planner.inter_op.stage_search import PipelineOptions
    from autopar.planner.planning import in_parts, options_of

    example, n = (loaded.args, loaded.kwargs), hardware.n_devices
    base = PipelineOptions(1, options=options_of(asked), may_recompute=asked.may_recompute)
    wanted = layout.asked(captured.graph, base, n, rows_of(example))
    asked = replace(asked, numbers=(wanted.microbatches,))
    with progress(f"planning {layout.text}"):
        try:
            return in_parts(
                loaded.model, captured, example, hardware, n, asked, cluster, runs=False, wanted=wanted
            )
        except InfeasibleError as error:
            raise InfeasibleError(f"--like {layout.text}: {error}") from error


def row_like(found: Outcome, hardware: Cluster) -> LayoutRow:
    """What the table says of the plan of a layout that was asked for."""
    from autopar.report.layouts import layout_row

    assert found.timeline is not None
    return layout_row(f"like {found.tried[0][0]}", found.plan, found.timeline, found.captured.graph, hardware)


def rows_of_layouts(outcome: Outcome, hardware: Cluster, top: int, pinned: LayoutRow | None) -> list[LayoutRow]:
    """Rows of the best layouts that were planned exactly, the fastest first, and that of one that was asked for."""
    from autopar.report.layouts import layout_row, with_front

    best = sorted(outcome.others, key=lambda found: found.plan.seconds)[:top]
    there = outcome.cluster or hardware
    rows = [layout_row(f.what, f.plan, f.timeline, f.search.graph, there) for f in best]
    return with_front([*rows, *([pinned] if pinned is not None else [])])


def table(rows: list[LayoutRow]) -> None:
    """Layouts side by side; ``*`` marks those that no faster one beats in memory."""
    from rich.table import Table

    console = out()
    shown = Table("layout", header_style="bold")
    for name in ("a step", "idle", "memory", "tokens/s", "of peak", "front"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.what, show_seconds(row.seconds), f"{row.bubble:.1%}", show_bytes(row.memory_bytes),
            f"{row.tokens_per_second:,.0f}", f"{row.utilisation:.1%}", "*" if row.on_front else "",
        )  # fmt: skip
    console.print(shown)


__all__ = ["parsed", "planned_like", "row_like", "rows_of_layouts", "show", "table"]
