"""Norms of a batch that a cut leaves a single row of, and the strides that torch's kernels go by.

The stride of a dim of one element may be any, as in a transposed view. Torch's kernels of batch norm on the CPU take it
for a sign of the layout: where the input and the gradient seem to lie in two ways, the gradients that they give are
wrong. Instance norm, which is a batch norm of one row with a channel for every picture and channel, reads a gradient in
channels last wrongly whatever its stride is. A batch of several rows has neither, and a cut makes single rows of it.
"""

from __future__ import annotations

from typing import Any

import torch
from spmd_types import rules as types

from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes
from autopar.torch_private import each_rank
from autopar.words.trees import Context

_aten = torch.ops.aten


def with_stride_in_order(x: torch.Tensor) -> torch.Tensor:
    """Give ``x`` [b c ...], which has one row, the batch stride that its layout implies."""
    if x.dim() < 3 or x.shape[0] != 1 or x.is_meta or x.stride(0) == x.shape[1:].numel():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _in_one_piece(grad: torch.Tensor) -> torch.Tensor:
    """Give the gradient [b c ...] of one row the layout that torch makes by default."""
    if grad.dim() < 3 or grad.shape[0] != 1 or grad.is_meta:
        return grad
    return with_stride_in_order(grad).contiguous()


class _InOrder(torch.autograd.Function):
    """The same values, and the same gradient, in the strides that torch's kernels read well."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return each_rank(with_stride_in_order)(x.view_as(x))  # type: ignore[no-any-return]

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor) -> Any:
        letters = "bcxyz"[: x.dim()]
        return types.einsum(f"{letters}->{letters}", x)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> torch.Tensor:
        return each_rank(_in_one_piece)(grad)  # type: ignore[no-any-return]


def _of_rows(norm: Any, x: torch.Tensor, others: tuple[Any, ...]) -> torch.Tensor:
    return _InOrder.apply(norm(_InOrder.apply(x), *others))  # type: ignore[no-any-return]


def batch_norm_of_rows(x: torch.Tensor, *others: Any, cut: Cuts, sizes: Sizes = None) -> torch.Tensor:
    """Compute ``aten.batch_norm`` with given statistics and the batch cut."""
    return _of_rows(_aten.batch_norm.default, x, others)


def instance_norm_of_rows(x: torch.Tensor, *others: Any, cut: Cuts, sizes: Sizes = None) -> torch.Tensor:
    """Compute ``aten.instance_norm`` with the batch cut."""
    return _of_rows(_aten.instance_norm.default, x, others)
