"""Cutting a chain of blocks into pipeline stages over unequal submeshes. Numbers only: costs come from the caller.

================= =====================================================================================================
:mod:`.words`     what goes in and comes out
:mod:`.submeshes` places that a stage may have
:mod:`.table`     all possible stages as arrays
:mod:`.estimate`  the objective
:mod:`.bounds`    what the rest costs at least
:mod:`.dynamic`   the dynamic program
:mod:`.best_cuts` the search over numbers of stages, a narrow one first
:mod:`.failure`   why nothing fits
================= =====================================================================================================

The planner uses it where groups of devices differ (:mod:`autopar.planner.inter_op.estimating.unequal`); equal groups
have a quicker way. What schedules need and leave idle is in :mod:`cost_models.schedules.schedule_kinds`.
"""

from .best_cuts import stage
from .estimate import evaluate
from .words import (
    RECOMPUTE,
    NothingFits,
    Pool,
    StageChoice,
    StageCost,
    StageEstimate,
    StagingEstimate,
    StagingProblem,
    Submesh,
    no_transfer,
)  # fmt: skip

__all__ = [
    "RECOMPUTE",
    "NothingFits",
    "Pool",
    "StageChoice",
    "StageCost",
    "StageEstimate",
    "StagingEstimate",
    "StagingProblem",
    "Submesh",
    "evaluate",
    "no_transfer",
    "stage",
]  # fmt: skip
