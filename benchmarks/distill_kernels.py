"""Fit the curves of operators beside matrix products of hardware_profiles/data/efficiency.toml to an H200's times.

    python benchmarks/distill_kernels.py            prints the errors by kind and writes the file

The times stand in hardware_profiles/measured/h200: `first_hour.json` (row "kernels") and `rates.json` (forward and
backward). Curves of matrix products are those of benchmarks/distill_gemm.py and stay. Other families get the H200's
numbers, carried over by what bounds them:

    bandwidth       the same fraction of it
    cores           bytes a second by multiprocessors times clock (data sheets), as a part of the float32 peak
    tensor cores    the same fraction of the peak, halves in proportion to the peak
    attention       Ampere: FlashAttention-2's table; half of a head's size by matrix flops for each exponential, of
                    which a multiprocessor makes 16 a cycle
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cost_models import op_seconds
from cost_models.fitting import search
from hardware_profiles import Device, EfficiencyCurve, load_device

DATA = Path(__file__).parent.parent / "hardware_profiles"
OUT = DATA / "data" / "efficiency.toml"
MEASURED = DATA / "measured" / "h200"
DEVICE = "H200-SXM-141GB"
KERNEL_SECONDS = 2e-6
"""A kernel at least: an addition of a few numbers takes 0.9 us in a CUDA graph, 2 to 3 us in a stream."""
OF_BANDWIDTH = 0.9
"""What additions and copies reach of an H200's bandwidth; kernels that stay below this are bound by their cores."""
WIDTHS = {"bfloat16": 2, "float32": 4}
COUNTED = {
    "loss": 1 / 2, "loss_backward": 1 / 2, "norm_backward": 3 / 5, "rms_norm_backward": 3 / 5, "batch_norm": 2 / 3,
    "batch_norm_backward": 3 / 5,
}  # fmt: skip
"""Of the passes over memory those that the planner counts: a loss writes its log-softmax, its backward clears and reads
one more tensor, gradients of a norm's weights and statistics of a batch read theirs once more."""
MIXED = ("pointwise", "pointwise_backward", "reduce")
"""Kinds of many kernels: what they reach is taken for a fraction of bandwidth."""
HOST_SECONDS = {False: 20e-6, True: 100e-6}
"""Times below this are the host's on the machine that measured: forward, backward."""
CORES = {  # (multiprocessors, GHz, float32 flop/s) of the device that a family is named for: vendors' data sheets
    "volta": (80, 1.53, 15.7e12), "turing": (40, 1.59, 8.1e12), "ampere": (108, 1.41, 19.5e12),
    "ada": (142, 2.52, 91.6e12), "hopper": (132, 1.755, 67e12), "blackwell": (148, 1.85, 80e12),
    "blackwell-ultra": (148, 1.85, 80e12), "blackwell-pcie": (188, 2.43, 117e12), "cdna": (304, 2.1, 163.4e12),
}  # fmt: skip
TENSOR = {  # 16-bit peak of the same device
    "volta": 125e12, "turing": 65e12, "ampere": 312e12, "ada": 362e12, "hopper": 989e12, "blackwell": 2250e12,
    "blackwell-ultra": 2250e12, "blackwell-pcie": 468e12, "cdna": 1307e12,
}  # fmt: skip
HALVES = ("half_m", "half_n", "half_k", "half_mn", "half_work", "half_row")
FLASH_2 = "FlashAttention-2 (arXiv:2307.08691) on A100: up to 73% of the peak forward, 63% backward"
UNALIGNED = {"hopper": 0.157, "blackwell": 0.157, "blackwell-ultra": 0.157}
"""What is left of the rate of a product whose inner sizes are no multiples of 16 bytes: GPT-2's 50,257 words take 16.2
ms on an H200 where 50,264 take 2.54."""
UNALIGNED_ELSEWHERE = 0.4
"""Estimate: padding these words makes a step of GPT-2 a quarter faster on an A100 (nanoGPT)."""
NOT_SWEPT = {  # family: the one whose halves it takes, the part of the peak, the source
    "volta": ("ampere", 0.76, "estimate: cuBLAS 9 reaches 83 of 125 TFLOP/s (arXiv:1803.04014), later ones 0.7 to "
              "0.75; halves of Ampere; not measured"),
    "turing": ("ampere", 0.42, "estimate: 70 W hold about 25 TFLOP/s; halves of Ampere; not measured"),
    "cdna": ("hopper", 0.55, "estimate: public sweeps of MI300X reach about half of the peak; not measured"),
}  # fmt: skip
OLDER = "estimate: no FlashAttention-2 for these cores, memory-efficient attention; not measured"


