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
            owner, key = new._autopar_owner_of(name)
            mine = (owner._parameters if key in owner._parameters else owner._buffers)[key]
            mine.copy_(value)
            memo[id(value)] = mine
            if isinstance(value, torch.nn.Parameter):
                mine.requires_grad_(value.requires_grad)
    new._autopar_captured_training, new._autopar_skeleton = pm._autopar_captured_training, pm._autopar_skeleton
    new._autopar_signature, new._autopar_model_ref, new._autopar_model_class = (
        pm._autopar_signature,
        pm._autopar_model_ref,
        pm._autopar_model_class,
    )
    new._autopar_model_values, new._autopar_model_keys, new._autopar_model_tensors = (
        pm._autopar_model_values,
        pm._autopar_model_keys,
        pm._autopar_model_tensors,
    )
    new._autopar_names_of_both = pm._autopar_names_of_both
    new._autopar_gradient_dtype, new._autopar_compared.every, new._autopar_own_rows = (
        pm._autopar_gradient_dtype,
        pm._autopar_compared.every,
        pm._autopar_own_rows,
    )
    new._autopar_buckets, new._autopar_layouts_change, new._autopar_told_of_statistics = (
        pm._autopar_buckets,
        pm._autopar_layouts_change,
        pm._autopar_told_of_statistics,
    )
    new._autopar_batch = Batch(
        pm._autopar_captured, pm._autopar_signature, pm._autopar_device, pm._autopar_batch.pieces
    )
    new._autopar_programs = (
        pm._autopar_programs.of_copy() if pm._autopar_programs is not None and pm._autopar_programs.shapes else None
    )
    new._autopar_set_position(*pm._autopar_position())
    new._autopar_take_modes_of(pm)
    copy_momenta(pm, new)
    return new


__all__ = ["copied"]
