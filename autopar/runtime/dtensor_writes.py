"""Writes to parts of a DTensor, which torch loses in silence, and operators that it cannot cut.

A view of a DTensor along a dim that is cut (``weight[0]``, ``weight[:k]``, ``weight.diagonal()``) is a copy that was
put together, so what scripts write to it is lost: rows of padding that are zeroed, embeddings that are partly loaded,
masks of pruning. On the meshes of parallel modules the write is done again on the whole tensor, from the view that
autograd remembers, and every rank takes its piece.

Some operators torch refuses, or they leave a DTensor that is none (``index_copy_``, ``index_put_`` with a mask,
``renorm_``, ``torch.nn.init.eye_``), or give gradients of another loss (the mean of a piece): they run on the whole
tensors, and pieces are taken. All of this gathers, so all ranks do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.state import like
from autopar.torch_private import DTENSOR_HANDLERS, DTensorSpec, TensorMeta, pytree

_ATEN = torch.ops.aten
ON_WHOLE = (
    _ATEN.index_put_.default, _ATEN.index_copy_.default, _ATEN.index_add_.default, _ATEN.index_fill_.int_Scalar,
    _ATEN.index_fill_.int_Tensor, _ATEN.index_reduce_.default, _ATEN.scatter_.src, _ATEN.scatter_.value,
    _ATEN.scatter_add_.default, _ATEN.masked_scatter_.default, _ATEN.eye.out, _ATEN.eye.m_out, _ATEN.gather.default,
    _ATEN.embedding.default, _ATEN.embedding_dense_backward.default, _ATEN.mse_loss_backward.default,
    _ATEN.smooth_l1_loss_backward.default, _ATEN.huber_loss_backward.default, _ATEN.soft_margin_loss_backward.default,
    _ATEN.binary_cross_entropy_backward.default, _ATEN.convolution.default, _ATEN.convolution_backward.default,
    _ATEN.amax.default, _ATEN.amin.default,
)  # fmt: skip
"""Operators that torch's own strategies get wrong or refuse where the dim in question is cut.

Gradients of losses that are means, for one, are means over the piece of a rank.
"""
PENDING_ON_WHOLE = (_ATEN.fill_.Scalar,)
"""Those that it gets wrong where values are still to be added up: a number on every rank."""


def written_through(view: Any) -> None:
    """Do a write to a view again on what it is a view of, where the view is a copy; all ranks call it alike."""
    base: Any = view._base
    if not isinstance(base, DTensor) or _shares(view, base):
        return
    with torch.no_grad():
        whole = _whole(base).clone(memory_format=torch.contiguous_format)
        view._view_func_unsafe(whole).copy_(view.detach().full_tensor())
        take(base, whole)


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.detach().full_tensor()
    return whole


def _shares(view: Any, base: Any) -> bool:
    ours, theirs = view._local_tensor.untyped_storage(), base._local_tensor.untyped_storage()
    return bool(ours._cdata == theirs._cdata)


def take(tensor: Any, whole: torch.Tensor) -> None:
    """Have a DTensor hold its piece of ``whole``; one that was still to be added up is whole afterwards."""
    if any(p.is_partial() for p in tensor.placements):
        meta = TensorMeta(shape=whole.shape, stride=whole.stride(), dtype=whole.dtype)
        tensor._local_tensor = whole
        tensor._spec = DTensorSpec(tensor.device_mesh, (Replicate(),) * tensor.device_mesh.ndim, tensor_meta=meta)
    else:
        tensor._local_tensor.copy_(like(tensor, whole)._local_tensor)  # type: ignore[attr-defined]


def can_run_on_whole(op: Any) -> bool:
    """Whether an operator gives the same on whole tensors on all ranks: it draws no random numbers."""
    return torch.Tag.nondeterministic_seeded not in op.tags


def run_on_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """An operator on whole tensors; of those that it writes to every rank takes its piece, others are whole."""
    whole_of: dict[int, torch.Tensor] = {}

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in whole_of:
            whole_of[id(tensor)] = _whole(tensor).clone()
        return whole_of[id(tensor)]

    placements = (Replicate(),) * mesh.ndim
    with torch.no_grad():
        whole_args, whole_kwargs = pytree.tree_map_only(torch.Tensor, whole, (args, kwargs))
        made = op(*whole_args, **whole_kwargs)
        written: dict[int, torch.Tensor] = {}
        for tensor in _written(op, args, kwargs):
            if isinstance(tensor, DTensor):
                take(tensor, whole_of[id(tensor)])
                written[id(whole_of[id(tensor)])] = tensor
                if tensor._is_view():
                    written_through(tensor)
        inputs = {id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in written or id(tensor) in inputs:
                return written.get(id(tensor), tensor)
            return DTensor.from_local(tensor, mesh, placements, run_check=False)

        return pytree.tree_map_only(torch.Tensor, placed, made)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from pytree.tree_leaves(value)


def handle_on_whole(meshes: set[DeviceMesh]) -> None:
    """Have :data:`ON_WHOLE` and :data:`PENDING_ON_WHOLE` run on whole tensors on these meshes."""
    handlers: dict[Any, Any] = DTENSOR_HANDLERS.get()
    before = dict(handlers)

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        pending = op not in PENDING_ON_WHOLE or any(p.is_partial() for p in found[0].placements)
        if pending and found[0].device_mesh in meshes:
            return run_on_whole(op, args, kwargs, found[0].device_mesh)
        del handlers[op]
        if op in before:
            handlers[op] = before[op]
        try:
            return op(*args, **kwargs)  # as torch does it
        finally:
            handlers[op] = handle

    for op in (*ON_WHOLE, *PENDING_ON_WHOLE):
        handlers[op] = handle


__all__ = ["can_run_on_whole", "handle_on_whole", "run_on_whole", "take", "written_through"]
