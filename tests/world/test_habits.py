"""What people write in models trains as in eager mode, on one rank and on two under forced cuts, or is refused.

Three batches with other values, padding and labels, a step of plain SGD after each: what the first batch bakes in, or
what a buffer should have carried over, shows. Everything is in double precision and compared to 1e-9.
"""

from __future__ import annotations

import re

import pytest
from habits import HABITS, drops
from habits.today import TODAY
from habits.training import LIMIT_SECONDS, Step, differences, eager, one_rank, two_ranks, within

from autopar.errors import AutoparError

SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]
"""Of the random plans on two ranks; one is looked at each time."""

SHOWN = ("LayerDropByTorch", "StatisticsOfWhatRan")
"""Of branches on random numbers, whose spellings are compared with eager mode by unit/test_branches.py."""

RESEMBLE = {
    "RunningMean", "RunningMeanByData", "RunningMeanByCopy", "RunningMeanAssignedAfterAnEmptyBuffer",
    "MaskFilledThroughTranspose", "ChunkThenInPlace", "CopyWithCastAndBroadcast", "UniformInPlace",
    "IntegerDivision", "IntegerArithmetic", "FusedInPlace", "ShiftedInPlace", "AddTwice", "DetachedInPlace",
    "SiblingViews", "NamedTupleOutput", "OrderedDictOutput", "DictOutput", "Activations", "SharedUnderTwoNames",
    "EmptyCatOfLike", "NumpyNoise", "Scatter", "IndexAdd", "NoGradDecorator", "SetGradEnabled", "EnableGradInside",
    "CheckpointedSequence", "CheckpointedReentrant", "SlidingWindow", "Recurrence", "LeftPadding", "LastToken",
    "OldSpectralNorm", "EinsumAndOuter", "SinusoidTable", "RepeatAndTile", "RollAndFlip", "FrozenFirstLayer",
    "LearnedCodebook", "BatchNormTwice", "NegativeDimsAndEllipsis", "ReorderedList", "AsStridedRead",
    "CumulativeInPlace", "ChunksOfDataWritten", "GradientPenaltyFree", "PaddedConvolution", "UnfoldRead",
    "ActivationModules", "NanToNum", "WhereGuard", "MeanPooled", "BranchOnPadding", "GatedLoss", "BinarySign",
    "StepSliceWritten", "DiagonalFilled", "CastThenInPlace", "RowMaskWrite", "HardGumbel", "ViewOfViewWritten",
    "TwoFilledBuffers", "InstanceNormWithStatistics", "SameExpressionTwice", "SkewedScores", "RetainGrad",
    "PositionBuffer", "ToThatReturnsItself", "DataWritten", "FlattenedParameters", "OutArgument", "DropoutInPlace",
    "BoolAndNone", "ThroughIndexing", "StackOfList", "WhileLoop", "TopKMask",
}  # fmt: skip
"""Others of their kind are tried every time: another way to write a view or a buffer, another container or mask."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if HABITS[name].__module__ == drops.__name__ and not HABITS[name].refused and name not in SHOWN:
        return [pytest.mark.slow]
    if name in RESEMBLE:
        return [pytest.mark.slow]
    return [pytest.mark.xfail(strict=True, reason=TODAY[name])] if name in TODAY else []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in HABITS])
def test_trains_as_eager_or_is_refused(name: str, seed: int) -> None:
    kind = HABITS[name]
    truth = [] if kind.refused else eager(kind)
    steps: list[Step] = []
    try:
        with within(LIMIT_SECONDS):
            captured = one_rank(kind, steps)
            found = two_ranks(kind, captured, seed)
    except AutoparError as error:
        assert kind.refused, f"refused: {error}"
        assert re.search(kind.refused, str(error)), str(error)
        assert not steps or not differences(steps, eager(kind)[: len(steps)])
        return
    assert not kind.refused, "it was accepted" + str(differences(steps, eager(kind)))
    if kind.random:
        truth = two_ranks(kind, captured, None)
    else:
        assert not differences(steps, truth)
    assert not differences(found, truth), f"two ranks, plan {seed}"


def test_there_are_many() -> None:
    assert len(HABITS) >= 120 and set(HABITS) >= {*RESEMBLE, *SHOWN}
