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


_TAKEN_OVER = (
    "_autopar_captured_training", "_autopar_skeleton", "_autopar_signature", "_autopar_model_ref",
    "_autopar_model_class", "_autopar_model_values", "_autopar_model_keys", "_autopar_model_tensors",
    "_autopar_names_of_both", "_autopar_gradient_dtype", "_autopar_local_batch", "_autopar_buckets",
    "_autopar_layouts_change", "_autopar_told_of_statistics",
)  # fmt: skip
"""Attributes that a copy has as the module that it is made of."""


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
    for name in _TAKEN_OVER:
        setattr(new, name, getattr(pm, name))
    new._autopar_compared.every = pm._autopar_compared.every
    new._autopar_batch = Batch(
        pm._autopar_captured, pm._autopar_signature, pm._autopar_device, pm._autopar_batch.pieces
    )
    programs = pm._autopar_programs
    new._autopar_programs = programs.of_copy() if programs is not None and programs.shapes else None
    new._autopar_take_modes_of(pm)
    copy_momenta(pm, new)
    return new


__all__ = ["copied"]
