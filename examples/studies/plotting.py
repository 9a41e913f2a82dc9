"""Line plots as SVG, written by hand: what the studies of this folder draw. Needs the standard library alone.

``write(path, [Panel("title", "devices", "tokens/s", lines, log_x=True)])`` puts panels side by side, with one legend
below them. A line is a name and its points; a point without a value (None) interrupts it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that people with colour blindness can tell apart (Okabe and Ito)."""
DASHES = ("", "7 4", "2 3", "9 3 2 3")
MARKS = ("circle", "square", "triangle", "diamond")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, ROW = 400, 300, 62, 14, 30, 46, 18
"""Pixels of a panel, of the margins around its axes, and of a row of the legend."""


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        name: its text in the legend; lines of several panels with one name share colour and legend.
        points: ``(x, y)``; y is None where there is no value.
        dashed: draw it dashed and without marks: a limit, or a value of others.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with lines; ``log_x`` and ``log_y`` choose logarithmic scales."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class _Scale:
    """The map from values to pixels of one axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about five round values."""
        if self.log:
            return _log_ticks(self.low, self.high)
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(k for k in (1, 2, 5, 10) if (self.high - self.low) / (k * step) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of two on a short scale, of ten on a long one."""
    base = 2.0 if math.log2(high / low) <= 12 else 10.0
    powers = range(math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9) + 1)
    every = max(1, math.ceil(len(powers) / 7))
    return [base**k for k in powers][::every]


def show(value: float) -> str:
    """Return a number in few characters: ``0.25``, ``64``, ``16k``, ``1.5M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels side by side into an SVG file."""
    names = list(dict.fromkeys((line.name, line.dashed) for panel in panels for line in panel.lines))
    columns = 2 * len(panels)
    height = HEIGHT + ROW * math.ceil(len(names) / columns) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {height}" '
        f'width="{WIDTH * len(panels)}" height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    styles = {name: _style(k) for k, (name, _) in enumerate(names)}
    for k, panel in enumerate(panels):
        parts += [f'<g transform="translate({k * WIDTH} 0)">', *_panel(panel, styles), "</g>"]
    for k, (name, dashed) in enumerate(names):
        x, y = LEFT + k % columns * WIDTH / 2, HEIGHT + k // columns * ROW + 6
        parts.append(_drawn([(x, y), (x + 24, y)], *styles[name], dashed))
        parts.append(f'<text x="{x + 30:.0f}" y="{y + 4}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _style(k: int) -> tuple[str, str]:
    return COLORS[k % len(COLORS)], MARKS[k % len(MARKS)]


def _panel(panel: Panel, styles: dict[str, tuple[str, str]]) -> list[str]:
    """Return the elements of one panel."""
    points = [(x, y) for line in panel.lines for x, y in line.points if y is not None]
    x_scale = _scale([x for x, _ in points], LEFT, WIDTH - RIGHT, panel.log_x, margin=0.03)
    y_scale = _scale([y for _, y in points], HEIGHT - BOTTOM, TOP, panel.log_y, margin=0.06, zero=True)
    parts = [f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="18" text-anchor="middle" font-size="13">'
             f"{escape(panel.title)}</text>"]  # fmt: skip
    for value in x_scale.ticks():
        x = x_scale(value)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{show(value)}</text>')
    for value in y_scale.ticks():
        y = y_scale(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{show(value)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#444"/>')
    center, middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{center}" y="{HEIGHT - 12}" text-anchor="middle">{escape(panel.x)}</text>')
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(panel.y)}</text>')
    for line in panel.lines:
        for run in _runs(line.points):
            placed = [(x_scale(x), y_scale(y)) for x, y in run]
            parts.append(_drawn(placed, *styles[line.name], line.dashed))
    return parts


def _scale(values: Sequence[float], start: float, end: float, log: bool, margin: float, zero: bool = False) -> _Scale:
    """Return a scale that shows all values; ``zero``: and, if it is linear and no value is negative, zero."""
    low, high = min(values), max(values)
    if log:
        ratio = max(high / low, 1.5) ** margin
        return _Scale(low / ratio, high * ratio, start, end, log)
    if zero and low >= 0:
        return _Scale(0.0, high * (1 + margin) or 1.0, start, end, log)
    room = margin * (high - low or abs(high) or 1.0)
    return _Scale(low - room, high + room, start, end, log)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Return the pieces of a line between points without a value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def _drawn(points: Sequence[tuple[float, float]], color: str, mark: str, dashed: bool) -> str:
    """Return a line with its marks."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{DASHES[1]}"' if dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dash}/>'
    return line if dashed else line + "".join(_mark(x, y, color, mark) for x, y in points)


def _mark(x: float, y: float, color: str, mark: str) -> str:
    shapes: dict[str, str] = {
        "circle": f"M{x - 3:.1f} {y:.1f}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
        "square": f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        "triangle": f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
        "diamond": f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z",
    }
    return f'<path d="{shapes[mark]}" fill="{color}"/>'


def run(main: Callable[[Path | None], object]) -> None:
    """Call a study's ``main`` with the path of its plot, if the command line has one: ``study.py [plot.svg]``."""
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
