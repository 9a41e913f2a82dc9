"""Writes to parts of a DTensor, which torch loses in silence, and operators that it cannot cut.

A view of a DTensor along a dim that is cut (``weight[0]``, ``weight[:k]``, ``weight.diagonal()``) is a copy that was
put together, so what scripts write to it is lost: rows of padding that are zeroed, embeddings that are partly loaded,
masks of pruning. On the meshes of parallel modules the write is done again on the whole tensor, from the view that
autograd remembers, and every rank takes its piece.

Some operators torch refuses, or they leave a DTensor that is none (``index_copy_``, ``index_put_`` with a mask,
``renorm_``, ``torch.nn.init.eye_``), or give gradients of another loss (the mean of a piece): they run on the whole
tensors, and pieces are taken. All of this gathers, so all ranks do it.

Random numbers (``torch.nn.init``, ``torch.randn_like(p)``, ``p.normal_()``, dropout of weights) are drawn for the whole
tensor, of which every rank takes its piece: those of one device with that seed. torch draws for the piece alone, and so
the same numbers on every rank, without a word: half of a weight would be a copy of the other half.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.parameters.placed_alike import like
from autopar.torch_private import DTENSOR_HANDLERS, DTensorSpec, TensorMeta, pytree, return_and_correct_aliasing
from autopar.words.trees import PyTree

_ATEN = torch.ops.aten
ON_WHOLE = (
    _ATEN.index_put_.default, _ATEN.index_copy_.default, _ATEN.index_add_.default, _ATEN.index_fill_.int_Scalar,
    _ATEN.index_fill_.int_Tensor, _ATEN.index_reduce_.default, _ATEN.scatter_.src, _ATEN.scatter_.value,
    _ATEN.scatter_add_.default, _ATEN.masked_scatter_.default, _ATEN.eye.out, _ATEN.eye.m_out, _ATEN.gather.default,
    _ATEN.embedding.default, _ATEN.embedding_dense_backward.default, _ATEN.mse_loss_backward.default,
    _ATEN.smooth_l1_loss_backward.default, _ATEN.huber_loss_backward.default, _ATEN.soft_margin_loss_backward.default,
    _ATEN.binary_cross_entropy_backward.default, _ATEN.convolution.default, _ATEN.convolution_backward.default,
    _ATEN.amax.default, _ATEN.amin.default, _ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default,
    _ATEN.huber_loss.default, _ATEN.soft_margin_loss.default, _ATEN.binary_cross_entropy.default,
    _ATEN.cumsum.default, _ATEN.cumprod.default, _ATEN.logcumsumexp.default, _ATEN.argmax.default,
    _ATEN.argmin.default, _ATEN.select_backward.default, _ATEN.binary_cross_entropy_with_logits.default,
    _ATEN.squeeze_.default, _ATEN.squeeze_.dim, _ATEN.squeeze_.dims,
)  # fmt: skip
"""Operators that torch's own strategies get wrong or refuse where the dim in question is cut.

