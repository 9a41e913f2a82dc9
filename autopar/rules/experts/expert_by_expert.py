"""Routed experts one after the other, on CPUs: each expert's rows pass through the whole block before the next one's.

What stands between the products of all rows at once can be larger than any cache, and memory of that size is taken from
the system, page by page, each time. Rows of one expert are a fraction of it, whose memory is used again. On GPUs, and
if there are few rows, one call for all experts is quicker.

The gradients of an expert's matrices are computed in their place in the gradient of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.torch_private import FakeTensor, LocalTensor, is_in_torch_dispatch_mode
from autopar.words.tracing import is_traced
from autopar.words.trees import Context

LEAST_BYTES = 2**20
"""The bytes of what one expert's rows make, from which on experts take turns."""


def in_turn(tensors: Sequence[torch.Tensor], n_rows: Any, n_experts: int) -> bool:
    """Check that experts are computed one after the other.

    Args:
        tensors: rows, and what experts have.
        n_rows: the number of rows of all experts.
    """
    if is_traced() or is_in_torch_dispatch_mode() or not isinstance(n_rows, int):
        return False
    if any(x.device.type != "cpu" or isinstance(x, (FakeTensor, LocalTensor)) for x in tensors):
        return False
    widest = max(x.shape[-1] * x.element_size() for x in tensors if x.dim() > 1)
    return n_rows * widest >= LEAST_BYTES * max(n_experts, 1)


class Matrices:
    """The matrices of all experts, one by one.

    Args:
        whole: [experts k n].
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole.detach()
        self.gradient: torch.Tensor | None = None
        self.each: tuple[torch.Tensor, ...] = _OneByOne.apply(whole, self)

    def product(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply the rows by an expert's matrix; called once for each expert."""
        return _Product.apply(rows, self.each[expert], self, expert)  # type: ignore[no-any-return]

    def place(self, expert: int) -> torch.Tensor:
        """Return where the gradient of an expert's matrix is written."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole)
        return self.gradient[expert]


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, whole: torch.Tensor, matrices: Matrices) -> tuple[torch.Tensor, ...]:
        ctx.matrices = matrices
        ctx.set_materialize_grads(False)
        return whole.unbind(0)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor | None) -> Any:
        matrices: Matrices = ctx.matrices
        for expert, grad in enumerate(grads):
            place = matrices.place(expert)
            if grad is None:
                place.zero_()
            elif grad.data_ptr() != place.data_ptr():
                place.copy_(grad)
        made, matrices.gradient = matrices.gradient, None
        return made, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows: torch.Tensor, matrix: torch.Tensor, matrices: Matrices, expert: int
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, matrix)
        ctx.matrices, ctx.expert = matrices, expert
        return torch.mm(rows, matrix)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        rows, matrix = ctx.saved_tensors
        of_rows = torch.mm(grads[0], matrix.t()) if ctx.needs_input_grad[0] else None
        of_matrix = None
        if ctx.needs_input_grad[1]:
            of_matrix = torch.mm(rows.t(), grads[0], out=ctx.matrices.place(ctx.expert))
        return of_rows, of_matrix, None, None


def one_after_the_other(
    rows: Sequence[torch.Tensor], ends: torch.Tensor, body: Callable[[Sequence[torch.Tensor], int], torch.Tensor]
) -> torch.Tensor | None:
    """Compute a block on rows in the order of their experts; None if no expert has any.

    Args:
        rows: tensors [rows ...], in that order.
        ends: int [experts], behind which row each expert's rows end; rows behind the last end have no expert and
            become zero.
        body: makes of an expert's rows, and its number, what the block does.
    """
    begins = [0, *ends.tolist()]
    sizes = [end - begin for begin, end in itertools.pairwise(begins)]
    left = len(rows[0]) - begins[-1]
    parts = [x.split([*sizes, left]) for x in rows]
    made = [body([part[e] for part in parts], e) for e, size in enumerate(sizes) if size]
    if not made:
        return None
    return torch.cat([*made, made[0].new_zeros(left, *made[0].shape[1:])] if left else made)
