"""Other layouts: time of a step against memory of a device, as a scatter plot and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from autopar.report.layouts import LayoutRow
from autopar.report.page.markup import filled, joined, table
from autopar.words.texts import show_bytes, show_seconds

THIS = "this plan"
"""Name of the layout of the page's own plan."""


def alternatives_section(rows: Sequence[LayoutRow]) -> Markup:
    """Return the plot and the table of rows marked by :func:`autopar.report.layouts.with_front`."""
    heads = ("", "layout", "a step", "memory of a device", "idle", "tokens/s", "of peak", "on the front")
    lines = [
        [
            k + 1, row.what, show_seconds(row.seconds), show_bytes(row.memory_bytes), f"{row.bubble:.1%}",
            f"{row.tokens_per_second:,.0f}", f"{row.utilisation:.1%}", "yes" if row.on_front else "",
        ] for k, row in enumerate(rows)
    ]  # fmt: skip
    return filled("{}{}", _scatter(rows), table(heads, lines, numbers=(0, 2, 3, 4, 5, 6), label="layouts"))


def _scatter(rows: Sequence[LayoutRow]) -> Markup:
    """Return numbered points, better towards the lower left; both axes begin a little below the least value."""
    x_from, x_to = _range([row.seconds for row in rows])
    y_from, y_to = _range([row.memory_bytes for row in rows])
    points = []
    for k, row in enumerate(rows):
        x = f"{100 * (row.seconds - x_from) / (x_to - x_from):.2f}%"
        y = f"{100 - 100 * (row.memory_bytes - y_from) / (y_to - y_from):.2f}%"
        words = f"{k + 1}: {row.what}, {show_seconds(row.seconds)} a step, {show_bytes(row.memory_bytes)}"
        kind = "chosen" if row.what == THIS else "front" if row.on_front else "beaten"
        points.append(filled(
            '<svg x="{}" y="{}" class="dot {}" tabindex="0" role="img" aria-label="{}"><title>{}</title>'
            '<circle r="11"/><text y="4">{}</text></svg>', x, y, kind, words, words, k + 1,
        ))  # fmt: skip
    return filled(
        '<figure class="scatter"><figcaption>memory of a device ({} to {}) against seconds of a step ({} to {}): '
        'lower left is better</figcaption><svg width="100%" height="260" class="plane">'
        "<svg x='6%' y='10%' width='86%' height='80%' overflow='visible'>{}</svg></svg></figure>",
        show_bytes(y_from), show_bytes(y_to), show_seconds(x_from), show_seconds(x_to), joined(points),
    )  # fmt: skip


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if math.isclose(low, high, rel_tol=1e-9):
        return 0.9 * low, 1.1 * high if high else 1.0
    return low, high
