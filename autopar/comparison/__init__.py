"""Comparison of a captured graph with its model: equal loss, gradients and buffers, or the module that differs.

Everything behind capture is proved against the graph, so the graph has to be what the model does. Both run once on one
device, in the model's own precision. Random operators draw the same on both sides: the generator is seeded before each
of them. Where a loop over experts drops elements of each expert's rows and the graph of all rows, nothing is dropped on
either side. Nothing of the model is changed: gradients go nowhere, and buffers, Python attributes and the states of all
generators are put back.

======================== ==============================================================================================
:mod:`.graph_vs_eager`   the comparison, and for which models it would take too long
:mod:`.sides`            how the model runs, and how the graph
:mod:`.relative`         how far the results are apart, and how far rounding brings them
:mod:`.first_difference` where in the model the two part
:mod:`.double_precision` the same computation in float64, where rounding does not blur a check
:mod:`.same_model`       whether what was captured is the model, on every rank
:mod:`.last_digits`      how far rounding alone moves a computation
:mod:`.other_batch`      other values, so that what the example batch baked in shows
:mod:`.draws_of_eager`   whether a program draws by torch's generator what the model does
:mod:`.parts_of_loss`    whether the microbatches' losses add up to the loss of the batch
:mod:`.padding`          whether a model gives the same when its calls are padded
:mod:`.program_vs_eager` programs of many ranks in this process beside the graph, and that beside the model
======================== ==============================================================================================
"""

from autopar.capture.python.restoring import generators_kept, kept
from autopar.comparison.double_precision import LOW, as_wide_as, doubled, promoted, wide, widen
from autopar.comparison.graph_vs_eager import FAILS, FLOPS, compare_with_eager, reason_not_to
from autopar.comparison.relative import LIMITS, Comparison

__all__ = [
    "FAILS", "FLOPS", "LIMITS", "LOW", "Comparison", "as_wide_as", "compare_with_eager", "doubled", "generators_kept",
    "kept", "promoted", "reason_not_to", "wide", "widen",
]  # fmt: skip
