"""Turn hardware_profiles/measured/numbers_local.json into the device `cpu-core` and the gloo curves.

    python benchmarks/distill_local.py

Run benchmarks/measure_local.py first. Prints the errors of the fits.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from cost_models.fitting import fit_collective, fit_gemm
from cost_models.mesh_links import steps_of
from hardware_profiles import CollectiveCurve, EfficiencyCurve

MEASURED = Path(__file__).parent.parent / "hardware_profiles" / "measured"
GLOO_BYTES_PER_SECOND = 10e9  # a nominal rate for memory copies over the loopback; the fraction tells the rest
WIRE = {  # bytes on the wire per byte of the size, n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0, "send_recv": lambda n: 1.0,
}  # fmt: skip


def toml(header: str, item: CollectiveCurve | EfficiencyCurve) -> list[str]:
    """The lines of one curve."""
    lines = [f"[{header}]"]
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        lines.append(f'{field.name} = "{value}"' if field.name == "source" else f"{field.name} = {value:.4g}")
    return [*lines, ""]


def device_lines(numbers: dict, source: str) -> list[str]:
    """The device `cpu-core`: one thread of this machine."""
    rows = numbers["compute"]
    best: dict[str, float] = {}
    for row in rows:
        if row["what"] == "matmul":
            best[row["dtype"]] = max(best.get(row["dtype"], 0.0), row["flops"] / row["seconds"])
    streams = [r for r in rows if r["what"] == "pointwise" and r["bytes"] >= 1e6]
    # From cache (many small tensors) to fresh pages (large ones): the geometric mean, within 5x of either
    # end.
    bandwidth = float(np.exp(np.mean([np.log(r["bytes"] / r["seconds"]) for r in streams])))
    eager = next(r["seconds"] for r in rows if r["what"] == "eager_step_of_42_ops") / 42

    gemms = [r for r in rows if r["what"] == "matmul" and r["dtype"] == "float32"]
    shapes, seconds = np.array([r["shape"] for r in gemms]), np.array([r["seconds"] for r in gemms])
    peak = best["float32"]
    matmul, error, _ = fit_gemm(shapes, seconds, peak, 4, bandwidth, 2e-6, source)
    print(f"cpu-core.matmul float32: {len(gemms)} shapes, median error {error:.1%}")

    def by_work(what: str) -> EfficiencyCurve:
        """fraction and half_work from a straight line: seconds = (flops + half) / (peak * fraction)."""
        own = [r for r in rows if r["what"] == what]
        work, took = (np.array([r[key] for r in own]) for key in ("flops", "seconds"))
        fraction = float(np.clip(np.median((work / took)[work > np.median(work) / 2]) / peak, 0.01, 1.2))
        half = float(np.clip(np.median(took * peak * fraction - work), 0, work.max()))
        print(f"cpu-core.{what}: {len(own)} shapes, median error "
              f"{np.median(np.abs(np.log((work + half) / (peak * fraction) / took))):.1%}")  # fmt: skip
        return EfficiencyCurve(fraction, half_work=half, source=source)

    lines = ["# One thread of the machine that measured; written by benchmarks/distill_local.py.", "", "[cpu-core]"]
    lines += [f"memory_bytes = {numbers['memory_bytes'] / numbers['processors']:.4g}"]
    lines += [f"memory_bytes_per_second = {bandwidth:.3g}", f"launch_seconds = {eager:.3g}"]
    lines += ["peak_flops = { " + ", ".join(f"{dtype} = {rate:.3g}" for dtype, rate in best.items()) + " }"]
    lines += ["", "[cpu-core.sources]", f'memory_bytes = "{source}: the machine\'s memory shared by its processors"']
    lines += [f'memory_bytes_per_second = "{source}: torch.add of 3 to 200 MB, geometric mean"']
    lines += [f'launch_seconds = "{source}: eager forward and backward of small ops, per op"']
    lines += [f'peak_flops = "{source}: best torch linear on one thread"', ""]
    lines += toml("cpu-core.efficiency.matmul", matmul)
    lines += toml("cpu-core.efficiency.conv", by_work("conv"))
    lines += toml("cpu-core.efficiency.attention", by_work("attention"))
    pointwise = EfficiencyCurve(1.0, source=f"{source}: in the bandwidth itself")
    return lines + toml("cpu-core.efficiency.pointwise", pointwise)


def curve_lines(numbers: dict, source: str) -> list[str]:
    """`gloo` from 2 ranks on 2 processors, `gloo-crowded` from 4: every step then waits for the scheduler."""
    lines = ["# gloo between processes of one machine; written by benchmarks/distill_local.py.", ""]
    for name, n in (("gloo", 2), ("gloo-crowded", 4)):
        part = min(1.0, numbers["processors"] / n)  # the cluster builder scales the links of crowded nodes by this
        for kind in WIRE:
            rows = [r for r in numbers["collectives"] if r["collective"] == kind and r["n"] == n and "seconds" in r]
            sizes, seconds = (np.array([r[key] for r in rows], dtype=float) for key in ("bytes", "seconds"))
            curve, error = fit_collective(
                np.full(len(rows), n), np.full(len(rows), steps_of(kind, n, 1)[0]),
                sizes * WIRE[kind](n) / (GLOO_BYTES_PER_SECOND * part), seconds, np.ones(len(rows)),
                with_base=False, with_ramp=False, source=f"{source}, {n} ranks",
            )  # fmt: skip
            print(f"{name}.{kind}: {len(rows)} sizes, median error {error:.1%}")
            lines += toml(f"{name}.{kind}", curve)
    return lines


def main() -> None:
    numbers = json.loads((MEASURED / "numbers_local.json").read_text(encoding="utf-8"))
    source = f"measured {numbers['date']}, {numbers['processor']}, torch {numbers['torch']}"
    (MEASURED / "devices_local.toml").write_text("\n".join(device_lines(numbers, source)), encoding="utf-8")
    (MEASURED / "curves_local.toml").write_text("\n".join(curve_lines(numbers, source)), encoding="utf-8")


if __name__ == "__main__":
    main()
