"""Comparison of a captured graph with its model: equal loss, gradients and buffers, or the module that differs.

All packages behind capture are proved against the graph, so the graph must be the model. Both run once on one device,
in the model's own precision. Random operators draw the same on both sides: the generator is seeded before each of them.
Where a loop over experts drops elements of each expert's rows and the graph of all rows, nothing is dropped on either
side. The model is not changed: gradients are discarded, and buffers, Python attributes and the states of all generators
are restored.

======================== ==============================================================================================
:mod:`.graph_vs_eager`   the comparison, and its limits on time
:mod:`.sides`            runs of the model and of the graph
:mod:`.relative`         differences between results, and the part that rounding explains
:mod:`.first_difference` the first module that differs
:mod:`.double_precision` conversion to float64, where rounding does not blur a check
:mod:`.same_model`       a check that all ranks captured the model
:mod:`.last_digits`      the effect of rounding alone
:mod:`.other_batch`      a second batch, on which constants of the first one show
:mod:`.draws_of_eager`   comparison of random draws with eager mode's
:mod:`.parts_of_loss`    comparison of the microbatches' losses with the loss of the batch
:mod:`.padding`          a trial that padding changes no result
:mod:`.program_vs_eager` programs of many ranks in this process against the graph, and that against the model;
                         :mod:`.in_process_ranks`: many ranks in one process
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
