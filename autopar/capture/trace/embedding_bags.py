"""Bags of embeddings that are all as long, ``nn.EmbeddingBag`` on ids [rows length]: traced as lookups and their sum.

Torch puts all ids one behind the other, and says where each bag begins, of which no part is a batch. Rows of lookups
are one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class BagsOfRows(TorchFunctionMode):
    """Takes ``embedding_bag`` apart, where ids have two dims."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding_bag:
            rows = _of_rows(*args, **(kwargs or {}))
            if rows is not None:
                return rows
        return func(*args, **(kwargs or {}))


def _of_rows(
    input: torch.Tensor, weight: torch.Tensor, offsets: Any = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """As ``torch.nn.functional.embedding_bag``, whose arguments these are; None for what is left as it is."""
    if input.ndim != 2 or not input.shape[1] or max_norm is not None or padding_idx is not None:
        return None
    if scale_grad_by_freq or sparse or mode not in ("sum", "mean"):
        return None
    rows = functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


__all__ = ["BagsOfRows"]
