"""A schedule drawn as text before anybody has times for it."""

from __future__ import annotations

from .actions import Schedule
from .drawing import WIDTH, draw
from .simulate import Deadlock, simulate
from .timeline import Timeline
from .times import times as make_times


def grid(drawn: Schedule | Timeline, width: int = WIDTH) -> str:
    """What :func:`~cost_models.schedules.drawing.draw` gives of a timeline, or of a schedule: it is drawn with
    F, I, W = 1 and B = 2, as the papers do, and as far as it runs."""
    if isinstance(drawn, Schedule):
        try:
            drawn = simulate(drawn, make_times(drawn.n_stages))
        except Deadlock as deadlock:
            drawn = deadlock.timeline
    return draw(drawn, width)


__all__ = ["grid"]
