"""Fit the matmul curves of hardware_profiles/data/efficiency.toml to measured matrix products.

    python benchmarks/distill_gemm.py gemm_measured.csv

Columns: gpu, dtype, m, n, k, time_us, source_url. One curve per family of devices and type; half of the
shapes (m + n + k an even multiple of 512) are kept out of the fit and give the error printed as held out.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from cost_models.fitting import fit_gemm, gemm_seconds
from hardware_profiles import EfficiencyCurve, load_device

OUT = Path(__file__).parent.parent / "hardware_profiles" / "data" / "efficiency.toml"
FAMILIES = {  # same cores, same curve: faster memory then never predicts a slower device
    "ampere": ("A100-SXM-80GB",),
    "ada": ("L40S",),
    "hopper": ("H100-SXM-80GB", "H200-SXM-141GB"),
    "blackwell": ("B200", "GB200"),
    "blackwell-ultra": ("B300", "GB300"),
    "blackwell-pcie": ("RTX-PRO-6000-Blackwell-Server",),
}
# Not measured here. A fused attention forward and backward reach about half of the matmul peak.
CONV = EfficiencyCurve(0.55, half_work=5e8, source="estimate: cuDNN, channels last; not measured")
ATTENTION = EfficiencyCurve(
    0.5, half_work=5e8, source="estimate: FlashAttention-2 papers give 0.5 to 0.73; not measured"
)
POINTWISE = EfficiencyCurve(
    0.85, half_work=2e5, source="estimate: stream benchmarks give 0.8 to 0.93 of the data sheet"
)


def table(family: str, kind: str, curve: EfficiencyCurve) -> list[str]:
    """TOML lines of one curve, without the zeros."""
    lines = [f"[{family}.{kind}]", f"fraction = {curve.fraction:.3g}"]
    for key in ("half_m", "half_n", "half_k", "half_mn", "half_work"):
        if value := getattr(curve, key):
            lines.append(f"{key} = {value:.3g}")
    return [*lines, f'source = "{curve.source}"', ""]


def main(path: str) -> None:
    rows = defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["gpu"], row["dtype"]
            rows[key].append((int(row["m"]), int(row["n"]), int(row["k"]), float(row["time_us"]) * 1e-6))
    lines = [
        "# Fractions of the data-sheet rate by family of devices; written by benchmarks/distill_gemm.py.",
        "",
    ]
    print(
        "| curve | rows | fraction | half m, n, k, mn | error fitted | held out |\n|---|---|---|---|---|---|"
    )
    for family, gpus in FAMILIES.items():
        curves = {"conv": CONV, "attention": ATTENTION, "pointwise": POINTWISE}
        for kind, name, dtype, width in (
            ("matmul", "bfloat16", "bfloat16", 2),
            ("matmul_float8", "fp8", "float8", 1),
        ):
            blocks = [
                (
                    *row,
                    load_device(gpu).peak_flops[dtype],
                    load_device(gpu).memory_bytes_per_second * POINTWISE.fraction,
                )
                for gpu in gpus
                for row in rows[gpu, name]
            ]
            if not blocks:
                continue
            data = np.array(blocks)
            held = (data[:, :3].sum(axis=1) // 512) % 2 == 0
            launch = load_device(gpus[0]).launch_seconds
            shapes = f"{(~held).sum()} of {len(data)} shapes"
            source = f"NVIDIA aiconfigurator {', '.join(gpus)} {dtype} linear, {shapes}"
            fit, rest = data[~held], data[held]
            curve, error = fit_gemm(fit[:, :3], fit[:, 3], fit[:, 4], width, fit[:, 5], launch, source)
            model = gemm_seconds(curve, rest[:, :3], rest[:, 4], width, rest[:, 5], launch)
            held_error = float(np.median(np.abs(np.log(model / rest[:, 3]))))
            halves = ", ".join(f"{h:.3g}" for h in (curve.half_m, curve.half_n, curve.half_k, curve.half_mn))
            print(
                f"| {family}.{kind} | {len(data)} | {curve.fraction:.3f} | {halves} | {error:.1%} |", end=""
            )
            print(f" {held_error:.1%} |")
            curves[kind] = curve
        for kind in sorted(curves):
            lines += table(family, kind, curves[kind])
    OUT.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
