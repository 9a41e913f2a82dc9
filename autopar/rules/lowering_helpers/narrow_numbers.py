"""Numbers of eight bits with scales: the largest value of a tensor, its scale, the cast, and products of such tensors.

A tensor ``x`` is stored as ``q = x / scale`` in eight bits. Scales are powers of two, the least that keep the largest
value within the format, so that dividing and multiplying by them is exact, the order of factors does not matter, and
a tensor that is already a multiple of such numbers is cast without a further error. (torchao offers that as
``round_scales_to_power_of_2``; the OCP microscaling formats have no others.)

A value that is not finite makes its scale infinite, and everything that is computed with it NaN (zero times infinity):
a narrow cast would otherwise saturate, and a ``GradScaler`` would not see the overflow.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch.nn.functional import ScalingType, scaled_mm

from autopar.words.narrow_products import FORWARD, NarrowFormat
from autopar.words.tracing import is_traced

MULTIPLE = 16
"""Sizes of products of eight bits are multiples of it, as cuBLAS wants; others are filled up with zeros."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000
_LEAST = 2.0**-100
"""The least scale: an inverse and a product of two scales are still finite in float32."""


def largest(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return the largest absolute value in float32: of all elements, [], or along ``dim``, which is kept with size 1.

    Infinite where a value is NaN, since collectives that take a maximum may lose a NaN.
    """
    if (x.shape[dim] if dim is not None else x.numel()) == 0:
        return x.new_zeros([] if dim is None else [*x.shape[:dim], 1], dtype=torch.float32)
    # one kernel, which reads once and writes a number
    most = torch.linalg.vector_norm(x, torch.inf, dim, keepdim=dim is not None).float()
    return most.nan_to_num(nan=torch.inf, posinf=torch.inf)


def scale_of(most: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the least power of two that keeps values up to ``most`` (float32) within ``dtype``; infinity for that."""
    least = (most / torch.finfo(dtype).max).clamp(min=_LEAST)
    return (least.view(torch.int32) + _MANTISSA).bitwise_and(_EXPONENT).view(torch.float32)


def narrowed(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x / scale`` [m k] in ``dtype``, rounded to the nearest.

    Args:
        scale: float32, [] or [m 1]; a power of two from :func:`scale_of`, so that no value exceeds the format.
    """
    if _has_cast(x):
        from autopar.rules.lowering_helpers import narrow_cast_triton

        return narrow_cast_triton.cast(x, scale, dtype, turn=False)[0]
    wide = x.float() if x.dtype == torch.float16 else x  # of the others the exponents reach as far as the scale's
    return (wide * scale.reciprocal().to(wide.dtype)).to(dtype)


def narrowed_and_turned(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`narrowed`, and the same turned, [k m]: in memory of its own where kernels want that."""
    if _has_cast(x):
        from autopar.rules.lowering_helpers import narrow_cast_triton

        return narrow_cast_triton.cast(x, scale, dtype, turn=True)
    narrow = narrowed(x, scale, dtype)
    return narrow, narrow.t()


def _has_cast(x: torch.Tensor) -> bool:
    """Return whether casts of a tensor are a kernel of their own; what is traced, a compiler fuses."""
    has_values = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    wanted = has_values and x.is_cuda and x.dtype != torch.float64
    return wanted and HAS_TRITON and not is_traced()


def product(
    a: torch.Tensor, of_a: torch.Tensor, b: torch.Tensor, of_b: torch.Tensor, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:  # fmt: skip
    """Return ``(a * of_a) @ (b * of_b).t()`` [m n] in ``dtype``.

    On GPUs whose cores take such numbers it is one kernel, which adds up in its own order and, on Hopper, with fewer
    bits than float32 (``fast``: throughout; else it goes on in float32 after every 128 terms). Elsewhere the numbers
    are multiplied in float32, or in float64 where ``dtype`` is that, so that sums differ by the order of their terms
    alone.

    Args:
        a, b: eight bits, [m k] and [n k].
        of_a, of_b: float32 scales: [], or one of each row, [m 1] and [n 1].
    """
    by_row = bool(of_a.dim())
    if _in_one_kernel(a, b, dtype, by_row):
        return _of_kernel(a, of_a, b, of_b, dtype, fast)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = a.to(wide) @ b.to(wide).t()
    return (y * of_a.to(wide) * (of_b.t() if by_row else of_b).to(wide)).to(dtype)


def _of_kernel(
    a: torch.Tensor, of_a: torch.Tensor, b: torch.Tensor, of_b: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:  # fmt: skip
    m, n = a.shape[0], b.shape[0]
    a, b = _filled_up(a), _filled_up(b)
    by_row = bool(of_a.dim())
    kind = ScalingType.RowWise if by_row else ScalingType.TensorWise
    if by_row:
        of_a, of_b = (
            torch.nn.functional.pad(s, (0, 0, 0, x.shape[0] - s.shape[0]), value=1.0).contiguous()
            for s, x in ((of_a, a), (of_b, b))
        )
        of_b = of_b.t()
    y = scaled_mm(a, b.t(), of_a, kind, of_b, kind, output_dtype=dtype, use_fast_accum=fast)
    return y if y.shape == (m, n) else y[:m, :n]


def _filled_up(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in row-major order with sizes that are multiples of 16; what is added is zero."""
    missing = [-n % MULTIPLE for n in x.shape]
    if any(missing):
        longer = x.new_zeros([n + more for n, more in zip(x.shape, missing, strict=True)])
        longer[: x.shape[0], : x.shape[1]] = x
        return longer
    return x.contiguous()


def _in_one_kernel(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, by_row: bool) -> bool:
    if not a.is_cuda or not a.numel() or not b.numel() or not _has_cores(a.device.index or 0):
        return False
    return dtype == torch.bfloat16 or (not by_row and dtype in (torch.float16, torch.float32))


@cache
def _has_cores(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)


def dtypes_of(numbers: NarrowFormat) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a format: of activations and weights, and of gradients."""
    return getattr(torch, FORWARD), getattr(torch, numbers.gradients)
