"""A timeline drawn as text: ranks as rows and time as columns."""

from __future__ import annotations

import math

from .actions import parts
from .timeline import Timeline, step_seconds

WIDTH = 240  # characters, beyond which columns are made narrower


def draw(timeline: Timeline, width: int = WIDTH) -> str:
    """Draw one line per rank; each action is at its time, `-` fills the time it takes, `.` is idle.

        0 0F0 0F1 .......... 0B0---- ...

    Where `width` leaves an action too little room, its name is shortened to its kind, then to nothing.
    """
    schedule = timeline.schedule
    total = timeline.makespan_seconds
    if total <= 0:
        return "\n".join(f"rank {rank}" for rank in range(schedule.n_ranks)) + "\n"
    wanted = max(
        (
            (len(str(step)) + 1) / step_seconds(step, timeline.times)
            for row in schedule.rows
            for step in row
            if step_seconds(step, timeline.times) > 0
        ),
        default=1.0,
    )
    per_second = min(wanted, width / total)
    lines = []
    label = len(str(schedule.n_ranks - 1))
    for rank, row in enumerate(schedule.rows):
        line = ["."] * max(1, math.ceil(total * per_second - 1e-9))
        for step, start, end in zip(row, timeline.starts[rank], timeline.ends[rank]):
            first, last = round(start * per_second), round(end * per_second)
            room = last - first
            names = (str(step), "+".join(str(a) for a in parts(step)), "".join(a.kind for a in parts(step)))
            name = next((n for n in names if len(n) < room), names[2] if room >= len(names[2]) else "")
            # One blank at the end of each, so that neighbours stay apart, if there is room for it.
            cell = (name.ljust(room - 1, "-") + " ") if room > len(name) else name.ljust(room, "-")
            line[first:last] = list(cell)
        lines.append(f"rank {rank:>{label}} " + "".join(line).rstrip())
    return "\n".join(lines) + "\n"
