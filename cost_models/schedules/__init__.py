"""Pipeline schedules as data. Numbers only: no torch, no model, no ranks.

====================== ================================================================================================
:mod:`.schedule_kinds` every schedule as a record; a new one registers itself there (docs/adding.md)
:mod:`.actions`        actions, rows and the text form; :mod:`.stage_placement`: ranks of stages
:mod:`.builders`       rows of the textbook schedules; :mod:`.listing`: rows by a policy; :mod:`.asynchronous`:
                       PipeDream
:mod:`.best_order`     searched schedules; :mod:`.branch_and_bound`: the fastest of all, for small cases
:mod:`.other_count`    a schedule for another number of microbatches
:mod:`.times`          seconds and bytes of a schedule's actions; :mod:`.simulate`: the simulation
:mod:`.timeline`       its result: seconds, bubble, memory; :mod:`.deadlock`: the message of a deadlock
:mod:`.channels`       the order of messages between two ranks, and schedules that demand too much of it
:mod:`.grid`           a schedule drawn as text; :mod:`.drawing`: a timeline
====================== ================================================================================================
"""

from .actions import Action, Overlap, Schedule, parse
from .best_order import BestOrder, search
from .builders import forward_only
from .grid import grid
from .other_count import with_microbatches
from .schedule_kinds import (
    ASYNCHRONOUS_KINDS,
    KNOWN,
    SCHEDULES,
    Fill,
    ScheduleKind,
    allows,
    build,
    fill_of,
    label_of,
    parse_kind,
    usual,
    weight_versions,
)
from .simulate import Deadlock, simulate
from .stage_placement import loop_placement, v_placement
from .timeline import Timeline, live_at_peak, live_per_rank, live_per_stage, peak_bytes
from .times import Edge, Times, times

__all__ = [
    "ASYNCHRONOUS_KINDS", "KNOWN", "SCHEDULES", "Action", "BestOrder", "Deadlock", "Edge", "Fill", "Overlap",
    "Schedule", "ScheduleKind", "Timeline", "Times", "allows", "build", "fill_of", "forward_only", "grid", "label_of",
    "live_at_peak", "live_per_rank", "live_per_stage", "loop_placement", "parse", "parse_kind", "peak_bytes", "search",
    "simulate", "times", "usual", "v_placement", "weight_versions", "with_microbatches",
]  # fmt: skip
