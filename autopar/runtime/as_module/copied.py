"""``copy.deepcopy`` of a parallel module: another one, with parameters and buffers of its own.

Averaged weights (``torch.optim.swa_utils.AveragedModel``, ``ModelEma``) begin with a copy of the model. It is built
anew, by the same plan and on the same ranks, all of which must copy; then it takes the values. Grouped parameters of an
optimizer that is copied with the module follow it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.without_values import without_values
from autopar.runtime.batches.batch import Batch
from autopar.runtime.variants.run import ParallelRun
from autopar.torch_private import module_at

_TAKEN_OVER = (
    "planned", "captured_training", "signature", "gradient_dtype", "local_batch", "buckets", "layouts_change",
    "told_of_statistics", "evaluates_otherwise",
)  # fmt: skip
"""Attributes that a copy has as the run that it is made of."""


def copied(
    run: ParallelRun, memo: dict[int, Any], parallel: Callable[[ParallelRun], torch.nn.Module]
) -> torch.nn.Module:
    """Return a copy of a run's module, with the program that runs now, and the calls and modes that it takes.

    Args:
        run: the run of the module.
        memo: copies by the ids of what they are of.
        parallel: turns the module of a run into a parallel one.
    """
    with run.user.as_written(captures=False) as model:
        twin = without_values(model, memo)
    values: dict[str, torch.Tensor] = {
        **dict(twin.named_parameters(remove_duplicate=False)), **dict(twin.named_buffers(remove_duplicate=False))
    }  # fmt: skip
    new = run.rebuilt(twin, lambda name: values[name])
    with torch.no_grad():
        for name, value in run.registered().items():
            owner, key = new.owner_of(name)
            mine = (owner._parameters if key in owner._parameters else owner._buffers)[key]
            assert mine is not None
            mine.copy_(value)
            memo[id(value)] = mine
            if isinstance(value, torch.nn.Parameter):
                mine.requires_grad_(value.requires_grad)
    for name in _TAKEN_OVER:
        setattr(new, name, getattr(run, name))
    new.compared.every = run.compared.every
    new.batch = Batch(run.captured, run.signature, run.device, run.batch.pieces)
    new.programs = run.programs.of_copy(twin) if run.programs is not None and run.programs.shapes else None
    new.trained = run.trained
    new.modes.at_first = run.modes.at_first
    parallel(new)
    new.user.hidden = copy.deepcopy(run.user.hidden)
    if new.modes.training != new.trained and new.runs_in(new.trained):
        new.have_evaluation()
    for kept in ("statistics_anew", "statistics_staying"):
        had = getattr(run, kept)
        setattr(new, kept, {path: (module_at(twin, path), momentum) for path, (_, momentum) in had.items()})
    return twin
