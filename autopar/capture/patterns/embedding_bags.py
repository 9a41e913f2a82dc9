"""Bags of embeddings (``nn.EmbeddingBag``), traced as lookups and their sum.

Torch's own operator takes all ids one behind the other and the place where each bag begins: neither the table nor the
ids nor the bags could be cut. Lookups are cut by rows of the table, by ids and by features. Bags that are all as long
(ids [rows length]) are rows of a batch; bags with offsets are summed into rows by number, of which every rank adds what
it has.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, register
from autopar.words.trees import PyTree


def _bags(_func: Function, args: Args, kwargs: Kwargs) -> PyTree:
    """Take ``embedding_bag`` apart, where bags are sums or means."""
    bags = _taken_apart(*args, **kwargs)
    return PASS if bags is None else bags


def _taken_apart(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Compute ``torch.nn.functional.embedding_bag``, with the same parameters; None for what is left as it is."""
    if max_norm is not None or scale_grad_by_freq or mode not in ("sum", "mean") or not input.numel():
        return None
    if (input.ndim, offsets is None) not in ((2, True), (1, False)):
        return None  # torch says what is wrong
    if per_sample_weights is not None and mode != "sum":
        return None  # torch refuses it
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    rows = functional.embedding(input, weight, padding_idx, sparse=sparse)
    counted = input != padding_idx if padding_idx is not None else None  # padding is in no sum and no mean
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if counted is not None:
        rows = rows * counted.unsqueeze(-1)
    if offsets is None:
        if mode == "sum":
            return rows.sum(1)
        return rows.mean(1) if counted is None else rows.sum(1) / counted.sum(1, keepdim=True).clamp(min=1)
    n = offsets.shape[0] - include_last_offset  # ids from the last offset on are in no bag
    at = torch.searchsorted(offsets, torch.arange(len(input), device=input.device, dtype=offsets.dtype), right=True) - 1
    sums = rows.new_zeros(offsets.shape[0], rows.shape[1]).index_add(0, at, rows)[:n]
    if mode == "sum":
        return sums
    ones = rows.new_ones(len(input)) if counted is None else counted.to(rows.dtype)
    return sums / rows.new_zeros(offsets.shape[0]).index_add(0, at, ones)[:n].clamp(min=1).unsqueeze(1)


register(Handler("embedding bags", "torch's operator for bags can be cut along nothing",
                 lambda _record: _bags, (functional.embedding_bag,)))  # fmt: skip
