"""Calls of attention with dropout: plain, causal, with shared keys and all kinds of masks."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.attention import attention

SEED, P = torch.tensor(7), 0.25
SQUARE = (2, 4, 24, 8)
CASES: dict[str, tuple[Any, ...]] = {
    "plain": (SQUARE, SQUARE, SQUARE, None, False),
    "causal": (SQUARE, SQUARE, SQUARE, None, True),
    "causal, more queries": ((1, 2, 30, 4), (1, 2, 12, 4), (1, 2, 12, 4), None, True),
    "causal, fewer queries": ((1, 2, 12, 4), (1, 2, 30, 4), (1, 2, 30, 4), None, True),
    "shared keys": ((2, 6, 20, 8), (2, 2, 12, 8), (2, 2, 12, 4), None, False),
    "no heads": ((20, 8), (12, 8), (12, 4), None, False),
    "one batch of keys": (SQUARE, (1, 4, 24, 8), (1, 4, 24, 8), None, False),
    "booleans": (SQUARE, SQUARE, SQUARE, ("bool", (24, 24)), False),
    "booleans of keys": (SQUARE, SQUARE, SQUARE, ("bool", (2, 1, 1, 24)), False),
    "a trained mask": (SQUARE, SQUARE, SQUARE, ("float", (1, 4, 24, 24)), False),
    "a trained mask of queries": ((2, 6, 20, 8), (2, 2, 12, 8), (2, 2, 12, 4), ("float", (6, 20, 1)), False),
    "a trained mask of keys": ((2, 6, 20, 8), (2, 2, 12, 8), (2, 2, 12, 4), ("float", (12,)), False),
}  # fmt: skip


def inputs(name: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(3)
    *sizes, mask, _ = CASES[name]
    tensors = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    if mask is None:
        return [*tensors, None]
    kind, size = mask
    if kind == "float":
        return [*tensors, torch.randn(size, dtype=dtype, requires_grad=True)]
    of_keys = torch.rand(size) < 0.7
    if size[-2] > 1:
        of_keys[..., :1, :] = False  # a query without any key
    return [*tensors, of_keys]


def attend(tensors: list[Any], causal: bool) -> torch.Tensor:
    q, k, v, mask = tensors
    out = (*q.shape[:-1], v.shape[-1])
    return attention.attention_with_dropout(
        q, k, v, mask, P, causal, enable_gqa=q.dim() > 2 and q.shape[-3] != k.shape[-3], cut={}, seed=SEED, site=5,
        shape=out, shards=((),) * len(out),
    )  # fmt: skip


def both(tensors: list[Any], causal: bool) -> list[torch.Tensor]:
    """The result and the gradients."""
    leaves = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
    y = attend(tensors, causal)
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))]
