"""Write hardware_profiles/data/devices.toml from a table of data sheets and the list MORE of this script.

    python benchmarks/distill_devices.py gpus.csv

Columns: gpu, mem_gb, hbm_gbs, <dtype>_tflops, tdp_w, source, notes. Data-sheet gigabytes are taken as 1e9 bytes.
Rates that the table lacks (float64, tf32 of PCIe boards) are filled from FILLED, which names its own source. All rates
are dense.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any, NamedTuple

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
FILLED_WATTS = {"GH200-96GB": 700.0}


class Sheet(NamedTuple):
    """The data sheet of a device that the csv lacks: bytes and rates in GB, GB/s, TFLOP/s (dense), watts."""

    gb: float
    gbs: float
    tflops: dict[str, float]
    watts: float
    family: str
    source: str = SHEET
    notes: str = ""


def _alike(bf16: float, **others: float) -> dict[str, float]:
    return {"bfloat16": bf16, "float16": bf16, **others}


AMD = "AMD Instinct data sheets, from memory"
TPU = "https://jax-ml.github.io/scaling-book/tpus (memory, bandwidth, bf16, int8), from memory; float32: estimate"
TPU_NOTE = "rates of the matrix unit; float32 is taken as six passes in bfloat16; power is not published"
MORE = {
    "V100-SXM3-32GB": Sheet(32, 981, {"float16": 125, "float32": 15.7, "float64": 7.8}, 350, "V100",
                            notes="DGX-2: 16 GPUs on NVSwitch"),
    "A100-PCIe-40GB": Sheet(40, 1555, _alike(312, tf32=156, float32=19.5, float64=9.7), 250, "A100",
                            notes="NVLink only with a 2-GPU bridge"),
    "A10G": Sheet(24, 600, _alike(70, tf32=35, float32=35, float64=0.5), 300, "A10G", notes="AWS G5"),
    "RTX-A6000": Sheet(48, 768, _alike(154.8, tf32=77.4, float32=38.7, float64=0.6), 300, "A10G"),
    "RTX-3090": Sheet(24, 936, _alike(71, tf32=35.6, float32=35.6, float64=0.56), 350, "A10G",
                      notes="fp32-accumulate dense rates"),
    "RTX-5090": Sheet(32, 1792, _alike(209.5, tf32=104.8, float32=104.8, float64=1.6, float8=419, float4=1676), 575,
                      "RTX-PRO-6000", notes="fp32-accumulate dense rates; no NVLink"),
    "H100-NVL-94GB": Sheet(94, 3900, _alike(835, tf32=417, float32=60, float64=30, float8=1671), 400, "H100",
                           notes="NVLink only with a 2-GPU bridge (600 GB/s total)"),
    "H20-SXM-96GB": Sheet(96, 4000, _alike(148, tf32=74, float32=44, float64=1, float8=296), 500, "H100"),
    "GH200-144GB": Sheet(141, 4900, _alike(989, tf32=494.5, float32=67, float64=34, float8=1979), 900, "H100",
                         notes="HBM3e version"),
    "MI250X-GCD": Sheet(64, 1638, _alike(191.5, float32=23.9, float64=23.9), 280, "MI", AMD,
                        "one of the two dies of a board, which programs see as a device; half of the board's power"),
    "MI300X": Sheet(192, 5300, _alike(1307.4, tf32=653.7, float32=163.4, float64=81.7, float8=2614.9), 750, "MI", AMD),
    "MI325X": Sheet(256, 6000, _alike(1307.4, tf32=653.7, float32=163.4, float64=81.7, float8=2614.9), 1000, "MI", AMD),
    "MI355X": Sheet(288, 8000, _alike(2516.6, float32=157.3, float64=78.6, float8=5033.2, float4=10066.3), 1400, "MI",
                    AMD, "float4 is MXFP4"),
    "TPU-v4": Sheet(32, 1200, {"bfloat16": 275, "int8": 275, "float32": 45.8}, 0, "TPU", TPU, TPU_NOTE),
    "TPU-v5e": Sheet(16, 810, {"bfloat16": 197, "int8": 394, "float32": 32.8}, 0, "TPU", TPU, TPU_NOTE),
    "TPU-v5p": Sheet(96, 2800, {"bfloat16": 459, "int8": 918, "float32": 76.5}, 0, "TPU", TPU, TPU_NOTE),
    "TPU-v6e": Sheet(32, 1600, {"bfloat16": 920, "int8": 1840, "float32": 153.3}, 0, "TPU", TPU, TPU_NOTE),
    "Trainium2": Sheet(96, 2900, _alike(667, float32=181, float8=1299), 0, "Trainium",
                       "https://aws.amazon.com/ec2/instance-types/trn2 (memory, bandwidth, rates), from memory",
                       "power is not published"),
}  # fmt: skip
# Which measured family a device's efficiency curves come from; "inherits" in the source where it was not
# measured.
FAMILY = {
    "V100": "volta", "T4": "turing", "L4": "ada", "L40S": "ada", "RTX-4090": "blackwell-pcie",
    "RTX-PRO-6000": "blackwell-pcie", "A30": "ampere", "A100": "ampere", "A800": "ampere", "A10G": "ampere",
    "H100": "hopper", "H200": "hopper", "GH200": "hopper", "H800": "hopper", "B200": "blackwell",
    "B300": "blackwell-ultra", "GB200": "blackwell", "GB300": "blackwell-ultra",
    "MI": "cdna", "TPU": "hopper", "Trainium": "hopper",
}  # fmt: skip
MEASURED = {
    "A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200", "B300", "GB200", "GB300", "L40S",
    "RTX-PRO-6000-Blackwell-Server",
}  # fmt: skip
# Where public sweeps of matrix products say that a family that lends its curves is too fast or too slow.
CAVEATS = {
    "TPU": "; another architecture: prices are a guess",
    "Trainium": "; another architecture: prices are a guess",
}
# The link into a device's domain, and the devices in it. Bridges join pairs of cards.
DOMAINS = {
    "V100-SXM2": ("nvlink2-switch", 8), "V100-SXM3": ("nvlink2-switch", 16), "A100-SXM": ("nvlink3", 8),
    "A100-PCIe": ("nvlink3-bridge", 2), "A800-SXM": ("nvlink3-a800", 8), "H100-SXM": ("nvlink4", 8),
    "H100-PCIe": ("nvlink4-bridge", 2), "H100-NVL": ("nvlink4-bridge", 2), "H20-SXM": ("nvlink4", 8),
    "H200-SXM": ("nvlink4", 8), "H800-SXM": ("nvlink4-h800", 8), "GH200": ("nvlink4", 4), "B200": ("nvlink5", 8),
    "B300": ("nvlink5", 8), "GB200": ("nvlink5", 72), "GB300": ("nvlink5", 72), "MI250X": ("xgmi2", 8),
    "MI300X": ("xgmi3", 8), "MI325X": ("xgmi3", 8), "MI355X": ("xgmi4", 8), "TPU-v4": ("ici-v4", 64),
    "TPU-v5e": ("ici-v5e", 16), "TPU-v5p": ("ici-v5p", 64), "TPU-v6e": ("ici-v6e", 16),
    "Trainium2": ("neuronlink3", 16),
}  # fmt: skip
PCIE = {
    "V100": "pcie3", "T4": "pcie3", "L4": "pcie4", "RTX-30": "pcie4", "RTX-40": "pcie4", "RTX-50": "pcie5",
    "RTX-A6000": "pcie4", "RTX-PRO": "pcie5", "A": "pcie4", "H": "pcie5", "GH": "pcie5", "B": "pcie5", "GB": "pcie5",
    "MI250X": "pcie4", "MI3": "pcie5", "TPU": "pcie4", "Trainium": "pcie5",
}  # fmt: skip


def best_prefix(table: dict[str, Any], name: str) -> Any:
    """The entry of the longest key that a name begins with."""
    return table[max((key for key in table if name.startswith(key)), key=len)]


def sheets_of(path: str) -> dict[str, tuple[Sheet, dict[str, str]]]:
    """Device -> its sheet, and the source of each rate: of the csv, completed by FILLED, then MORE."""
    found: dict[str, tuple[Sheet, dict[str, str]]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, source = row["gpu"], row["source"].replace('"', "'")
            rates = {dtype: float(row[column]) for dtype, column in COLUMNS.items() if row[column]}
            origins = dict.fromkeys(rates, source)
            for dtype, rate in best_prefix(FILLED, name).items():
                rates.setdefault(dtype, rate)
                origins.setdefault(dtype, SHEET)
            watts = float(row["tdp_w"] or FILLED_WATTS.get(name, 0))
            found[name] = Sheet(float(row["mem_gb"]), float(row["hbm_gbs"]), rates, watts, name, source,
                                row["notes"].replace('"', "'")), origins  # fmt: skip
    for name, sheet in MORE.items():
        found.setdefault(name, (sheet, dict.fromkeys(sheet.tflops, sheet.source)))
    return found


def main(path: str) -> None:
    lines = ["# Data sheets, one table per device; written by benchmarks/distill_devices.py. SI units.", ""]
    sheets = sheets_of(path)
    for name, (sheet, origins) in sheets.items():
        family = best_prefix(FAMILY, sheet.family)
        lines += [f'["{name}"]', *([f"# {sheet.notes}"] if sheet.notes else [])]
        lines += [f"memory_bytes = {sheet.gb * 1e9:.6g}"]
        lines += [f"memory_bytes_per_second = {sheet.gbs * 1e9:.6g}", "launch_seconds = 8e-6"]
        if sheet.watts:
            lines += [f"power_watts = {sheet.watts:g}"]
        flops = ", ".join(f"{dtype} = {rate * 1e12:.6g}" for dtype, rate in sheet.tflops.items())
        lines += [f"peak_flops = {{ {flops} }}", f'efficiency = "{family}"']
        if any(name.startswith(key) for key in DOMAINS):
            link, domain = best_prefix(DOMAINS, name)
            lines += [f'link = "{link}"', f"domain = {domain}"]
        lines += [f'host_link = "{best_prefix(PCIE, name)}"']
        lines += [f'["{name}".sources]', f'memory_bytes = "{sheet.source}"']
        lines += [f'memory_bytes_per_second = "{sheet.source}"']
        lines += ['launch_seconds = "estimate: torch in eager mode on a fast host; 7 to 18 us measured on a slow one"']
        if name not in MEASURED:
            caveat = next((text for key, text in CAVEATS.items() if sheet.family == key), "")
            lines += [f'efficiency = "not measured on this device: inherits from {family}{caveat}"']
        lines += [f'"peak_flops.{dtype}" = "{origin}"' for dtype, origin in origins.items()]
        lines += [""]
    OUT.write_text("\n".join(lines), encoding="utf-8")
    print(f"{OUT.name}: {len(sheets)} devices")


if __name__ == "__main__":
    main(sys.argv[1])
