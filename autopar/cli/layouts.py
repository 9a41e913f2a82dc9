"""``autopar plan`` without flags, ``--top`` and ``--like``: the search over everything, and layouts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.common import UsageError, out, print_lines, progress, show_bytes, show_seconds
from autopar.errors import AutoparError
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.frontends import Loaded
    from autopar.planner.layouts.layout_words import Layout
    from autopar.planner.layouts.pricing import PricedLayout
    from autopar.planner.planning import Outcome
    from autopar.plans.plan import Plan
    from autopar.plans.request import PlanRequest
    from autopar.report.alternatives import BesidePlan
    from autopar.report.layouts import LayoutRow
    from cost_models.schedules import Timeline
    from hardware_profiles import Cluster


def parsed(like: Sequence[str]) -> list[Layout | AutoparError]:
    """Parse the layouts of ``--like``.

    Of several, one that cannot be parsed is replaced by its error; a single one raises it.
    """
    from autopar.planner.layouts.layout_words import parse_layout

    if len(like) == 1:
        return [parse_layout(like[0])]
    layouts: list[Layout | AutoparError] = []
    for text in like:
        try:
            layouts.append(parse_layout(text))
        except AutoparError as error:
            layouts.append(error)
    return layouts


def priced(
    loaded: Loaded, captured: Captured, cluster: str, request: PlanRequest, like: Sequence[str],
    layouts: Sequence[Layout | AutoparError], written: Path | None = None,
) -> list[Priced]:  # fmt: skip
    """Price the layouts of ``--like``; one that cannot be priced has an error, and the others go on.

    Raises:
        PlanError: the one whose plan is to be ``written`` has none that this model can run.
    """
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.planner.planning import options_of

    example = loaded.args, loaded.kwargs
    of_model = PricedLayouts(loaded.model, captured, example, options_of(request), request.input_rows)
    rows: list[Priced] = []
    for text, layout in zip(like, layouts, strict=True):
        if isinstance(layout, AutoparError):
            rows.append(Priced(text, None, str(layout)))
            continue
        with progress(f"pricing {text}"):
            try:
                rows.append(Priced(text, of_model.price(cluster, layout)))
            except AutoparError as error:
                rows.append(Priced(text, None, str(error)))
    if written is not None:
        _check_written(rows[0], written)
    return rows


@dataclass(frozen=True)
class Priced:
    """A layout of ``--like``: its plan, or why there is none."""

    text: str
    found: PricedLayout | None
    error: str = ""

    def row(self, hardware: Cluster) -> LayoutRow | None:
        """Return the row of the layout in the table."""
        from autopar.report.layouts import layout_row

        if self.found is None:
            return None
        return layout_row(
            f"like {self.text}", self.found.plan, self.found.timeline, self.found.captured.graph, hardware
        )

    def facts(self, hardware: Cluster, plan: Facts | None) -> Facts:
        """Return the layout as values for JSON; ``plan`` is the document of its plan file."""
        row = self.row(hardware)
        if row is None or self.found is None:
            return {"like": self.text, "error": self.error}
        return {
            "like": self.text, "seconds": row.seconds, "fits": self.found.fits,
            "memory_bytes": self.found.memory_bytes, "limit_bytes": self.found.limit_bytes, "idle": row.bubble,
            "tokens_per_second": row.tokens_per_second, "of_peak": row.utilisation,
            "runs": self.found.pinned.runs, "notes": list(self.found.pinned.notes), "plan": plan,
        }  # fmt: skip


def check_outputs(output: Path | None, like_output: Path | None, likes: int) -> None:
    """Refuse a file for the plan of a layout without one layout, and one file for two plans."""
    if like_output is not None and likes != 1:
        raise UsageError("--like-output writes the plan of a layout: give one layout with --like")
    if like_output is not None and output is not None and like_output.resolve() == output.resolve():
        raise UsageError(f"-o and --like-output both write {output}; give each plan a file of its own")


def _check_written(like: Priced, path: Path) -> None:
    """Refuse to write the plan file of a layout that has no plan, or whose plan this model cannot run."""
    from autopar.errors import PlanError

    if like.found is None:
        raise PlanError(like.error)
    if not like.found.pinned.runs:
        raise PlanError(
            f"--like {like.text}: {path} would be a plan that this model cannot run: {like.found.pinned.notes[0]}; or "
            "leave out --like-output, and the layout is priced only"
        )


def alternatives(outcome: Outcome, top: int, likes: Sequence[Priced]) -> list[BesidePlan]:
    """Return the best ``top`` layouts behind the plan and the requested ones, each with why it is not the plan."""
    from autopar.report.alternatives import BesidePlan, beside_plan, reason_slower, step_parts

    plan = outcome.plan
    best = {} if outcome.timeline is None else step_parts(plan, outcome.timeline)

    def slower(other: Plan, timeline: Timeline) -> str:
        return reason_slower(other.seconds, step_parts(other, timeline) if best else {}, plan.seconds, best)

    others = sorted(outcome.others, key=lambda found: found.plan.seconds)[:top] if top > 1 else []
    rows = [
        BesidePlan(f.what, f.seconds, f.plan.memory_bytes, slower(f.plan, f.timeline))
        for f in others if f.plan.stages != plan.stages or f.plan.schedule != plan.schedule
    ]  # fmt: skip
    return rows + [
        beside_plan(like.text, like.found, like.error, lambda found: slower(found.plan, found.timeline))
        for like in likes
    ]


def show(
    outcome: Outcome, hardware: Cluster, top: int, likes: Sequence[Priced], path: Path | None, like_path: Path | None
) -> None:
    """Print the best ``top`` layouts next to the requested ones; ``path`` and ``like_path`` are the files written."""
    pinned = [row for like in likes if (row := like.row(hardware)) is not None]
    if top > 1 or likes:
        table(rows_of_layouts(outcome, hardware, top, pinned))
    rows = alternatives(outcome, top, likes)
    searched, requested = rows[: len(rows) - len(likes)], rows[len(rows) - len(likes) :]
    print_lines(*(f"  {row.layout}: {row.reason}" for row in searched))
    for like, row in zip(likes, requested, strict=True):
        if like.found is None:
            out().print(f"  {like.text}: {like.error}", markup=False)
            continue
        times = "" if like.found.fits else f"{like.found.seconds / outcome.plan.seconds:.3f} times the best; "
        out().print(
            f"  {like.text}: {show_seconds(like.found.seconds)} a step, {times}{row.reason}", markup=False,
            soft_wrap=True,
        )  # fmt: skip
        for problem in like.found.pinned.notes:
            out().print(f"    {problem}", markup=False)
        if like.found.layout.is_default:
            out().print(
                "    priced with mbs=1, one row of the batch per data rank and microbatch; change it by mbs=2 or m=4",
                markup=False,
            )
    if likes and like_path is not None:
        out().print(f"  {like_path} has the plan of this layout", markup=False)
    elif likes and path is not None:
        out().print(f"  {path} has the best plan, not this layout: that is written by --like-output", markup=False)


def rows_of_layouts(outcome: Outcome, hardware: Cluster, top: int, pinned: Sequence[LayoutRow]) -> list[LayoutRow]:
    """Return the rows of the best and of the requested layouts, the fastest first."""
    from autopar.report.layouts import layout_row, with_front

    best = sorted(outcome.others, key=lambda found: found.plan.seconds)[:top]
    there = outcome.cluster or hardware
    rows = [layout_row(f.what, f.plan, f.timeline, f.search.graph, there) for f in best]
    return with_front([*rows, *pinned])


def table(rows: list[LayoutRow]) -> None:
    """Return layouts as a table; ``*`` marks those that no faster one beats in memory."""
    from autopar.report.fitted_tables import FittedTable

    console = out()
    shown = FittedTable("layout")
    for name in ("a step", "idle", "memory", "tokens/s", "of peak", "front"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.what, show_seconds(row.seconds), f"{row.bubble:.1%}", show_bytes(row.memory_bytes),
            f"{row.tokens_per_second:,.0f}", f"{row.utilisation:.1%}", "*" if row.on_front else "",
        )  # fmt: skip
    console.print(shown)
