"""Sums of gradients over ranks that overlap the computation of a weight's gradient.

Where a replicated tensor is read by operators that differ between ranks (``convert`` from ``I`` to ``R``; columns of a
matrix, output channels of a convolution), its gradient is the sum of the ranks' gradients, and the backward of the
layer before needs that sum. So the gradient of the input is computed first and its all-reduce started, the gradients
of weight and bias are computed meanwhile, and then the all-reduce is waited for. Megatron-LM does the same for its
column-parallel linear layers (``LinearWithGradAccumulationAndAsyncCommunication``).

Plan, type checker and certificate see the step and the operator one after the other; only the program that runs has
both in one function (:func:`with_overlap`). Results are equal to the last bit: these are the calls that autograd makes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.autograd.function import once_differentiable

from autopar.lower import collectives
from autopar.torch_private import group_of_axis, reached
from autopar.words.placements import INVARIANT, REPLICATED
from autopar.words.trees import PyTree

_aten = torch.ops.aten
_Tensor = torch.Tensor
Gradients = tuple[_Tensor | None, ...]
Args = Sequence[PyTree]
Operator = Callable[..., _Tensor]


@dataclass(frozen=True)
class _Product:
    """An operator of an input, a weight and perhaps a bias, in this order, and its gradients.

    Attributes:
        n_dims: the number of dims of inputs for which the gradients are these; None for any from two on.
        backward: ``(gradient of the result, input, weight, further arguments, wanted)`` to the gradients of input,
            weight and bias that are wanted, None for the others: in the calls that autograd makes.
    """

    n_dims: int | None
    backward: Callable[[_Tensor, _Tensor, _Tensor, Args, Sequence[bool]], Gradients]


def _of_linear(grad: _Tensor, x: _Tensor, weight: _Tensor, _args: Args, wanted: Sequence[bool]) -> Gradients:
    rows = grad.flatten(0, -2)
    return (
        grad @ weight if wanted[0] else None,
        rows.t() @ x.flatten(0, -2) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _convolution(n_space: int) -> _Product:
    def backward(
        grad: _Tensor, x: _Tensor, weight: _Tensor, args: Args, wanted: Sequence[bool]
    ) -> Gradients:
        stride, padding, dilation = (
            _of_each(args[k] if len(args) > k else default, n_space) for k, default in enumerate((1, 0, 1))
        )
        groups = args[3] if len(args) > 3 else 1
        gradients: Gradients = _aten.convolution_backward.default(
            grad, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0] * n_space, groups, list(wanted)
        )
        return gradients

    return _Product(n_space + 2, backward)


def _of_each(value: int | Sequence[int], n_space: int) -> list[int]:
    """Return a size for each spatial dim; one may be given for all."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * n_space if len(sizes) == 1 else sizes


_PRODUCTS: dict[object, _Product] = {
    _aten.linear.default: _Product(None, _of_linear),
    _aten.conv1d.default: _convolution(1),
    _aten.conv2d.default: _convolution(2),
    _aten.conv3d.default: _convolution(3),
}


class _Overlapped(torch.autograd.Function):
    """An operator and the conversion of its input: ``(operator(x, weight, bias, *args), converted x)``."""

    @staticmethod
    def forward(
        ctx: Any, target: Operator, axis: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        *args: PyTree,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.target, ctx.args, ctx.group = target, args, group_of_axis(axis)
        ctx.set_materialize_grads(False)
        each = x.view_as(x)
        ctx.save_for_backward(each, weight)
        return target(x, weight, bias, *args), each

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor | None, others: torch.Tensor | None) -> Gradients:
        each, weight = ctx.saved_tensors
        args, backward = ctx.args, _PRODUCTS[ctx.target].backward
        of_x, *of_others = _asked_for(ctx)
        total, work = others if of_x else None, None
        if grad is not None and of_x:
            mine, *_ = backward(grad, each, weight, args, (True, False, False))
            assert mine is not None
            total = mine if others is None else mine + others
        if total is not None:
            total = total.contiguous() if total is not others else total.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(total, group=ctx.group, async_op=True)
        rest: Gradients = (None, None, None)
        if grad is not None and any(of_others):
            rest = backward(grad, each, weight, args, (False, *of_others))
        if work is not None:
            work.wait()
        return None, None, total, *rest[1:], *(None for _ in args)


def _asked_for(ctx: Any) -> list[bool]:
    """Return whether input, weight and bias need a gradient: half a backward computes some of them."""
    nodes = [node for node, _ in ctx.next_functions]  # of the tensors among the arguments
    nodes += [None] * (3 - len(nodes))
    return [wanted and reached(node) for wanted, node in zip(ctx.needs_input_grad[2:5], nodes[:3], strict=True)]


def overlapped(
    target: Operator, axis: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: PyTree
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert ``x`` from ``I`` to ``R`` and call an operator of this module on it.

    In the backward, the input's gradient is summed over the ranks of the axis while that of the weight is computed.

    Returns:
        the operator's result, and the converted tensor for its other readers.
    """
    n_dims = _PRODUCTS[target].n_dims
    usual = x.dim() == n_dims if n_dims is not None else x.dim() > 1
    if usual and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad:
        return _Overlapped.apply(target, axis, x, weight, bias, *args)  # type: ignore[no-any-return]
    each = collectives.convert(x, axis, INVARIANT.kind, REPLICATED.kind)
    return target(each, weight, bias, *args), each


def with_overlap(graph: torch.fx.Graph) -> None:
    """Replace conversions, and the first operator that reads each, by :func:`overlapped`.

    The backward of that operator is the last one of all readers'.
    """
    position = {node: k for k, node in enumerate(graph.nodes)}
    for convert in list(graph.nodes):
        if convert.target is not collectives.convert or convert.args[2:] != (INVARIANT.kind, REPLICATED.kind):
            continue
        readers = list(convert.users)
        first = min(readers, key=position.__getitem__, default=None)
        if first is None or not _can_be_first(first, convert):
            continue
        x, axis = convert.args[:2]
        weight, bias, args = first.args[1], first.args[2] if len(first.args) > 2 else None, first.args[3:]
        with graph.inserting_before(first):
            both = graph.call_function(overlapped, (first.target, axis, x, weight, bias, *args))
            result, each = (graph.call_function(operator.getitem, (both, k)) for k in range(2))
        for new in (both, result, each):
            if "segment" in first.meta:
                new.meta["segment"] = first.meta["segment"]
        result.meta["autopar"], each.meta["autopar"] = first.meta.get("autopar", {}), convert.meta["autopar"]
        first.replace_all_uses_with(result)
        graph.erase_node(first)
        if readers == [first]:
            graph.erase_node(each)
        convert.replace_all_uses_with(each)
        graph.erase_node(convert)
        position.update({both: position[first], result: position[first], each: position[first]})


def _can_be_first(first: torch.fx.Node, convert: torch.fx.Node) -> bool:
    """Return whether an operator reads a converted tensor as its input alone, in the segment of all readers."""
    segments = {node.meta.get("segment") for node in (convert, *convert.users)}
    if first.target not in _PRODUCTS or first.kwargs or len(segments) > 1:
        return False
    return first.args[0] is convert and all(arg is not convert for arg in first.args[1:])
