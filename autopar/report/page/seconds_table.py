"""The parts of a step's seconds as a bar and a table; collectives are one part, with their kinds below it."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from autopar.report.page.markup import bar, table
from autopar.report.page.seconds_spent import (
    AGAIN,
    BACKWARD,
    BESIDE,
    FORWARD,
    IDLE,
    LATER,
    OPTIMIZER,
    SLICES,
)  # fmt: skip
from autopar.words.texts import show_seconds

COLOURS = {
    FORWARD: "F", BACKWARD: "B", AGAIN: "t-again", SLICES: "t-slices", BESIDE: "t-beside", OPTIMIZER: "t-optimizer",
    IDLE: "idle", LATER: "t-later",
}  # fmt: skip
COMMUNICATION = "communication"


def seconds_table(parts: Mapping[str, float], seconds: float) -> Markup:
    """Return the parts of a step as a bar and as a table, the largest first; ``seconds`` is the step."""
    moves = {kind: part for kind, part in parts.items() if kind not in COLOURS}
    own = {kind: part for kind, part in parts.items() if kind in COLOURS}
    if moves:
        own[COMMUNICATION] = sum(moves.values())
    colours = {**COLOURS, COMMUNICATION: "X"}
    order = [FORWARD, BACKWARD, AGAIN, SLICES, BESIDE, COMMUNICATION, OPTIMIZER, IDLE, LATER]
    pieces = [(colours[kind], own[kind], f"{kind} {show_seconds(own[kind])}") for kind in order if kind in own]
    rows: list[list[object]] = []
    for kind, part in sorted(own.items(), key=lambda entry: -entry[1]):
        name = Markup('<i class="swatch {}"></i>{}').format(colours[kind], kind)
        rows.append([name, show_seconds(part), f"{part / seconds:.1%}"])
        for move, of_move in sorted(moves.items(), key=lambda entry: -entry[1]) if kind == COMMUNICATION else ():
            name = Markup('<span class="inside">{}</span>').format(move.replace("_", "-"))
            rows.append([name, show_seconds(of_move), f"{of_move / seconds:.1%}"])
    rows.append(["the step", show_seconds(sum(parts.values())), "100%"])
    return Markup('<div class="tall">{}</div>{}').format(
        bar(pieces, seconds), table(("what", "seconds", "of the step"), rows, numbers=(1, 2), label="seconds of a step")
    )