Gradients of losses that are means, for one, are means over the piece of a rank, and the losses means of such means,
in which pieces that are not equally large count alike. Of a dim that is counted from the end, which is cut, running
sums are those of the pieces, and selections another one. ``squeeze_``, with which ``torch.quantile`` ends, leaves the
shape of before to a tensor of fewer dims.
"""
DRAWN = (
    _ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.exponential_.default, _ATEN.geometric_.default,
    _ATEN.log_normal_.default, _ATEN.cauchy_.default, _ATEN.random_.default, _ATEN.random_.to,
    _ATEN.random_.__getattr__("from"), _ATEN.bernoulli_.float, _ATEN.bernoulli_.Tensor, _ATEN.rand_like.default,
    _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype,
)  # fmt: skip
"""Operators that draw random numbers whatever their first tensor holds."""
DRAWN_OF_VALUES = (
    _ATEN.bernoulli.default, _ATEN.bernoulli.p, _ATEN.native_dropout.default, _ATEN.multinomial.default,
    _ATEN.poisson.default, _ATEN.rrelu_with_noise.default, _ATEN.normal.Tensor_float, _ATEN.normal.float_Tensor,
    _ATEN.normal.Tensor_Tensor,
)  # fmt: skip
"""Operators that draw random numbers with the values of their tensors."""
PENDING_ON_WHOLE = (_ATEN.fill_.Scalar,)
"""Operators that DTensor gets wrong where values are still to be added up: a number on every rank."""


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
    """Store this rank's shard of ``whole`` in a DTensor; a pending one or another shape becomes replicated."""
    if tensor.shape != whole.shape or any(p.is_partial() for p in tensor.placements):
        meta = TensorMeta(shape=whole.shape, stride=whole.stride(), dtype=whole.dtype)
        tensor._local_tensor = whole
        tensor._spec = DTensorSpec(tensor.device_mesh, (Replicate(),) * tensor.device_mesh.ndim, tensor_meta=meta)
    else:
        tensor._local_tensor.copy_(like(tensor, whole)._local_tensor)  # type: ignore[attr-defined]


def run_on_whole(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], mesh: DeviceMesh) -> PyTree:
    """Run an operator on whole tensors; every rank takes its shard of those it writes to, others are replicated.

    Random numbers are placed like the tensor whose shape they have.
    """
    first = args[0] if args and isinstance(args[0], DTensor) else None
    pending = first is None or any(p.is_partial() for p in first.placements)
    model = None if pending or torch.Tag.nondeterministic_seeded not in op.tags else first
    whole_of: dict[int, torch.Tensor] = {}

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in whole_of:
            unread = tensor is first and op in DRAWN
            local = tensor._local_tensor
            whole_of[id(tensor)] = local.new_empty(tensor.shape) if unread else _whole(tensor).clone()
        return whole_of[id(tensor)]

    placements = (Replicate(),) * mesh.ndim
    with torch.no_grad():
        whole_args, whole_kwargs = pytree.tree_map_only(torch.Tensor, whole, (args, kwargs))
        result = op(*whole_args, **whole_kwargs)
        written: dict[int, torch.Tensor] = {}
        for tensor in _written(op, args, kwargs):
            if isinstance(tensor, DTensor):
                take(tensor, whole_of[id(tensor)])
                if torch.Tag.inplace_view in op.tags:
                    return return_and_correct_aliasing(op, args, kwargs, tensor)
                written[id(whole_of[id(tensor)])] = tensor
                if tensor._is_view():
                    written_through(tensor)
        inputs = {id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in written or id(tensor) in inputs:
                return written.get(id(tensor), tensor)
            if model is not None and tensor.shape == model.shape:
                return like(model, tensor)
            return DTensor.from_local(tensor, mesh, placements, run_check=False)

        return pytree.tree_map_only(torch.Tensor, placed, result)


def _written(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Iterator[Any]:
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from pytree.tree_leaves(value)


def handle_on_whole(meshes: set[DeviceMesh]) -> None:
    """Run the operators that DTensor gets wrong on whole tensors, on `meshes`."""
    handlers: dict[Any, Any] = DTENSOR_HANDLERS.get()
    before = dict(handlers)

    def handle(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        dtensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        pending = op not in PENDING_ON_WHOLE or any(p.is_partial() for p in dtensors[0].placements)
        if pending and dtensors[0].device_mesh in meshes:
            return run_on_whole(op, args, kwargs, dtensors[0].device_mesh)
        del handlers[op]
        if op in before:
            handlers[op] = before[op]
        try:
            return op(*args, **kwargs)  # as torch does it
        finally:
            handlers[op] = handle

    for op in (*ON_WHOLE, *DRAWN, *DRAWN_OF_VALUES, *PENDING_ON_WHOLE):
        handlers[op] = handle
