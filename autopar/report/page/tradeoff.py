"""Layouts as points that can be clicked: time against memory, and against the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.report.layouts import LayoutRow
from autopar.report.page.markup import filled, joined, table
from autopar.report.workload import cost_of
from autopar.words.texts import show_bytes, show_seconds

THIS = "this plan"
"""Name of the layout of the page's own plan."""
TICKS = 4
"""Intervals of an axis."""


@dataclass(frozen=True)
class Pricing:
    """How layouts are paid for.

    Attributes:
        unit: ``tokens`` or ``samples``.
        amount: their number.
        in_words: the number, as it was given.
        price_per_hour: of one device; None if nobody said it.
    """

    unit: str = "tokens"
    amount: float = 1e9
    in_words: str = "1B"
    price_per_hour: float | None = None


@dataclass(frozen=True)
class _Axis:
    """One axis of a plot.

    Attributes:
        name: what it counts.
        value: of a layout.
        show: a value in words.
        log: powers of two are equally far from each other.
    """

    name: str
    value: Callable[[LayoutRow], float]
    show: Callable[[float], str]
    log: bool = False


SECONDS = _Axis("seconds of a step", lambda row: row.seconds, show_seconds)
MEMORY = _Axis("memory of a device", lambda row: row.memory_bytes, show_bytes)
DEVICES = _Axis("devices", lambda row: row.devices, lambda n: f"{n:,.0f}", log=True)


def alternatives_section(rows: Sequence[LayoutRow], pricing: Pricing | None = None) -> Markup:
    """Return time against memory, and the table, of rows marked by :func:`autopar.report.layouts.with_front`."""
    return _section("layout", rows, SECONDS, MEMORY, pricing or Pricing())


def devices_section(rows: Sequence[LayoutRow], pricing: Pricing | None = None) -> Markup:
    """Return time against the number of devices, and the table; a row for each number of devices."""
    return _section("devices", rows, DEVICES, SECONDS, pricing or Pricing())


def _section(key: str, rows: Sequence[LayoutRow], x: _Axis, y: _Axis, pricing: Pricing) -> Markup:
    of_unit = f"{pricing.unit}/s"
    heads = ("", "layout", "devices", "a step", "memory of a device", "idle", of_unit, "of peak", "device-hours",
             "on the front")  # fmt: skip
    lines = [
        [
            k + 1, _name(row), row.devices, show_seconds(row.seconds), show_bytes(row.memory_bytes),
            f"{row.bubble:.1%}", f"{row.tokens_per_second:,.0f}", f"{row.utilisation:.1%}",
            cost_of(row, pricing.amount).words.removesuffix(" device-hours"), "yes" if row.on_front else "",
        ] for k, row in enumerate(rows)
    ]  # fmt: skip
    chosen = next((k for k, row in enumerate(rows) if row.what == THIS), 0)
    facts = joined(_facts(key, k, row, pricing, k == chosen) for k, row in enumerate(rows))
    return filled(
        '<div class="pick" data-pick="{}">{}<div class="facts" aria-live="polite">{}</div></div>{}', key,
        _scatter(rows, x, y, chosen), facts,
        table(heads, lines, numbers=(0, 2, 3, 4, 5, 6, 7, 8), label=f"{key}, as a table"),
    )  # fmt: skip


def _name(row: LayoutRow) -> Markup:
    """Return a layout's terms, with its description below them."""
    return filled('{}<br><small>{}</small>', row.words, row.what) if row.words else filled("{}", row.what)


def _facts(key: str, k: int, row: LayoutRow, pricing: Pricing, shown: bool) -> Markup:
    """Return the numbers and words of a layout, which a click on its point shows."""
    cost = cost_of(row, pricing.amount, pricing.price_per_hour)
    pairs = [
        ("a step", show_seconds(row.seconds)), ("memory of a device", show_bytes(row.memory_bytes)),
        ("devices", f"{row.devices:,}"), ("idle", f"{row.bubble:.1%}"),
        (f"{pricing.unit} a second", f"{row.tokens_per_second:,.0f}"), ("of peak flops", f"{row.utilisation:.1%}"),
        (f"for {pricing.in_words} {pricing.unit}", f"{cost.time}: {cost.words}"),
    ]  # fmt: skip
    return filled(
        '<div id="{}-{}"{}><b>{}: {}</b><p>{}</p><dl>{}</dl></div>', key, k, Markup("" if shown else " hidden"), k + 1,
        row.what, row.words if row.words != row.what else "",
        joined(filled("<div><dt>{}</dt><dd>{}</dd></div>", what, value) for what, value in pairs),
    )  # fmt: skip


def _scatter(rows: Sequence[LayoutRow], x: _Axis, y: _Axis, chosen: int) -> Markup:
    """Return numbered points, better towards the lower left, with the front as a line."""
    ends = [_range([axis.value(row) for row in rows], axis.log) for axis in (x, y)]
    places = [(100 * _share(x.value(row), *ends[0], x.log), 100 - 100 * _share(y.value(row), *ends[1], y.log))
              for row in rows]  # fmt: skip
    points = []
    over = sorted(range(len(rows)), key=lambda k: (rows[k].what == THIS, rows[k].on_front))  # later ones lie above
    for k in over:
        row, (left, top) = rows[k], places[k]
        words = f"{k + 1}: {row.what}, {show_seconds(row.seconds)} a step, {show_bytes(row.memory_bytes)}"
        kind = "chosen" if row.what == THIS else "front" if row.on_front else "beaten"
        points.append(filled(
            '<svg x="{}%" y="{}%" class="dot {}{}" data-k="{}" tabindex="0" role="button" aria-label="{}">'
            '<title>{}</title><circle r="10"/><text y="4">{}</text></svg>', f"{left:.2f}", f"{top:.2f}", kind,
            " picked" if k == chosen else "", k, words, words, k + 1,
        ))  # fmt: skip
    front = sorted(place for place, row in zip(places, rows, strict=True) if row.on_front)
    line = " ".join(f"{left:.2f},{top:.2f}" for left, top in front)
    return filled(
        '<figure class="scatter"><figcaption>{} (upwards) against {}: lower left is better; choose a point to read '
        'it</figcaption><div class="plot"><div class="ticks-y">{}</div><div class="plane"><svg class="field" '
        'width="100%" height="100%"><svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%" '
        'class="lines"><polyline points="{}"/></svg>{}</svg></div><div class="ticks-x">{}</div></div></figure>',
        y.name, x.name, _ticks(y, ends[1], reverse=True), line, joined(points), _ticks(x, ends[0]),
    )  # fmt: skip


def _ticks(axis: _Axis, ends: tuple[float, float], reverse: bool = False) -> Markup:
    """Return the values along an axis."""
    low, high = ends
    steps = [k / TICKS for k in range(TICKS + 1)]
    values = [low * (high / low) ** share if axis.log else low + (high - low) * share for share in steps]
    if axis.log:
        values = [v for v in (2**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1))]
    placed = [(value, _share(value, low, high, axis.log)) for value in values]
    side = "bottom" if reverse else "left"
    return joined(filled('<span style="{}:{}%">{}</span>', side, f"{100 * at:.1f}", axis.show(v)) for v, at in placed)


def _share(value: float, low: float, high: float, log: bool) -> float:
    """Return the place of a value between two others, from 0 to 1."""
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return the ends of an axis that shows all values."""
    low, high = min(values), max(values)
    if math.isclose(low, high, rel_tol=1e-9):
        return (low / 2, high * 2) if log else (0.9 * low, 1.1 * high if high else 1.0)
    return low, high
