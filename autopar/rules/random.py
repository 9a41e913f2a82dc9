"""Random numbers that do not depend on the mesh.

Element i of the output of call ``site`` in a step with seed s is a hash of (s, site, i), where i is its position in the
whole tensor. So every rank draws exactly its part of what one device would draw, for any cut, and a recomputed forward
draws the same again. (The numbers differ from torch's own generator.)

The hash: a 64-bit one (splitmix64) of each row gives 32 bits, another of each column 32 more; their sum passes two
multiply-xorshift rounds. Rows are all dims but the last, so the expensive part is small and the rest is a few 32-bit
passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.rules.distributed import positions
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample

Shards = Sequence[Sequence[str]]


def _signed(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


_GOLDEN, _M1, _M2 = (_signed(m, 64) for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_C1, _C2 = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)


def _splitmix(z: torch.Tensor) -> torch.Tensor:
    """A bijective hash of int64."""
    z = z * _GOLDEN
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _M1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _M2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def bits(seed: torch.Tensor, site: int, shape: Sequence[int], shards: Shards, device: torch.device) -> torch.Tensor:
    """Uniform int32 for this rank's piece of a tensor of global ``shape``; ``shards`` has the axes cutting each dim."""
    # -> [*local shape]
    if not shape:
        return bits(seed, site, (1,), ((),), device).reshape(())
    key = _splitmix(_splitmix(seed.to(device) + 1) + site)
    *lead, last = (positions(n, axes, device) for n, axes in zip(shape, shards, strict=True))
    row = torch.zeros((), dtype=torch.int64, device=device)
    for n, at in zip(shape, lead, strict=False):
        row = row.unsqueeze(-1) * n + at
    row = _splitmix(row + key)
    column = _splitmix(last ^ _splitmix(key + _M1))
    z = row.to(torch.int32).unsqueeze(-1) + column.to(torch.int32)
    # arithmetic shifts: the sign bits smear, which costs one bit in 2^32 and saves two passes
    z ^= z >> 16
    z *= _C1
    z ^= z >> 15
    z *= _C2
    return z


def kept(p: float, seed: torch.Tensor, site: int, shape: Sequence[int], shards: Shards, device: Any) -> torch.Tensor:
    """Bool mask that is True with probability ``1 - p``."""
    threshold = round((1 - p) * 2**32) - 2**31
    if threshold >= 2**31:
        threshold = 2**31 - 1
    return bits(seed, site, shape, shards, device) < threshold


def uniform(
    seed: torch.Tensor, site: int, shape: Sequence[int], shards: Shards, device: Any, dtype: torch.dtype
) -> torch.Tensor:
    """Uniform in [0, 1), as fine as ``dtype`` allows up to 24 bits."""
    n_bits = {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)
    fraction = (bits(seed, site, shape, shards, device) >> (32 - n_bits)) + (1 << (n_bits - 1))
    return fraction.to(dtype) * 2.0**-n_bits


def dropout(
    x: Any, p: float, train: bool = True, *, cut: Any, seed: Any, site: int, shape: Any, shards: Any
) -> torch.Tensor:
    """``aten.dropout`` in training."""
    return x * kept(p, seed, site, shape, shards, x.device) * (1 / (1 - p) if p < 1 else 0.0)


@rule(
    "aten.dropout.default",
    "aten.feature_dropout.default",
    samples=[sample(T((4, 2, 8)), 0.25, True), sample(T((8,)), 0.5, True), sample(T((4, 8)), 0.5, False)],
)
def dropout_rule(call: Call) -> Rule:
    p, train = call.arg(1, "p", 0.5), call.arg(2, "train", True)
    draws = bool(train) and p > 0
    lowering = Lowering(dropout if call.target == "aten.dropout.default" else feature_dropout)
    return line("... -> ...", call, linear=[{0}], random=draws, lowerings=(lowering,) if draws else ())


def feature_dropout(
    x: Any, p: float, train: bool = True, *, cut: Any, seed: Any, site: int, shape: Any, shards: Any
) -> torch.Tensor:
    """``aten.feature_dropout`` (``nn.Dropout2d``): whole channels of x [b c ...] are dropped."""
    mask = kept(p, seed, site, shape[:2], shards[:2], x.device)
    return x * mask.reshape(*mask.shape, *[1] * (x.dim() - 2)) * (1 / (1 - p) if p < 1 else 0.0)


def _dtype(kwargs: Mapping[str, Any], x: Any) -> torch.dtype:
    return kwargs.get("dtype") or (x.dtype if isinstance(x, torch.Tensor) else torch.get_default_dtype())


def _device(kwargs: Mapping[str, Any], x: Any, seed: torch.Tensor) -> torch.device:
    return torch.device(kwargs.get("device") or (x.device if isinstance(x, torch.Tensor) else seed.device))


def rand(x: Any, *_: Any, cut: Any, seed: Any, site: int, shape: Any, shards: Any, **kwargs: Any) -> torch.Tensor:
    """``aten.rand`` and ``aten.rand_like``."""
    return uniform(seed, site, shape, shards, _device(kwargs, x, seed), _dtype(kwargs, x))


def randn(x: Any, *_: Any, cut: Any, seed: Any, site: int, shape: Any, shards: Any, **kwargs: Any) -> torch.Tensor:
    """``aten.randn`` and ``aten.randn_like``, by Box and Muller."""
    device, dtype = _device(kwargs, x, seed), _dtype(kwargs, x)
    u, v = (uniform(seed, 2 * site + i + (1 << 40), shape, shards, device, torch.float32) for i in (0, 1))
    return (torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * math.pi * v)).to(dtype)


def randint(*args: Any, cut: Any, seed: Any, site: int, shape: Any, shards: Any, **kwargs: Any) -> torch.Tensor:
    """``aten.randint`` with ``(high, size)`` or ``(low, high, size)``."""
    low, high = (0, args[0]) if len(args) == 2 else args[:2]
    draw = bits(seed, site, shape, shards, _device(kwargs, None, seed)).to(torch.int64)
    return (((draw + 2**31) * (high - low)) >> 32).add(low).to(kwargs.get("dtype") or torch.int64)


def bernoulli(x: Any, p: Any = None, *, cut: Any, seed: Any, site: int, shape: Any, shards: Any, **_: Any) -> Any:
    """``aten.bernoulli``: probabilities ``x``, or one ``p`` in the shape of ``x``."""
    u = uniform(seed, site, shape, shards, x.device, torch.float32)
    return (u < (x.detach() if p is None else p)).to(x.dtype)
