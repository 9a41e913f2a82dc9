"""Where torch's DTensor is wrong in silence, made right for all DTensors of the process, when a module is parallelized.

Parameters of a parallel module, and their gradients, are DTensors, and training scripts compute with them out of
habits that stem from plain tensors. Some of these habits give other numbers, or others on each rank, so that weights
drift apart:

* ``p.grad.norm().item()``, ``float(p.sum())``, ``if (p > 1).any():`` read this rank's part of a number that is still to
  be reduced. They read the number: all ranks reduce it, as with every other operator of a DTensor.
* ``GradScaler`` looks for infinite gradients, and reduces what was found by the placement of the first gradient alone:
  where that is whole, an overflow in a piece of another one is seen by the rank that has the piece, which skips the
  step alone. It is reduced over every axis along which one of the gradients is in pieces.
* ``torch.stack([p.grad.norm() for p in ...]).sum()`` adds up parts of norms as if they were parts of sums. Norms are
  put together first.
* ``torch.isnan(p.grad).any().float()`` counts the ranks that have one. It is one or zero.
* ``p.data = value`` changes nothing: the local tensor, which operators read, stays. It becomes the value's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import RunError
from autopar.torch_private import (
    DTENSOR_HANDLERS,
    DTENSOR_STRATEGIES,
    LINEAR_REDUCTION_OP_MAP,
    DTensorSpec,
    NormPartial,
    OpSchema,
    OpStrategy,
    data_of_tensors,
    found_inf_reduce_handler,
    generate_redistribute_costs,
)

_READ = torch.ops.aten._local_scalar_dense.default
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)
_ANYS = (torch.ops.aten.any.default, torch.ops.aten.any.dim, torch.ops.aten.any.dims)
_Strategy = Callable[[OpSchema], OpStrategy]


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number that a DTensor of one element holds, on every rank."""
    with torch.no_grad():
        return op(args[0].detach().full_tensor())


def _unscaled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gradients by placement, so that each kind of placement has what it found reduced as it needs."""
    kinds: dict[Any, list[DTensor]] = {}
    for grad in args[0]:
        kinds.setdefault((grad.device_mesh, tuple(type(p) for p in grad.placements)), []).append(grad)
    for grads in kinds.values():
        found_inf_reduce_handler(op, (grads, *args[1:]), kwargs)


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """``tensor.data = value``.

    Raises:
        RunError: the value is a plain tensor, of which a rank would have to take its piece.
    """
    if not isinstance(value, DTensor):
        raise RunError(
            "p.data = value: the parameter is a DTensor, and the value a plain tensor; copy it with "
            "torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements), or use load_state_dict"
        )
    data_of_tensors.__set__(tensor, value)
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec


def _of_whole_norms(strategy: _Strategy) -> _Strategy:
    """How sums are cut: of norms only where these are put together."""

    def of(schema: OpSchema) -> OpStrategy:
        found = strategy(schema)
        for choice in found.strategies:
            for spec in choice.input_specs or ():
                if any(isinstance(p, NormPartial) for p in spec.placements):
                    before = schema.args_schema[0]
                    assert isinstance(before, OpStrategy)
                    choice.input_specs = [_without_norms(spec)]
                    choice.output_specs = _without_norms(choice.output_spec)
                    choice.redistribute_cost = [generate_redistribute_costs(before, choice.input_specs[0])]
                    break
        return found

    return of


def _without_norms(spec: DTensorSpec) -> DTensorSpec:
    placements = tuple(Replicate() if isinstance(p, NormPartial) else p for p in spec.placements)
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def correct() -> None:
    """Have the numbers, overflows and assignments of DTensors be right from now on; a second call changes nothing."""
    handlers: dict[Any, Any] = DTENSOR_HANDLERS.get()
    if handlers.get(_READ) is _number:
        return
    handlers[_READ], handlers[_UNSCALE] = _number, _unscaled
    strategies: dict[Any, Any] = DTENSOR_STRATEGIES.get()
    for op in _SUMS:
        strategies[op] = _of_whole_norms(strategies[op])
    LINEAR_REDUCTION_OP_MAP.update(dict.fromkeys(_ANYS, "max"))
    DTensor.data = property(data_of_tensors.__get__, _set_data)  # type: ignore[assignment,method-assign]


__all__ = ["correct"]
