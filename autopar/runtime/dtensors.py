"""Where torch's DTensor is wrong in silence, made right for all DTensors of the process, when a module is parallelized.

Parameters of a parallel module, and their gradients, are DTensors, and training scripts compute with them out of
habits that stem from plain tensors. Three of these habits give other numbers on each rank, so that weights drift apart:

* ``p.grad.norm().item()``, ``float(p.sum())``, ``if (p > 1).any():`` read this rank's part of a number that is still to
  be reduced. They read the number: all ranks reduce it, as with every other operator of a DTensor.
* ``GradScaler`` looks for infinite gradients, and reduces what was found by the placement of the first gradient alone:
  where that is whole, an overflow in a piece of another one is seen by the rank that has the piece, which skips the
  step alone. It is reduced over every axis along which one of the gradients is in pieces.
* ``p.data = value`` changes nothing: the local tensor, which operators read, stays. It becomes the value's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import found_inf_reduce_handler

from autopar.errors import RunError

_READ = torch.ops.aten._local_scalar_dense.default
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_DATA: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]


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
    _DATA.__set__(tensor, value)
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec


def correct() -> None:
    """Have the numbers, overflows and assignments of DTensors be right from now on; a second call changes nothing."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    handlers[_READ], handlers[_UNSCALE] = _number, _unscaled
    DTensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment,method-assign]


__all__ = ["correct"]
