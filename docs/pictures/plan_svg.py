"""Draw a plan: its stages and the schedule of one step, as one SVG.

    autopar plan hf:llama-3-8b/config.json --batch 16 --seq 8192 --cluster dgx-h100 --stages 4 --schedule 1f1b \
        --microbatches 8 -o plan.json
    autopar simulate plan.json --trust --trace trace.json --json > stages.json
    python docs/pictures/plan_svg.py stages.json trace.json > docs/pictures/plan.svg
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, LANE, GAP = 960, 70, 26, 8
COLORS = {"forward": "#4c78a8", "backward": "#e0873f", "weights": "#8a6fb0", "bubble": "#e8e8e8"}


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle", fill: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="2" fill="{fill}" stroke="{stroke}"/>'


def stages_drawn(stages: list[dict[str, Any]], bottom: float) -> list[str]:
    """A box for each stage, with what it begins with, its mesh and its memory; arrows between."""
    parts, each = [], (WIDTH - LEFT) / len(stages)
    for k, stage in enumerate(stages):
        x = LEFT + k * each
        begins = stage["begins_at"].removeprefix("model.").split(":")[0].rsplit(".input_layernorm")[0]
        mesh = " x ".join(f"{axis}={n}" for axis, n in stage["mesh"].items())
        memory = f"{stage['memory_bytes'] / 2**30:.1f} of {stage['limit_bytes'] / 2**30:.1f} GiB"
        parts.append(box(x, 10, each - 30, bottom - 10, "#f5f7fa", "#9aa5b1"))
        devices = f"{min(stage['devices'])}-{max(stage['devices'])}"
        lines = (f"stage {k}: from {begins}", f"{mesh} on devices {devices}", memory)
        parts += [text(x + (each - 30) / 2, 32 + 18 * i, line) for i, line in enumerate(lines)]
        if k + 1 < len(stages):
            arrow = f"M{x + each - 28:.1f} {(10 + bottom) / 2} h20 m-6 -5 l6 5 l-6 5"
            parts.append(f'<path d="{arrow}" fill="none" stroke="#555" stroke-width="1.5"/>')
    return parts


def drawn(stages: list[dict[str, Any]], events: list[dict[str, Any]], caption: str) -> str:
    top = 92.0
    actions = [e for e in events if e["ph"] == "X" and e["cat"] != "transfer" and e["pid"] == 1]
    lanes = max(e["tid"] for e in actions) + 1
    end = max(e["ts"] + e["dur"] for e in actions)
    scale = (WIDTH - LEFT) / end
    parts = stages_drawn(stages, 80)
    for lane in range(lanes):
        y = top + lane * (LANE + GAP)
        parts.append(text(LEFT - 8, y + 17, f"group {lane}", anchor="end"))
        parts.append(box(LEFT, y, WIDTH - LEFT, LANE, COLORS["bubble"]))
        for e in (e for e in actions if e["tid"] == lane and e["cat"] != "bubble"):
            x, width = LEFT + e["ts"] * scale, e["dur"] * scale
            parts.append(box(x, y, width - 1, LANE, COLORS.get(e["cat"], COLORS["weights"])))
            if width > 16:
                parts.append(text(x + width / 2, y + 17, e["name"], 10, fill="#fff"))
    bottom = top + lanes * (LANE + GAP)
    x = float(LEFT)
    for name, words in (("forward", "forward"), ("backward", "backward"), ("bubble", "idle")):
        parts += [box(x, bottom + 8, 12, 12, COLORS[name]), text(x + 18, bottom + 18, words, anchor="start")]
        x += 90
    parts.append(text(WIDTH, bottom + 18, caption, anchor="end"))
    view = f'viewBox="0 0 {WIDTH + 4} {bottom + 28:.0f}" font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    plan, trace = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:3])
    words = (
        f"{plan['schedule']}, {plan['microbatches']} microbatches on {plan['cluster']}: "
        f"predicted {plan['seconds']:.2f} s a step, {plan['bubble_fraction']:.0%} idle"
    )
    sys.stdout.write(drawn(plan["stages"], trace["traceEvents"], words))
