"""The cast to eight bits as one Triton kernel: a matrix is read once, and written as it is, turned, or both.

Products want both operands with the summed dim last, so a gradient and an activation are needed turned in the backward.
As operators of torch the copy that turns eight bits takes longer than the product of a small matrix on an H200.

Only this module imports triton for casts; whoever imports it has asked whether there is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64


@triton.jit
def _cast(
    x, scale, out, turned, m, k, of_row, of_column, BY_ROW: tl.constexpr, TURN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Cast one tile of ``x`` [m k], whose strides are ``of_row`` and ``of_column``."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < m) & (columns[None, :] < k)
    value = tl.load(x + rows[:, None] * of_row + columns[None, :] * of_column, mask=inside, other=0.0).to(tl.float32)
    if BY_ROW:
        value = value / tl.load(scale + rows, mask=rows < m, other=1.0)[:, None]
    else:
        value = value / tl.load(scale)
    narrow = value.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * k + columns[None, :], narrow, mask=inside)
    if TURN:
        there = (columns[:, None] < k) & (rows[None, :] < m)
        tl.store(turned + columns[:, None] * m + rows[None, :], tl.trans(narrow), mask=there)


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, turn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x / scale`` in ``dtype``, [m k], and, if ``turn``, turned, [k m]; else the same tensor twice.

    Args:
        x: [m k] of 16 or 32 bits, in any strides.
        scale: float32, [] or [m 1].
    """
    m, k = x.shape
    out = torch.empty(m, k, dtype=dtype, device=x.device)
    turned = torch.empty(k, m, dtype=dtype, device=x.device) if turn else out
    if x.numel():
        grid = (triton.cdiv(m, _BLOCK), triton.cdiv(k, _BLOCK))
        _cast[grid](
            x, scale.contiguous(), out, turned, m, k, x.stride(0), x.stride(1), BY_ROW=bool(scale.dim()), TURN=turn,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return out, turned
