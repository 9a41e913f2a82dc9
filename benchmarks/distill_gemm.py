"""Fit the matmul curves of hardware_profiles/data/efficiency.toml to measured matrix products.

    python benchmarks/distill_gemm.py gemm_measured.csv

Columns: gpu, dtype, m, n, k, time_us, source_url. One curve per family of devices and type; half of the
shapes (m + n + k an even multiple of 512) are kept out of the fit and give the error printed as held out.

Rows of fp8 are of linear layers that get 16-bit activations: they contain a kernel that casts these (the seconds that
m k alone explains), which is fitted beside the curve and not part of it.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections import defaultdict

import numpy as np
from distill_kernels import read, write

from cost_models.fitting import fit_gemm, gemm_seconds
from hardware_profiles import load_device

FAMILIES = {  # same cores, same curve: faster memory then never predicts a slower device
    "ampere": ("A100-SXM-80GB",),
    "ada": ("L40S",),
    "hopper": ("H100-SXM-80GB", "H200-SXM-141GB"),
    "blackwell": ("B200", "GB200"),
    "blackwell-ultra": ("B300", "GB300"),
    "blackwell-pcie": ("RTX-PRO-6000-Blackwell-Server",),
}
GEMM_LAUNCH_SECONDS = 4e-6
"""Before a product begins, in the loops that were measured."""
OF_BANDWIDTH = 0.85
"""Of the data sheet: stream benchmarks give 0.8 to 0.93."""


def main(path: str) -> None:
    rows = defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["gpu"], row["dtype"]
            rows[key].append((int(row["m"]), int(row["n"]), int(row["k"]), float(row["time_us"]) * 1e-6))
    families = read()
    print("| curve | rows | fraction | half m, n, k, mn | error fitted | held out |\n|---|---|---|---|---|---|")
    for family, gpus in FAMILIES.items():
        for kind, name, dtype, width in (("matmul", "bfloat16", "bfloat16", 2), ("matmul_float8", "fp8", "float8", 1)):
            blocks = [
                (*row, load_device(gpu).peak_flops[dtype], load_device(gpu).memory_bytes_per_second * OF_BANDWIDTH)
                for gpu in gpus
                for row in rows[gpu, name]
            ]
            if not blocks:
                continue
            data = np.array(blocks)
            held = (data[:, :3].sum(axis=1) // 512) % 2 == 0
            launch = GEMM_LAUNCH_SECONDS
            shapes = f"{(~held).sum()} of {len(data)} shapes"
            source = f"NVIDIA aiconfigurator {', '.join(gpus)} {dtype} linear, {shapes}"
            fit, rest = data[~held], data[held]
            casts = name == "fp8"
            launch *= 1 + casts
            curve, error, cast_bytes = fit_gemm(
                fit[:, :3], fit[:, 3], fit[:, 4], width, fit[:, 5], launch, source, casts
            )
            model = gemm_seconds(curve, rest[:, :3], rest[:, 4], width, rest[:, 5], launch, cast_bytes)
            if casts:
                without = f"without the cast of activations, {cast_bytes:.3g} bytes an element"
                curve = dataclasses.replace(curve, source=f"{source}, {without}")
            held_error = float(np.median(np.abs(np.log(model / rest[:, 3]))))
            halves = ", ".join(f"{h:.3g}" for h in (curve.half_m, curve.half_n, curve.half_k, curve.half_mn))
            print(f"| {family}.{kind} | {len(data)} | {curve.fraction:.3f} | {halves} | {error:.1%} |", end="")
            print(f" {held_error:.1%} |")
            families[family][kind] = curve
    write(families)


if __name__ == "__main__":
    main(sys.argv[1])
