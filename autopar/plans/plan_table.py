"""A plan in a notebook: its numbers, and a row for every stage. Everything in it is escaped."""

from __future__ import annotations

from html import escape
from typing import Any

from autopar.words.texts import show_bytes, show_seconds

MOST_ROWS = 16
"""Stages that are shown; of more, the first ones and how many follow."""
CATEGORIES = ("parameter", "gradient", "optimizer", "gathered", "activation")


def plan_table(plan: Any) -> str:
    """Return the HTML of an :class:`autopar.plans.plan.Plan`.

    Seconds, memory, schedule, and stages with their costs.
    """
    head = (
        f"{show_seconds(plan.seconds)} a step on {plan.n_devices} device{'s' if plan.n_devices != 1 else ''} of "
        f"{plan.cluster}, {show_bytes(plan.memory_bytes)} a device"
    )
    several = ""
    if len(plan.stages) > 1:
        several = f"schedule {plan.schedule.name}, {plan.schedule.n_ranks} groups of devices, "
    many = "es" if plan.microbatches != 1 else ""
    below = f"{several}{plan.microbatches} microbatch{many}, optimizer {plan.optimizer}"
    columns = ("stage", "mesh", "compute", "collectives", "once a step", *CATEGORIES, "memory")
    rows = []
    for number, stage in enumerate(plan.stages[:MOST_ROWS]):
        price = stage.price
        cells = (
            str(number), stage.mesh.shown() or "one device", show_seconds(price.compute_seconds),
            show_seconds(price.activation_seconds), show_seconds(price.exposed_seconds + price.optimizer_seconds),
            *(show_bytes(getattr(price, f"{category}_bytes")) for category in CATEGORIES),
            show_bytes(price.memory_bytes),
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    if len(plan.stages) > MOST_ROWS:
        rest = len(plan.stages) - MOST_ROWS
        rows.append(f'<tr><td colspan="{len(columns)}">and {rest} more stage{"s" if rest > 1 else ""}</td></tr>')
    heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f"<div><p><b>{escape(head)}</b><br>{escape(below)}</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"<p>autopar report draws all of it from the plan's file.</p></div>"
    )


__all__ = ["plan_table"]
