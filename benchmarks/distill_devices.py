"""Write hardware_profiles/data/devices.toml from a table of data sheets.

    python benchmarks/distill_devices.py gpus.csv

Columns: gpu, mem_gb, hbm_gbs, <dtype>_tflops, source, notes. Data-sheet gigabytes are taken as 1e9 bytes: a
little less than the board has, which leaves room for the driver's context. Rates that the table lacks
(float64, tf32 of PCIe boards) are filled from FILLED, which names its own source.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

OUT = Path(__file__).parent.parent / "hardware_profiles" / "data" / "devices.toml"
COLUMNS = {
    "bfloat16": "bf16_tflops", "float16": "fp16_tflops", "tf32": "tf32_tflops", "float32": "fp32_tflops",
    "float8": "fp8_tflops", "float4": "fp4_tflops",
}  # fmt: skip
SHEET = "vendor data sheet, from memory"
FILLED = {  # TFLOP/s that the csv leaves empty
    "V100": {"float64": 7.8}, "T4": {"float64": 0.25}, "L4": {"float64": 0.47}, "L40S": {"float64": 1.43},
    "RTX-4090": {"float64": 1.29}, "RTX-PRO-6000": {"float32": 117.0, "tf32": 234.0, "float64": 1.9},
    "A30": {"tf32": 82.0, "float32": 10.3, "float64": 5.2}, "A100": {"float64": 9.7},
    "A800": {"float64": 9.7, "tf32": 156.0, "float32": 19.5},
    "H100-PCIe": {"float64": 26.0}, "H100": {"float64": 34.0},
    "H800": {"float64": 1.0}, "H200": {"float64": 34.0},
    "GH200": {"float64": 34.0}, "B200": {"float64": 40.0},
    "B300": {"float64": 1.25}, "GB200": {"float64": 45.0}, "GB300": {"float64": 1.4},
}  # fmt: skip
# Which measured family a device's efficiency curves come from; "inherits" in the source where it was not
# measured.
FAMILY = {
    "V100": "ampere", "T4": "ada", "L4": "ada", "L40S": "ada", "RTX-4090": "blackwell-pcie",
    "RTX-PRO-6000": "blackwell-pcie", "A30": "ampere", "A100": "ampere", "A800": "ampere", "H100": "hopper",
    "H200": "hopper", "GH200": "hopper", "H800": "hopper", "B200": "blackwell", "B300": "blackwell-ultra",
    "GB200": "blackwell", "GB300": "blackwell-ultra",
}  # fmt: skip
MEASURED = {
    "A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200", "B300", "GB200", "GB300", "L40S",
    "RTX-PRO-6000-Blackwell-Server",
}  # fmt: skip


def best_prefix(table: dict, name: str):
    return table[max((key for key in table if name.startswith(key)), key=len)]


def main(path: str) -> None:
    lines = ["# Data sheets, one table per device; written by benchmarks/distill_devices.py. SI units.", ""]
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name, source = row["gpu"], row["source"].replace('"', "'")
        rates = {dtype: (float(row[column]), "csv") for dtype, column in COLUMNS.items() if row[column]}
        for dtype, rate in best_prefix(FILLED, name).items():
            rates.setdefault(dtype, (rate, SHEET))
        notes = row["notes"].replace('"', "'")
        lines += [f'["{name}"]', *([f"# {notes}"] if notes else [])]
        lines += [f"memory_bytes = {float(row['mem_gb']) * 1e9:.6g}"]
        lines += [f"memory_bytes_per_second = {float(row['hbm_gbs']) * 1e9:.6g}", "launch_seconds = 4e-6"]
        flops = ", ".join(f"{dtype} = {rate * 1e12:.6g}" for dtype, (rate, _) in rates.items())
        lines += [f"peak_flops = {{ {flops} }}", f'efficiency = "{best_prefix(FAMILY, name)}"']
        lines += [
            f'["{name}".sources]',
            f'memory_bytes = "{source}"',
            f'memory_bytes_per_second = "{source}"',
        ]
        lines += ['launch_seconds = "estimate: eager CUDA kernels leave gaps of 3 to 10 us, not measured"']
        family = best_prefix(FAMILY, name)
        if name not in MEASURED:
            lines += [f'efficiency = "not measured on this device: inherits from {family}"']
        for dtype, (_, origin) in rates.items():
            lines += [f'"peak_flops.{dtype}" = "{source if origin == "csv" else origin}"']
        lines += [""]
    OUT.write_text("\n".join(lines), encoding="utf-8")
    print(f"{OUT.name}: {len(rows)} devices")


if __name__ == "__main__":
    main(sys.argv[1])
