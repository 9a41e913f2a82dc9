"""Pipeline schedules as data: words, builders, simulation, search. Numbers only: no torch, no model, no ranks."""

from .actions import Action, Overlap, Schedule, parse
from .builders import SCHEDULES, allows, build, forward_only
from .grid import grid
from .placements import loop_placement, v_placement
from .search import Found, search
from .simulate import Deadlock, simulate
from .timeline import Timeline, live_per_rank, live_per_stage, peak_bytes
from .times import Edge, Times, times

__all__ = [
    "SCHEDULES", "Action", "Deadlock", "Edge", "Found", "Overlap", "Schedule", "Timeline", "Times", "allows", "build",
    "forward_only", "grid", "live_per_rank", "live_per_stage", "loop_placement", "parse", "peak_bytes", "search",
    "simulate", "times", "v_placement",
]  # fmt: skip
