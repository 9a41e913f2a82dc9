"""Collectives of torch under one name in all of its versions, of values of any dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names changed in torch 2.13."""


_SENT_AS_BYTES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""What neither NCCL nor gloo takes. Complex numbers, which they do not take either, torch sends as pairs."""


def as_sent(x: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a collective that only moves values takes it."""
    return x.view(-1).view(torch.uint8) if x.dtype in _SENT_AS_BYTES else x


def all_gather_flat(out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
    """Gather the tensors of all ranks into ``out``, one after the other along the first dim."""
    return _all_gather(as_sent(out), as_sent(x), **options)
