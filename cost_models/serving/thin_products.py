"""Seconds of matrix products with a stored weight, from one row to many thousands.

    memory  = (weight bytes + rows (k + n) bytes) / (bandwidth * fraction)
    compute = the device's curve of products, fitted to products of a thousand rows and more
    seconds = (memory^p + compute^p)^(1/p)

Thin products stream their weight; the join says how far computing hides behind that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cost_models.operator_cost import peak_flops, sustained_fraction
from hardware_profiles import Device
from hardware_profiles.small_rates import SmallRates, small_rates_of

from .work import FORMAT_BYTES

DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "float8", "nvfp4": "float4", "mxfp4": "float4"}
"""Formats as the rates of a data sheet name them."""
OUTPUT_BYTES = 2.0
"""Results of products are 16-bit."""


class ProductRate(NamedTuple):
    """Rates of products in one pair of formats on one device: seconds a flop, a byte; half sizes of the curve."""

    per_flop: float
    least_per_flop: float
    per_byte: float
    half_m: float
    half_n: float
    half_k: float
    half_mn: float
    weight_bytes: float
    row_bytes: float
    join: float


def product_rate(device: Device, weights: str, activations: str, *, grouped: bool = False) -> ProductRate:
    """Return the rates of products on a device; ValueError for an unknown format.

    Products of many experts in one kernel (``grouped``) keep memory busy whatever the format of their weights.
    """
    return _rate(device, small_rates_of(device), weights, activations, grouped)


@lru_cache(maxsize=1024)
def _rate(device: Device, small: SmallRates, weights: str, activations: str, grouped: bool) -> ProductRate:
    for form, known in ((weights, FORMAT_BYTES), (activations, DTYPES)):
        if form not in known:
            raise ValueError(f"unknown format '{form}' of a product, known: {', '.join(known)}")
    dtype = DTYPES[activations]
    if dtype not in device.peak_flops and dtype.startswith("float") and dtype != "float16":
        dtype = "bfloat16"  # computed in 16 bits, as engines do on devices without narrower rates
    narrow = dtype.startswith(("float8", "float4"))
    curve = device.efficiency.get("matmul_float8" if narrow else "matmul", device.efficiency["matmul"])
    peak = peak_flops(device, dtype) * small.compute_fraction * (small.grouped_fraction if grouped else 1.0)
    reached = small.narrow_fraction if FORMAT_BYTES[weights] < 1 and not grouped else small.weight_fraction
    widened = small.widening if FORMAT_BYTES[weights] < 1 and FORMAT_BYTES[activations] > FORMAT_BYTES[weights] else 1.0
    half = small.grouped_half if grouped else 0.0
    return ProductRate(
        widened / (peak * curve.fraction), widened / (peak * sustained_fraction(device)),
        1.0 / (device.memory_bytes_per_second * reached),
        curve.half_m, curve.half_n + half, curve.half_k + half, curve.half_mn,
        FORMAT_BYTES[weights], FORMAT_BYTES[activations], small.join,
    )  # fmt: skip


def product_seconds(rate: ProductRate, rows: float, n: int, k: int, *, weights_read: float = 1.0) -> float:
    """Return the seconds of ``weights_read`` products that share ``rows`` rows, without start and end of kernels."""
    if rows <= 0 or weights_read <= 0:
        return 0.0
    each = rows / weights_read
    tiles = (each + rate.half_m) * (n + rate.half_n) + rate.half_mn / max(1.0, weights_read)
    flops = 2.0 * tiles * (k + rate.half_k)
    compute = weights_read * max(flops * rate.per_flop, 2.0 * each * n * k * rate.least_per_flop)
    memory = (weights_read * n * k * rate.weight_bytes + rows * (k * rate.row_bytes + n * OUTPUT_BYTES)) * rate.per_byte
    low, high = (memory, compute) if memory < compute else (compute, memory)
    return high * (1.0 + (low / high) ** rate.join) ** (1.0 / rate.join)
