"""The table of a plan, as text for ``print(plan)`` and as HTML for a notebook, in which everything is escaped."""

from __future__ import annotations

from html import escape
from typing import Any, TypeAlias

from autopar.words.texts import show_bytes, show_seconds

Plan: TypeAlias = Any  # autopar.plans.plan.Plan, whose module imports this one
MOST_ROWS = 16
"""Stages that are shown; of more, the first ones and how many follow."""
CATEGORIES = ("parameter", "gradient", "optimizer", "gathered", "version", "activation")
OF_SOME = ("version",)
"""Categories that are shown where a stage has any."""
BEFORE = ("stage", "mesh", "compute", "collectives", "once a step")


def plan_line(plan: Plan) -> str:
    """Return the plan in one line: seconds, devices, memory."""
    return (
        f"{show_seconds(plan.seconds)} a step on {plan.n_devices} device{'s' if plan.n_devices != 1 else ''}"
        f"{f' of {plan.cluster}' if plan.cluster else ''}, {show_bytes(plan.memory_bytes)} a device"
    )


def plan_text(plan: Plan) -> str:
    """Return the plan as lines of text, with the same table as in a notebook."""
    columns = _columns(plan)
    rows = [columns, *_rows(plan)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(columns))]
    table = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"note: {note}" for note in plan.notes]
    return "\n".join([plan_line(plan), _below(plan), *table, *filter(None, [_rest(plan)]), *notes])


def plan_html(plan: Plan) -> str:
    """Return the plan as HTML, as a notebook shows it."""
    rows = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in _rows(plan)]
    columns = _columns(plan)
    if rest := _rest(plan):
        rows.append(f'<tr><td colspan="{len(columns)}">{rest}</td></tr>')
    heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f"<div><p><b>{escape(plan_line(plan))}</b><br>{escape(_below(plan))}</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"<p>autopar report draws all of it from the plan's file.</p></div>"
    )


def _below(plan: Plan) -> str:
    several = f"schedule {plan.schedule.name}, {plan.schedule.n_ranks} groups of devices, "
    many = "es" if plan.microbatches != 1 else ""
    head = several if len(plan.stages) > 1 else ""
    return f"{head}{plan.microbatches} microbatch{many}, optimizer {plan.optimizer}"


def _rest(plan: Plan) -> str:
    rest = len(plan.stages) - MOST_ROWS
    return f"and {rest} more stage{'s' if rest > 1 else ''}" if rest > 0 else ""


def _categories(plan: Plan) -> list[str]:
    """Return the kinds of memory that the table has columns of."""
    return [
        name for name in CATEGORIES
        if name not in OF_SOME or any(getattr(stage.price, f"{name}_bytes") for stage in plan.stages)
    ]  # fmt: skip


def _columns(plan: Plan) -> tuple[str, ...]:
    return (*BEFORE, *("weight versions" if name == "version" else name for name in _categories(plan)), "memory")


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    rows, categories = [], _categories(plan)
    for number, stage in enumerate(plan.stages[:MOST_ROWS]):
        price = stage.price
        rows.append((
            str(number), stage.mesh.shown() or "one device", show_seconds(price.compute_seconds),
            show_seconds(price.activation_seconds), show_seconds(price.exposed_seconds + price.optimizer_seconds),
            *(show_bytes(getattr(price, f"{category}_bytes")) for category in categories),
            show_bytes(price.memory_bytes),
        ))  # fmt: skip
    return rows
