"""The time of one op on one device: a roofline with efficiency curves.

    seconds = launch + max(flops / (peak * efficiency(size)), bytes / (memory bandwidth * fraction))

Efficiencies have the form size/(size+half), so the compute term is (size+half)/(peak * fraction): it grows
with every size, and a cut op is never slower than the whole one.
"""

from __future__ import annotations

from functools import lru_cache

from hardware_profiles import Device

COMPUTE_KINDS = ("matmul", "conv", "attention")
MEMORY_KINDS = ("pointwise", "reduce", "copy")
KINDS = (*COMPUTE_KINDS, *MEMORY_KINDS, "none")

# The rate that stands in for one that a data sheet lacks: hardware without bfloat16 computes it in float32,
# and so on.
STAND_INS = {
    "bfloat16": ("float32",), "float16": ("float32",), "tf32": ("float32",), "float64": ("float32",),
    "float8": ("float16", "bfloat16", "float32"), "float4": ("float8", "float16", "bfloat16", "float32"),
}  # fmt: skip


def peak_flops(device: Device, dtype: str) -> float:
    """The data-sheet rate of a dtype in flop/s, or of the dtype that stands in for it (others: float32)."""
    rates = device.peak_flops
    for narrow in ("float8", "float4"):  # float8_e4m3fn, float8_e5m2: one rate
        if dtype.startswith(narrow):
            dtype = narrow
    for name in (dtype, *STAND_INS.get(dtype, ()), "float32"):
        if name in rates:
            return rates[name]
    return max(rates.values())


@lru_cache(maxsize=4096)
def _rates(device: Device, kind: str, dtype: str) -> tuple[float, ...]:
    """(launch s, s per flop, s per byte, half_m, half_n, half_k, half_mn, half_work) of a kind of op."""
    if kind not in KINDS:
        raise ValueError(f"unknown op kind '{kind}', known: {', '.join(KINDS)}")
    memory = device.efficiency["pointwise"]
    per_byte = 1.0 / (device.memory_bytes_per_second * memory.fraction)
    if kind in COMPUTE_KINDS:
        narrow = f"{kind}_float8"
        is_narrow = dtype.startswith(("float8", "float4")) and narrow in device.efficiency
        curve = device.efficiency[narrow if is_narrow else kind]
        per_flop = 1.0 / (peak_flops(device, dtype) * curve.fraction)
        halves = curve.half_m, curve.half_n, curve.half_k, curve.half_mn, curve.half_work
        return device.launch_seconds, per_flop, per_byte, *halves
    # Pointwise arithmetic runs outside the tensor cores, in float32 at most.
    per_flop = 1.0 / peak_flops(device, "float64" if dtype == "float64" else "float32")
    return device.launch_seconds, per_flop, per_byte, 0.0, 0.0, 0.0, 0.0, memory.half_work


def op_seconds(
    device: Device,
    kind: str,
    flops: float,
    n_bytes: float,
    dtype: str,
    gemm: tuple[int, int, int] | None = None,
) -> float:
    """The time of one op in seconds.

    `kind` is one of KINDS ('none' is free: views, scalars); `flops` counts a multiply-add as two; `n_bytes`
    is all that is read and written; `dtype` is the type multiplied ('bfloat16', ...); `gemm` is (m, n, k)
    where the op is a matrix product of that shape (`flops` may be a multiple of 2 m n k: batches). Raises
    ValueError for an unknown kind.
    """
    launch, per_flop, per_byte, half_m, half_n, half_k, half_mn, half_work = _rates(device, kind, dtype)
    if kind == "none":
        return 0.0
    if kind == "matmul" and gemm is not None:
        m, n, k = gemm
        if m and n and k:
            compute = flops * per_flop * ((m + half_m) * (n + half_n) + half_mn) * (k + half_k) / (m * n * k)
        else:
            compute = 0.0
        memory = n_bytes * per_byte
    elif kind in COMPUTE_KINDS:
        compute = (flops + half_work) * per_flop
        memory = n_bytes * per_byte
    else:
        compute = flops * per_flop
        memory = (n_bytes + half_work) * per_byte
    return launch + (compute if compute > memory else memory)
