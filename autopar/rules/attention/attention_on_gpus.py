"""Calls of attention with dropout that have kernels of their own (:mod:`.attention_triton`)."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

KERNELS_ON = {"cuda"}
"""Types of devices on which Triton's kernels are used, where there is Triton."""
WIDEST_BYTES = 512
"""The most bytes of a query, key or value: a block of wider ones does not fit."""


def has_kernels_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Check that kernels exist for `q`, `k` and `v`: 16 or 32 bits, no dims beyond batch and heads."""
    if q.device.type not in KERNELS_ON or not q.dtype == k.dtype == v.dtype or q.dim() > 4:
        return False
    is_narrow = max(q.shape[-1], v.shape[-1]) * q.dtype.itemsize <= WIDEST_BYTES
    is_filled = min(*q.shape, *k.shape, *v.shape) > 0
    fits = q.dtype in (torch.float16, torch.bfloat16, torch.float32) and is_narrow and is_filled
    return fits and has_kernels(q.device)


def fits_kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Check that kernels can be called on `q`, `k` and `v`: they have values, and are not simulated ranks."""
    return all(type(x) is torch.Tensor for x in (q, k, v)) and has_kernels_for(q, k, v)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Check that Triton makes kernels for a device; GPUs must not be too old."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class _Kernels:
    """Calls of :mod:`.attention_triton`. What cannot be compiled or launched goes in blocks, with one warning."""

    def __init__(self) -> None:
        self.refused = False

    def forward(self, tensors: Sequence[Any], form: Any, out: torch.Tensor, log_sum: torch.Tensor) -> bool:
        """Run the forward kernel if there is one; return whether it ran."""
        return self._call("forward", tensors, form, before=(), after=(_four(out), log_sum)) is not None

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, tensors: Sequence[Any], form: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute the gradients of queries, keys and values; None if no kernel does it."""
        of_inputs = self._call("backward", tensors, form, before=(_four(grad), _four(out), log_sum), after=())
        if of_inputs is None:
            return None
        return tuple(_summed(x, like) for x, like in zip(of_inputs, tensors, strict=False))

    def _call(self, name: str, tensors: Sequence[Any], form: Any, before: Any, after: Any) -> Any:
        if self.refused:
            return None
        q = tensors[0]
        try:
            from autopar.rules.attention import attention_triton

            with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
                results = getattr(attention_triton, name)(*before, _in_four(tensors), form, *after)
            return results if results is not None else ()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"attention with dropout has no kernel here, so it takes more passes: {reason}", stacklevel=2)
            self.refused = True
            return None


def _four(x: torch.Tensor) -> torch.Tensor:
    """View a tensor with batch and head dims, of size 1 where it has none."""
    return x[(None,) * (4 - x.dim())]


def _in_four(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tensors of a call as the kernels want them: dims that are repeated have strides of 0."""
    q, k, v, mask, row, column = tensors
    q = _four(q)
    k, v = (_four(x).expand(q.shape[0], -1, -1, -1) for x in (k, v))
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    return q, k, v, mask, row.expand(tensors[0].shape[:-1]).contiguous(), column.contiguous()


def _summed(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum the gradient of a tensor that was expanded to four dims."""
    return grad.sum_to_size(_four(like).shape).view(like.shape)


kernels = _Kernels()
