"""A plot of the front of a serving plan, as SVG: tokens/s per device against tokens/s per user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
TICKS = 5


def front_plot(points: Sequence[tuple[float, float, str]], chosen: tuple[float, float], title: str) -> str:
    """Return the text of an SVG file.

    Args:
        points: ``(tokens/s per user, tokens/s per device, words)`` of each deployment of the front.
        chosen: the same two numbers of the plan.
        title: line above the plot.
    """
    most_x = _ceiling(max([p[0] for p in points] + [chosen[0]], default=1.0))
    most_y = _ceiling(max([p[1] for p in points] + [chosen[1]], default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / most_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM)
        )  # fmt: skip

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><!-- autopar -->',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for k in range(TICKS + 1):
        x, y = most_x * k / TICKS, most_y * k / TICKS
        px, _ = at(x, 0)
        _, py = at(0, y)
        lines.append(f'<path d="M{px:.1f} {TOP}V{HEIGHT - BOTTOM}M{LEFT} {py:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
        lines.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">tokens/s per user</text>')
    lines.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">tokens/s per device</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(a, b) for a, b, _ in points))
    lines.append(f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="1.5"/>')
    for a, b, words in points:
        x, y = at(a, b)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#2563eb"><title>{escape(words)}</title></circle>')
    x, y = at(*chosen)
    lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#dc2626" stroke-width="2"><title>the plan</title></circle>')
    return "\n".join([*lines, "</svg>", ""])


def _ceiling(value: float) -> float:
    """Return a round number that is at least as large."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(k * power for k in (1, 1.5, 2, 3, 4, 5, 7.5, 10) if k * power >= value * (1 - 1e-12))