@dataclass(frozen=True)
class Time:
    """One measured time, and what of it :func:`cost_models.op_seconds` gets."""

    name: str
    kind: str
    backward: bool
    flops: float
    n_bytes: float
    dtype: str
    gemm: tuple[int, int, int] | None
    row: int
    seconds: float

    @property
    def curve(self) -> str:
        return f"{self.kind}_backward" if self.backward else self.kind


# Operator: kind, passes of the forward and of the backward over its tensor, as the planner counts them.
MOVED: dict[str, tuple[str, float, float]] = {
    "add": ("pointwise", 3, 0), "gelu": ("pointwise", 2, 3), "silu": ("pointwise", 2, 3), "mul": ("pointwise", 3, 5),
    "dropout": ("pointwise", 2.5, 2.5), "clone": ("pointwise", 2, 0), "copy": ("pointwise", 2, 0),
    "layer_norm": ("norm", 2, 3), "rms_norm": ("rms_norm", 2, 3), "softmax": ("softmax", 2, 3),
    "add bias": ("broadcast", 2, 0), "sum": ("reduce", 1, 0), "batch_norm": ("batch_norm", 2, 3),
    "cross_entropy": ("loss", 1, 2),
}  # fmt: skip


def times() -> Iterator[Time]:
    """All times that are no matrix products and not the host's."""
    first = json.loads((MEASURED / "first_hour.json").read_text(encoding="utf-8"))["rows"]
    table = next(row["data"]["table"] for row in first if row["name"] == "kernels")
    later = json.loads((MEASURED / "rates.json").read_text(encoding="utf-8"))["rows"][0]["data"]["table"]
    rows = [(n.removesuffix(" backward"), d, s, n.endswith(" backward"), t) for n, d, s, t in table]
    rows += [(n, d, s, which == "backward", t) for n, d, s, which, t in later]
    for name, dtype, shape, backward, seconds in rows:
        if seconds >= HOST_SECONDS[backward]:
            yield from _time(name, dtype, shape, backward, seconds)


def _time(name: str, dtype: str, shape: Sequence[int], backward: bool, seconds: float) -> Iterator[Time]:
    n_bytes = prod(shape) * WIDTHS[dtype]
    if name.startswith("attention"):
        *lead, queries, size = shape
        heads = prod(lead[:2])
        keys = queries // 2 if "causal" in name else queries
        flops = 4.0 * heads * queries * keys * size * (2.5 if backward else 1.0)
        yield Time(name, "attention", backward, flops, 0.0, dtype, (queries, keys, size), 0, seconds)
    elif name == "conv2d":
        images, channels, height, width, outputs, kernel = shape
        m, k = images * height * width, channels * kernel**2
        flops = 2.0 * m * outputs * k * (2 if backward else 1)
        n_bytes = WIDTHS[dtype] * m * (channels + outputs)
        if dtype == "bfloat16" and kernel < 7 and not backward:  # for three channels there is no kernel of tensor cores
            yield Time(name, "conv", backward, flops, n_bytes, dtype, (m, outputs, k), 0, seconds)
    elif name == "cast":
        widens = dtype == "bfloat16"
        n_bytes = prod(shape) * 6
        yield Time(name, "widen" if widens else "narrow", backward, 0.0, n_bytes, dtype, None, 0, seconds)
    elif name == "embedding" and not backward:
        rows, width = (shape[0], shape[-1])
        yield Time(name, "lookup", False, 0.0, 2 * rows * width * WIDTHS[dtype], dtype, None, 0, seconds)
    elif name == "adamw fused":
        yield Time(name, "optimizer", False, 0.0, 7 * n_bytes, dtype, None, 0, seconds)
    elif name in MOVED and (passes := MOVED[name][1 + backward]):
        row = shape[-1] if MOVED[name][0] in ("norm", "rms_norm", "softmax") else 0
        yield Time(name, MOVED[name][0], backward, 0.0, passes * n_bytes, dtype, None, row, seconds)


