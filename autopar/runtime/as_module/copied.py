"""``copy.deepcopy`` of a parallel module: another one, with parameters and buffers of its own.

Averaged weights (``torch.optim.swa_utils.AveragedModel``, ``ModelEma``) begin with a copy of the model. It is built
anew, by the same plan and on the same ranks, all of which must copy; then it takes the values. Grouped parameters of an
optimizer that is copied with the module follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.runtime.as_module.statistics_anew import copy_momenta
from autopar.runtime.batches.batch import Batch

Build = Callable[[Callable[[str], torch.Tensor]], Any]


def copied(pm: Any, memo: dict[int, Any], build: Build) -> Any:
    """A copy of ``pm``, with the program that it runs now and the calls and modes that it takes.

    Args:
        build: makes a module like ``pm`` with given whole values by name.
    """
    shapes: dict[str, torch.Tensor] = dict(pm.named_parameters(remove_duplicate=False))
    shapes.update(pm.named_buffers(remove_duplicate=False))

    def blank(name: str) -> torch.Tensor:  # one element, seen as many
        return torch.zeros((), dtype=shapes[name].dtype).expand(shapes[name].shape)

    new = build(blank)
    memo[id(pm)] = new
    with torch.no_grad():
        for name, value in (*pm.named_parameters(), *pm.named_buffers()):
            owner, key = new.owner_of(name)
            mine = (owner._parameters if key in owner._parameters else owner._buffers)[key]
            mine.copy_(value)
            memo[id(value)] = mine
            if isinstance(value, torch.nn.Parameter):
                mine.requires_grad_(value.requires_grad)
    new._captured_training, new._skeleton = pm._captured_training, pm._skeleton
    new._signature, new._model_ref, new._model_class = pm._signature, pm._model_ref, pm._model_class
    new._model_values, new._model_keys, new._model_tensors = pm._model_values, pm._model_keys, pm._model_tensors
    new._names_of_both = pm._names_of_both
    new._gradient_dtype, new._compared.every, new._own_rows = pm._gradient_dtype, pm._compared.every, pm._own_rows
    new.buckets, new.layouts_change, new.told_of_statistics = pm.buckets, pm.layouts_change, pm.told_of_statistics
    new._batch = Batch(pm._captured, pm._signature, pm._device, pm._batch.pieces)
    new._programs = pm._programs.of_copy() if pm._programs is not None and pm._programs.shapes else None
    new._set_position(*pm._position())
    new.take_modes_of(pm)
    copy_momenta(pm, new)
    return new


__all__ = ["copied"]
