"""A schedule drawn as text without times."""

from __future__ import annotations

from .actions import Schedule
from .drawing import WIDTH, draw
from .simulate import Deadlock, simulate
from .timeline import Timeline
from .times import times as make_times


def grid(drawn: Schedule | Timeline, width: int = WIDTH) -> str:
    """Draw a timeline, or a schedule as far as it runs, by :func:`~cost_models.schedules.drawing.draw`.

    A schedule is drawn with F, I, W = 1 and B = 2, as in the papers.
    """
    if isinstance(drawn, Schedule):
        try:
            drawn = simulate(drawn, make_times(drawn.n_stages))
        except Deadlock as deadlock:
            drawn = deadlock.timeline
    return draw(drawn, width)