def predicted(device: Device, time: Time) -> float:
    """Seconds by the device's curves."""
    return op_seconds(
        device, time.kind, time.flops, time.n_bytes, time.dtype, time.gemm, row=time.row, backward=time.backward
    )


FITTED = {  # the halves that a curve has beside its fraction; item_bytes given where bytes are not what counts
    "attention": ("half_n", "half_k"), "attention_backward": ("half_n", "half_k"),
    "conv": ("half_n", "half_k"), "norm": ("half_row",), "norm_backward": ("half_row",),
    "rms_norm": ("half_row",), "rms_norm_backward": ("half_row",), "reduce": ("half_work",),
    "pointwise": ("half_work",),
}  # fmt: skip
ITEM_BYTES = {"softmax": 4, "batch_norm": 4, "batch_norm_backward": 4, "broadcast": 4}


def fit(name: str, rows: Sequence[Time], device: Device) -> tuple[EfficiencyCurve, np.ndarray]:
    """The curve with the least absolute logarithmic error, and the errors."""
    halves = FITTED.get(name, ())
    seconds = np.array([row.seconds for row in rows])

    def curve_of(x: Sequence[float] | np.ndarray) -> EfficiencyCurve:
        sizes: dict[str, Any] = {h: float(f"{np.exp(v):.3g}") for h, v in zip(halves, x[1:], strict=True)}
        return EfficiencyCurve(float(f"{np.exp(x[0]):.3g}"), **sizes, item_bytes=ITEM_BYTES.get(name, 0.0))

    def errors(curve: EfficiencyCurve) -> np.ndarray:
        tried = replace(device, efficiency={**device.efficiency, name: curve})
        return np.log(np.array([predicted(tried, row) for row in rows]) / seconds)

    start = [-0.5, *(np.log(1e6 if h == "half_work" else 60.0) for h in halves)]
    best = curve_of(search(lambda x: float(np.abs(errors(curve_of(x))).mean()), start, rounds=150))
    return best, errors(best)


def carried(family: str, name: str, curve: EfficiencyCurve) -> EfficiencyCurve:
    """The H200's curve on the cores of another family."""
    measured = "measured on H200" + ("" if family == "hopper" else "; not measured on this device")
    count, clock, flops = CORES[family]
    of_hopper = CORES["hopper"]
    if name.startswith("attention"):
        return _attention(family, name, curve, measured)
    if name.startswith("conv"):
        ratio = TENSOR[family] / TENSOR["hopper"]
        return replace(curve, half_n=ratio * curve.half_n, half_k=ratio * curve.half_k, source=f"{measured}: NCHW")
    h200 = load_device(DEVICE).memory_bytes_per_second
    most = OF_BANDWIDTH * COUNTED.get(name, 1.0)
    if name in MIXED or curve.fraction >= most - 0.1:
        return replace(curve, source=f"{measured}: a fraction of its bandwidth")
    speed = count * clock / (of_hopper[0] * of_hopper[1])
    return replace(
        curve, fraction=most, bytes_per_flop=curve.fraction * h200 * speed / flops,
        source=f"{measured}: {curve.fraction * h200 / 1e12:.3g} TB/s there, bound by its cores",
    )  # fmt: skip


