"""Cutting a chain of blocks into pipeline stages over submeshes. Numbers only: costs come from the caller.

words        what goes in and comes out           fill         schedules: in flight, bubble
submeshes    places that a stage may have         estimate     the objective
table        all possible stages as arrays        bounds       what the rest costs at least
dynamic      the dynamic program                  search       over schedules and microbatches
failure      why nothing fits                     exhaustive   all ways, for tests
pipedream    PipeDream's own problem
"""

from .estimate import evaluate, step_seconds
from .exhaustive import exhaustive
from .fill import FILLS, Fill, fill_of
from .search import search, stage
from .words import RECOMPUTE, Candidate, Choice, NothingFits, Pool, Problem, Stage, StageCost, Submesh, no_transfer

__all__ = [
    "FILLS", "RECOMPUTE", "Candidate", "Choice", "Fill", "NothingFits", "Pool", "Problem", "Stage", "StageCost",
    "Submesh", "evaluate", "exhaustive", "fill_of", "no_transfer", "search", "stage", "step_seconds",
]  # fmt: skip
