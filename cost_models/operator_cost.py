"""Seconds of one op on one device: a roofline with efficiency curves.

    work    = max(flops / (peak * efficiency(size)), flops / sustained rate, bytes / (memory bandwidth * fraction))
    seconds = max(launch, kernel + work)    where the host launches ahead of the device (GPUs)
              launch + work                 where the processor that launches computes, too

Efficiencies have the form size/(size+half), so the compute term is (size+half)/(peak * fraction): it grows
with every size, and a cut op is never slower than the whole one.

A host that runs ahead of its device makes a step take the longer of both. An integer program needs a price for each
operator, so the longer of both is taken for each: exact where all operators of a model are long or all are short, too
much by what the host could have run ahead elsewhere.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hardware_profiles import MOVING_KINDS, Device

COMPUTE_KINDS = ("matmul", "conv", "attention")
MEMORY_KINDS = (*MOVING_KINDS, "copy")
KINDS = (*COMPUTE_KINDS, *MEMORY_KINDS, "none")

# The rate that stands in for one that a data sheet lacks: hardware without bfloat16 computes it in float32,
# and so on.
STAND_INS = {
    "bfloat16": ("float32",), "float16": ("float32",), "tf32": ("float32",), "float64": ("float32",),
    "float8": ("float16", "bfloat16", "float32"), "float4": ("float8", "float16", "bfloat16", "float32"),
}  # fmt: skip
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "bool": 1, "int8": 1, "uint8": 1}
"""Bytes of an element; other types have 4."""
ALIGNMENT_BYTES = 16
"""Tensor cores read so many bytes at once: inner sizes of a product are multiples of that, or it is slow."""

SUSTAINED = 0.72
"""The part of the 16-bit peak that large products keep up in a step on an H200 at its 700 W. Nothing but products for
seconds reach 0.68 to 0.70 (670 to 690 of 989 TFLOP/s, at 1,480 of 1,980 MHz:
hardware_profiles/measured/h200/rates.json), those of a step in which they are half of the time 0.76 (first_hour.json,
Llama of 1.2B parameters); in most steps they are two thirds or more."""
SUSTAINED_WATTS = 700 / 989e12
"""Watts per flop/s of the 16-bit peak of that device."""
SUSTAINED_POWER = 0.25
"""How the part that is sustained grows with watts for each flop/s of the peak. The best products of two A100, 271.2
TFLOP/s at 400 W and 252.9 at 300 W (ml-engineering's table of accelerators), give 0.24; of H200 and GH200, 794.5 at
700 W and 828.6 at 900 W, 0.17; of H200 and A100 SXM 0.3 to 0.37."""


def peak_flops(device: Device, dtype: str) -> float:
    """Return the data-sheet rate of a dtype in flop/s, or of the dtype that stands in for it (others: float32)."""
    rates = device.peak_flops
    for narrow in ("float8", "float4"):  # float8_e4m3fn, float8_e5m2: one rate
        if dtype.startswith(narrow):
            dtype = narrow
    for name in (dtype, *STAND_INS.get(dtype, ()), "float32"):
        if name in rates:
            return rates[name]
    return max(rates.values())


def sustained_fraction(device: Device) -> float:
    """Return the part of its tensor cores' peak that a device keeps up within its power limit; 1 if unknown.

    fraction = SUSTAINED * (watts / 16-bit peak / SUSTAINED_WATTS) ^ SUSTAINED_POWER        at most 1
    """
    peak = max(device.peak_flops.get("bfloat16", 0.0), device.peak_flops.get("float16", 0.0))
    if device.power_watts is None or not peak:
        return 1.0
    return min(1.0, SUSTAINED * (device.power_watts / peak / SUSTAINED_WATTS) ** SUSTAINED_POWER)


class _Rate(NamedTuple):
    """The rate of a kind of op: seconds per flop by the curve and by power, per byte, half sizes."""

    per_flop: float
    least_per_flop: float
    per_byte: float
    half_m: float
    half_n: float
    half_k: float
    half_mn: float
    half_work: float
    half_row: float
    unaligned: float


@lru_cache(maxsize=8192)
def _rates(device: Device, kind: str, dtype: str, backward: bool) -> _Rate:
    if kind not in KINDS:
        raise ValueError(f"unknown op kind '{kind}', known: {', '.join(KINDS)}")
    curves, bandwidth = device.efficiency, device.memory_bytes_per_second
    names = [f"{kind}_backward", kind] if backward else [kind]
    if kind in COMPUTE_KINDS:
        if dtype.startswith(("float8", "float4")):
            names.insert(0, f"{kind}_float8")
        curve = next(curves[name] for name in names if name in curves)
        peak = peak_flops(device, dtype)
        least = 0.0 if dtype in ("float32", "float64") else 1.0 / (peak * sustained_fraction(device))
        return _Rate(
            1.0 / (peak * curve.fraction), least, 1.0 / (bandwidth * curves["pointwise"].fraction), curve.half_m,
            curve.half_n, curve.half_k, curve.half_mn, curve.half_work, 0.0, 1.0 / curve.unaligned,
        )  # fmt: skip
    names += ["pointwise_backward", "pointwise"] if backward else ["pointwise"]
    curve = next(curves[name] for name in names if name in curves)
    longer = max(1.0, curve.item_bytes / ITEM_BYTES.get(dtype, 4))
    # Arithmetic of these kinds runs outside the tensor cores, in float32 at most.
    per_flop = 1.0 / peak_flops(device, "float64" if dtype == "float64" else "float32")
    per_byte = longer / (bandwidth * curve.fraction)
    if curve.bytes_per_flop:
        per_byte = max(per_byte, longer / (curve.bytes_per_flop * peak_flops(device, "float32")))
    return _Rate(per_flop, 0.0, per_byte, 0.0, 0.0, 0.0, 0.0, curve.half_work, curve.half_row, 1.0)


def op_seconds(
    device: Device,
    kind: str,
    flops: float,
    n_bytes: float,
    dtype: str,
    gemm: tuple[int, int, int] | None = None,
    *,
    row: int = 0,
    aligned: bool = True,
    backward: bool = False,
    joins: bool = False,
) -> float:
    """Return the seconds of one op.

    Args:
        device: the device.
        kind: one of KINDS (``none`` is free: views, scalars); others raise ValueError.
        flops: a multiply-add counts as two.
        n_bytes: all that is read and written.
        dtype: the type multiplied (``bfloat16``, ...).
        gemm: (m, n, k) where the op is a matrix product of that shape (`flops` may be a multiple of 2 m n k: batches),
            or (queries, keys that a query sees, size of a head).
        row: elements of a row that is normalized or summed; 0 if that does not matter.
        aligned: the inner sizes of a product are multiples of 16 bytes.
        backward: use the curve of the backward, if there is one.
        joins: it runs in the kernel of an op before it. Its launch counts all the same: most kernels written by hand
            join fewer ops than this takes for one.
    """
    rate = _rates(device, kind, dtype, backward)
    if kind == "none":
        return 0.0
    if kind in COMPUTE_KINDS:
        work = flops
        if gemm is not None:
            m, n, k = gemm
            if not (m and n and k):
                work = 0.0
            else:
                work *= ((m + rate.half_m) * (n + rate.half_n) + rate.half_mn) * (k + rate.half_k) / (m * n * k)
        if not aligned:
            work *= rate.unaligned
        compute = max((work + rate.half_work) * rate.per_flop if work else 0.0, flops * rate.least_per_flop)
        memory = n_bytes * rate.per_byte
    else:
        compute = flops * rate.per_flop
        memory = (n_bytes + rate.half_work) * rate.per_byte
        if row:
            memory *= (row + rate.half_row) / row
    seconds = compute if compute > memory else memory
    if device.kernel_seconds is None:
        return device.launch_seconds + seconds
    return max(device.launch_seconds, seconds if joins else device.kernel_seconds + seconds)
