"""Dropout and attention with dropout as compiled kernels, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autopar.rules.attention.attention import attention_with_dropout
from autopar.rules.families.sharded_random import dropout
from gpu_rows.kernels import seconds_of
from gpu_rows.table import Result


def _both_ways(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], Any]:
    g = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, g)


def with_dropout(device: str, quick: bool) -> Result:
    """Seconds of a forward and a backward with p = 0.1: autopar's kernels, torch's, torch's without dropout."""
    seed = torch.full((), 11, device=device)
    dtype = torch.float32 if quick else torch.bfloat16
    rows: dict[str, dict[str, float]] = {}
    for b, h, s, d in [(1, 2, 64, 16)] if quick else [(8, 12, 1024, 64), (4, 32, 2048, 64), (2, 32, 4096, 128)]:
        q, k, v = (torch.randn(b, h, s, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        drawn: dict[str, Any] = {"cut": {}, "site": 3, "shape": (b, h, s, d), "shards": ((),) * 4}
        calls = {
            "autopar": lambda q=q, k=k, v=v, drawn=drawn: attention_with_dropout(
                q, k, v, None, 0.1, True, seed=seed, **drawn
            ),
            "torch": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True),
            "torch without": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        }
        rows[f"attention {[b, h, s, d]}"] = {
            way: seconds_of(_both_ways(call, [q, k, v]), device) for way, call in calls.items()
        }
    for shape in [(64, 64)] if quick else [(8192, 768), (8192, 8192)]:
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        drawn = {"cut": {}, "site": 3, "shape": shape, "shards": ((),) * 2}
        calls = {
            "autopar": lambda x=x, drawn=drawn: dropout(x, 0.1, seed=seed, **drawn),
            "torch": lambda x=x: F.dropout(x, 0.1),
        }
        rows[f"dropout {list(shape)}"] = {way: seconds_of(_both_ways(call, [x]), device) for way, call in calls.items()}
    said = "; ".join(
        f"{name} " + " / ".join(f"{way} {1e6 * s:.0f}" for way, s in of.items()) for name, of in rows.items()
    )
    return Result(f"us, forward and backward: {said}", None, rows)


__all__ = ["with_dropout"]
