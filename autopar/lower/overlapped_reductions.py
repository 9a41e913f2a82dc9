"""Sums of gradients over ranks that travel while the gradient of a weight is computed.

Where a tensor that all ranks have alike is read by operators with which each rank goes its own way (``convert`` from
``I`` to ``R``; columns of a matrix, output channels of a convolution), its gradient is the sum of what the ranks have,
and whatever stands before it in the model waits for that sum. Of such an operator the backward makes two things, and
only the gradient of its input is waited for. So it is computed first and sent, the gradients of weight and bias are
computed meanwhile, and then the sum is waited for. Megatron-LM does the same for its column-parallel linear layers
(``LinearWithGradAccumulationAndAsyncCommunication``).

What the plan, the type checker and the certificate know of is the step and the operator, one after the other; only the
program as it runs has both in one function (:func:`with_overlap`). Numbers are the same to the last bit: these are the
calls that autograd makes.
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

_aten = torch.ops.aten
_Tensor = torch.Tensor
Gradients = tuple[_Tensor | None, ...]


@dataclass(frozen=True)
class _Product:
    """An operator of an input, a weight and perhaps a bias, in this order, and its gradients.

    Attributes:
        n_dims: of inputs for which the gradients are these; None for any from two on.
        backward: ``(gradient of the result, input, weight, further arguments, wanted)`` to the gradients of input,
            weight and bias that are wanted, None for the others: in the calls that autograd makes.
    """

    n_dims: int | None
    backward: Callable[[_Tensor, _Tensor, _Tensor, Sequence[Any], Sequence[bool]], Gradients]


def _of_linear(grad: _Tensor, x: _Tensor, weight: _Tensor, args: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
    rows = grad.flatten(0, -2)
    return (
        grad @ weight if wanted[0] else None,
        rows.t() @ x.flatten(0, -2) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _convolution(n_space: int) -> _Product:
    def backward(
        grad: _Tensor, x: _Tensor, weight: _Tensor, args: Sequence[Any], wanted: Sequence[bool]
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


def _of_each(value: Any, n_space: int) -> list[int]:
    """A size for each dim of space, of which one may stand for all."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * n_space if len(sizes) == 1 else sizes


_PRODUCTS: dict[Any, _Product] = {
    _aten.linear.default: _Product(None, _of_linear),
    _aten.conv1d.default: _convolution(1),
    _aten.conv2d.default: _convolution(2),
    _aten.conv3d.default: _convolution(3),
}


class _Overlapped(torch.autograd.Function):
    """``(operator(x, weight, bias, *args), x as each rank goes on with it)``."""

    @staticmethod
    def forward(
        ctx: Any, target: Any, axis: str, x: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.target, ctx.args, ctx.group = target, args, group_of_axis(axis)
        ctx.set_materialize_grads(False)
        each = x.view_as(x)
        ctx.save_for_backward(each, weight)
        return target(x, weight, bias, *args), each

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor | None, others: torch.Tensor | None) -> Any:
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
    """Whether input, weight and bias are to get a gradient: half a backward asks for some of them alone."""
    nodes = [node for node, _ in ctx.next_functions]  # of the tensors among the arguments
    nodes += [None] * (3 - len(nodes))
    return [wanted and reached(node) for wanted, node in zip(ctx.needs_input_grad[2:5], nodes[:3], strict=True)]


def overlapped(
    target: Any, axis: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` converted from ``I`` to ``R`` and read by an operator; in the backward its gradient is added up over the
    ranks while that of the weight is computed.

    Args:
        target: one of the operators of this module.
        axis: name of the mesh axis, whose mesh is the ambient one.
        args: of the operator, after the bias.

    Returns:
        what the operator makes, and the converted tensor for its other readers.
    """
    n_dims = _PRODUCTS[target].n_dims
    usual = x.dim() == n_dims if n_dims is not None else x.dim() > 1
    if usual and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad:
        return _Overlapped.apply(target, axis, x, weight, bias, *args)  # type: ignore[no-any-return]
    each = collectives.convert(x, axis, INVARIANT.kind, REPLICATED.kind)
    return target(each, weight, bias, *args), each


def with_overlap(graph: torch.fx.Graph) -> None:
    """Put :func:`overlapped` in the place of conversions and of the first operator that reads each, whose backward is
    the last one of theirs."""
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
    """Whether an operator reads a converted tensor as its input alone, in the same segment as all who read it."""
    segments = {node.meta.get("segment") for node in (convert, *convert.users)}
    if first.target not in _PRODUCTS or first.kwargs or len(segments) > 1:
        return False
    return first.args[0] is convert and all(arg is not convert for arg in first.args[1:])


__all__ = ["overlapped", "with_overlap"]
