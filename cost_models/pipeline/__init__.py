"""Pipeline schedules as data: words, builders, simulation, search. Numbers only: no torch, no model, no ranks."""

from .actions import Action, Overlap, Schedule, parse
from .best_order import BestOrder, search
from .builders import forward_only
from .grid import grid
from .kinds import SCHEDULES, USUAL, Fill, ScheduleKind, allows, build, fill_of, label_of, parse_kind
from .simulate import Deadlock, simulate
from .stage_placement import loop_placement, v_placement
from .timeline import Timeline, live_at_peak, live_per_rank, live_per_stage, peak_bytes
from .times import Edge, Times, times

__all__ = [
    "SCHEDULES",
    "USUAL",
    "Action",
    "BestOrder",
    "Deadlock",
    "Edge",
    "Fill",
    "Overlap",
    "Schedule",
    "ScheduleKind",
    "Timeline",
    "Times",
    "allows",
    "build",
    "fill_of",
    "forward_only",
    "grid",
    "label_of",
    "live_at_peak",
    "live_per_rank",
    "live_per_stage",
    "loop_placement",
    "parse",
    "parse_kind",
    "peak_bytes",
    "search",
    "simulate",
    "times",
    "v_placement",
]  # fmt: skip
