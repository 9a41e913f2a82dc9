"""Steps of torch's optimizers on DTensors: elementwise ones on pieces, those of whole matrices on whole ones.

Parameters of a parallel module, their gradients and an optimizer's state are DTensors. DTensor works out for each
operator of a step how it is cut, which takes longer than the operator itself, and chooses neither foreach nor fused
kernels by default. Most of torch's optimizers compute each element by itself: on the local tensors they do the same,
at the speed of plain tensors. :func:`correct` puts a function in front of the functional form of each
(``torch.optim.adam.adam(params, grads, exp_avgs, ...)``), which hands on the local tensors where all tensors of a
parameter are cut alike; else DTensor does it as before. State stays DTensors, so checkpoints are what they were.

Muon and Adafactor look at rows, columns and whole matrices. What DTensor makes of that depends on the cut, down to
sums in bfloat16 that are added up over ranks. Muon's matrices are spread over the ranks
(:mod:`~autopar.runtime.parameters.whole_matrices`), as are Adafactor's parameters, and those of optimizers of other
libraries that need them whole (:mod:`.step_trial`). Functional forms that are called by themselves run on one whole
parameter after the other, which is gathered for it, and every rank takes its piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import RunError
from autopar.runtime.parameters import rounded_steps, whole_matrices
from autopar.runtime.parameters.state import wrapped_as
from autopar.runtime.repairs import step_trial
from autopar.runtime.repairs.dtensor_writes import take
from autopar.torch_private import MUON, OPTIMIZERS_OF_ELEMENTS, OPTIMIZERS_OF_MATRICES

_Step = Callable[..., None]
_MARK = "_autopar_step_of"
_GRADIENTS = 1
"""Where the gradients stand among the lists; a step only reads them."""


def correct() -> None:
    """Repair the steps of torch's optimizers for DTensors from now on; a second call changes nothing."""
    step_trial.watch()
    for functions, wrap in ((OPTIMIZERS_OF_ELEMENTS, _on_pieces), (OPTIMIZERS_OF_MATRICES, _on_whole)):
        for function in functions:
            step = function.get()
            if not hasattr(step, _MARK):
                wrapped = wrap(step)
                setattr(wrapped, _MARK, step)
                function.set(wrapped)


def _on_pieces(step: _Step) -> _Step:
    """Run the functional form of an elementwise optimizer on local tensors where possible."""

    @functools.wraps(step)
    def on_pieces(params: list[torch.Tensor], *lists: Any, **options: Any) -> None:
        if rounded_steps.is_used():
            if torch.compiler.is_compiling():
                raise RunError("an optimizer's step cannot be compiled once a policy rounds what steps write")
            if rounded_steps.kept_apart(params):
                rounded_steps.step(step, params, lists, options)
                return
        if torch.compiler.is_compiling() or options.get("differentiable") or not _cut_alike(params, lists):
            step(params, *lists, **options)
            return
        local = [_local_of(values) if isinstance(values, list) else values for values in lists]
        before = [list(values) if isinstance(values, list) else values for values in local]
        step([_local(param) for param in params], *local, **options)
        for given, now, then in zip(lists, local, before, strict=True):
            if isinstance(given, list):  # SGD puts its first momentum into the list
                for i, (value, was) in enumerate(zip(now, then, strict=True)):
                    if value is not was:
                        given[i] = _placed_as(params[i], value)

    return on_pieces


def _on_whole(step: _Step) -> _Step:
    """Run the functional form of an optimizer of whole matrices on owners of them, or on one whole one at a time."""
    is_muon = (step.__module__, step.__name__) == (MUON.module, MUON.path)

    @functools.wraps(step)
    def on_whole(params: list[torch.Tensor], *lists: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not any(isinstance(param, DTensor) for param in params):
            step(params, *lists, **options)
            return
        if is_muon and whole_matrices.can_step(step, (params, *lists), options):
            grads, buffers = lists
            whole_matrices.step_on_owners(params, grads, buffers, options)
            return
        for i in range(len(params)):
            given = [[values[i]] if isinstance(values, list) and values else values for values in (params, *lists)]
            whole = [[_whole(value) for value in values] if isinstance(values, list) else values for values in given]
            step(*whole, **options)
            for position, (values, results) in enumerate(zip(given, whole, strict=True)):
                if isinstance(values, list) and position != _GRADIENTS:
                    for value, result in zip(values, results, strict=True):
                        if isinstance(value, DTensor) and _is_cut(value):
                            take(value, result)

    return on_whole


def _cut_alike(params: Sequence[torch.Tensor], lists: Sequence[Any]) -> bool:
    """Check whether all parameters are DTensors, each with gradients and state of its placements, or none is."""
    if not any(isinstance(param, DTensor) for param in params):
        return False
    for values in lists:
        if not isinstance(values, list) or not values:
            continue
        if len(values) != len(params):
            return False
        for param, value in zip(params, values, strict=True):
            if isinstance(value, DTensor):
                if not isinstance(param, DTensor) or (
                    value.placements != param.placements
                    or value.device_mesh != param.device_mesh
                    or value.shape != param.shape
                ):
                    return False
            elif isinstance(param, DTensor) and isinstance(value, torch.Tensor) and value.ndim:
                return False  # state that is whole beside a parameter that is not
    return True


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _local_of(tensors: Sequence[Any]) -> list[Any]:
    return [_local(tensor) for tensor in tensors]


def _placed_as(param: torch.Tensor, local: Any) -> Any:
    """Wrap the result of a step on a local tensor, placed as its parameter."""
    if not isinstance(param, DTensor) or not isinstance(local, torch.Tensor):
        return local
    return wrapped_as(param, local)


def _is_cut(tensor: DTensor) -> bool:
    return not all(isinstance(placement, Replicate) for placement in tensor.placements)


def _whole(tensor: Any) -> Any:
    """Gather a DTensor; where each rank has all of it, return that itself, to which the step then writes."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not _is_cut(tensor):
        return tensor._local_tensor
    detached: Any = tensor.detach()
    return detached.full_tensor()
