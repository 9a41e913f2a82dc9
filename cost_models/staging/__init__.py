"""Cutting a chain of blocks into pipeline stages over unequal submeshes. Numbers only: costs come from the caller.

words        what goes in and comes out           bounds       what the rest costs at least
submeshes    places that a stage may have         dynamic      the dynamic program
table        all possible stages as arrays        search       over numbers of stages, narrow first
estimate     the objective                        failure      why nothing fits

The planner uses it where groups of devices differ (:mod:`autopar.planner.inter_op.unequal`); equal groups have a
quicker way. What schedules need and leave idle is in :mod:`cost_models.pipeline.kinds`.
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
)

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