def _attention(family: str, name: str, curve: EfficiencyCurve, measured: str) -> EfficiencyCurve:
    if family == "hopper":
        return replace(curve, source=measured)
    backward = name.endswith("backward")
    if family in ("volta", "turing"):
        return replace(curve, fraction=0.35 if family == "volta" else 0.25, source=OLDER)
    # Matrix flops for each exponential, beside Hopper's.
    ratio = (TENSOR[family] / (CORES[family][0] * CORES[family][1])) / (
        TENSOR["hopper"] / (CORES["hopper"][0] * CORES["hopper"][1])
    )
    half_k = curve.half_k * ratio
    long = {"ampere": (0.73, 0.63), "blackwell": (0.55, 0.5), "blackwell-ultra": (0.55, 0.5)}
    source = {"ampere": FLASH_2}.get(family, "estimate: cuDNN's kernels as published; not measured")
    reached = long.get(family, (0.6, 0.5))[backward]
    return replace(curve, fraction=reached * (1 + half_k / 128), half_k=half_k,
                   source=f"{source}; halves as on H200")  # fmt: skip


def toml(family: str, name: str, curve: EfficiencyCurve) -> list[str]:
    """TOML lines of one curve, without what it has not."""
    lines = [f"[{family}.{name}]", f"fraction = {curve.fraction:.3g}"]
    for key in (*HALVES, "bytes_per_flop", "item_bytes"):
        if value := getattr(curve, key):
            lines.append(f"{key} = {value:.3g}")
    if curve.unaligned != 1:
        lines.append(f"unaligned = {curve.unaligned:.3g}")
    return [*lines, f'source = "{curve.source}"', ""]


def main() -> None:
    bare = replace(load_device(DEVICE), launch_seconds=0.0, kernel_seconds=KERNEL_SECONDS)
    rows = defaultdict(list)
    for time in times():
        rows[time.curve].append(time)
    fitted = {}
    print("| curve | times | fraction | halves | median error | worst |\n|---|---|---|---|---|---|")
    for name in sorted(rows):
        curve, errors = fit(name, rows[name], bare)
        fitted[name] = curve
        halves = ", ".join(f"{h} {getattr(curve, h):.3g}" for h in FITTED.get(name, ()))
        sizes = np.abs(errors)
        print(f"| {name} | {len(rows[name])} | {curve.fraction:.3g} | {halves} | {np.median(sizes):.1%} |", end="")
        print(f" {sizes.max():.0%} |")
    if "--print" in sys.argv:
        return
    fitted.setdefault("lookup_backward", replace(fitted["pointwise"]))  # rows as so many bytes: cost_models.costs
    families = read()
    for family, (like, fraction, source) in NOT_SWEPT.items():
        families[family]["matmul"] = replace(families[like]["matmul"], fraction=fraction, source=source)
    for family, curves in families.items():
        curves |= {name: carried(family, name, curve) for name, curve in fitted.items()}
    write(families)


def read() -> dict[str, dict[str, EfficiencyCurve]]:
    """The curves of all families as they are in the file."""
    document = tomllib.loads(OUT.read_text(encoding="utf-8"))
    document = {name: document.get(name, {}) for name in CORES}
    return {
        name: {key: EfficiencyCurve(**value) for key, value in table.items() if isinstance(value, dict)}
        for name, table in document.items()
    }


def write(families: Mapping[str, Mapping[str, EfficiencyCurve]]) -> None:
    """Write the file."""
    lines = ["# Fractions of the data-sheet rate by family of devices; products by benchmarks/distill_gemm.py, the",
             "# others by benchmarks/distill_kernels.py.", ""]  # fmt: skip
    for family, curves in families.items():
        lines += [f"[{family}]", f"kernel_seconds = {KERNEL_SECONDS:g}", ""]
        for name in sorted(curves):
            curve = curves[name]
            if name.startswith("matmul"):
                curve = replace(curve, unaligned=UNALIGNED.get(family, UNALIGNED_ELSEWHERE))
            lines += toml(family, name, curve)
    OUT.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
