"""Fit the curves of hardware_profiles/data/collectives.toml to measured collectives.

    python benchmarks/distill_collectives.py collectives_measured.csv

Columns: source, gpu, n_gpus, nodes, link, collective, size_bytes, time_us, busbw_gbs, library, notes; sizes
by the nccl-tests convention. Prints the table of errors that stands in hardware_profiles/data/README.md.

What the fit does: the wire time at data-sheet bandwidth comes from laying the ranks on the link graph of a
built-in cluster (so PCIe trees and the V100 cube count as what they are); base, step, fraction, ramp and
sharpness come from the measurements of *all* boards with that link; a source with N rows weighs sqrt(N).
Curves without measurements are stated in GIVEN with their reason.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from cost_models import mesh_axes
from cost_models.fitting import fit_collective, search
from cost_models.mesh_links import steps_of
from hardware_profiles import Cluster, CollectiveCurve, load_cluster

OUT = Path(__file__).parent.parent / "hardware_profiles" / "data" / "collectives.toml"
FITTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KIND_OF = {"alltoall": "all_to_all"} | {kind: kind for kind in FITTED}
# link column (its beginning) -> (curve, cluster whose graph carries the ranks, sizes n or None for all)
BOXES = [
    ("NVLink3", "nvlink3", "dgx-a100", None),
    ("NVLink4", "nvlink4", "dgx-h100", None),
    ("NVLink5", "nvlink5", "dgx-b200", None),
    ("NVLink2", "nvlink2", "dgx-v100", None),
    ("PCIe5", "pcie", "pcie-rtx-pro-6000", (2,)),
    ("PCIe5", "pcie-socket", "pcie-rtx-pro-6000", (4,)),
    ("PCIe5", "pcie-host", "pcie-rtx-pro-6000", (8,)),
    ("PCIe4", "pcie-slow", "pcie-l40s", (2,)),
    ("PCIe4", "pcie-slow-socket", "pcie-l40s", (4,)),
    ("PCIe4", "pcie-slow-host", "pcie-l40s", (8,)),
]
BETWEEN = ("inside_step_seconds", "ring_step_seconds", "tree_fraction")
"""Fields of curves between machines, written where they say something."""
SKIPPED_NOTES = ("ring", "Ring", "NVLS off")  # switched off by hand, not what a user gets


def unit(cluster: Cluster) -> Cluster:
    """The cluster with links that reach their data-sheet bandwidth at once."""
    plain = CollectiveCurve(0.0, 0.0, 1.0)
    return dataclasses.replace(cluster, curves={c: defaultdict(lambda: plain) for c in cluster.curves})


def measured_rows(path: str) -> list[dict]:
    """Rows with a size and a time; the time comes from the bus bandwidth where it is not given."""
    rows = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kind = KIND_OF.get(row["collective"])
            if kind is None or not row["size_bytes"] or row["notes"] in SKIPPED_NOTES:
                continue
            n, size = int(row["n_gpus"]), float(row["size_bytes"])
            if "floor ~92 us" in row["notes"] and size <= 2**22:
                continue  # that source says itself that its small sizes measure the profiler
            if row["time_us"]:
                seconds = float(row["time_us"]) * 1e-6
            elif float(row["busbw_gbs"]) >= 0.5:  # below, the printed digits say nothing
                factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
                seconds = size * factor / (float(row["busbw_gbs"]) * 1e9)
            else:
                continue
            rows.append({"kind": kind, "n": n, "nodes": int(row["nodes"]), "size": size, "seconds": seconds,
                         "link": row["link"], "source": row["source"], "gpu": row["gpu"]})  # fmt: skip
    return rows


def fit(rows: list[dict], cluster: Cluster, kind: str, **options) -> tuple[CollectiveCurve, float]:
    """One collective on one kind of link inside a machine."""
    bare = unit(cluster)
    per_byte = {n: mesh_axes(bare, {"x": n})["x"].terms[kind][1] for n in {row["n"] for row in rows}}
    counts = Counter(row["source"] for row in rows)
    column = lambda f: np.array([f(row) for row in rows], dtype=float)  # noqa: E731
    return fit_collective(
        column(lambda r: r["n"]),
        column(lambda r: steps_of(kind, r["n"], 1)[0]),
        column(lambda r: r["size"] * per_byte[r["n"]]),
        column(lambda r: r["seconds"]),
        column(lambda r: counts[r["source"]] ** -0.5),
        source=", ".join(sorted({f"{r['source']} {r['gpu']}" for r in rows})) + f" ({len(rows)} rows)",
        **options,
    )


def _between(rows: list[dict], kind: str) -> dict[str, np.ndarray]:
    """Of rows between machines: nodes, wire seconds at the data sheet's rate, measured seconds and weights."""
    counts = Counter(row["source"] for row in rows)

    def wire(row: dict) -> float:
        load = load_cluster(f"dgx-h100-x{row['nodes']}")  # 8 rails of 50 GB/s
        return row["size"] * mesh_axes(unit(load), {"x": row["n"]})["x"].terms[kind][1]

    columns = {
        "nodes": lambda r: r["nodes"], "n": lambda r: r["n"], "wire": wire, "seconds": lambda r: r["seconds"],
        "weights": lambda r: counts[r["source"]] ** -0.5,
    }  # fmt: skip
    return {name: np.array([of(row) for row in rows], dtype=float) for name, of in columns.items()}


def _source(rows: list[dict]) -> str:
    return ", ".join(sorted({f"{r['source']} {r['gpu']}" for r in rows})) + f" ({len(rows)} rows)"


def fit_ring_between(rows: list[dict], kind: str) -> tuple[CollectiveCurve, float]:
    """A gather or scatter between machines: hops inside them take what NCCL's do."""
    of = _between(rows, kind)
    curve, error = fit_collective(
        of["nodes"], of["nodes"] - 1, of["wire"], of["seconds"], of["weights"],
        outside=(of["n"] - of["nodes"]) * HOP_SECONDS, with_ramp=False, source=_source(rows),
    )  # fmt: skip
    return dataclasses.replace(curve, inside_step_seconds=HOP_SECONDS), error


def fit_reduce_between(rows: list[dict], inside: CollectiveCurve) -> tuple[CollectiveCurve, float]:
    """An all_reduce between machines, of which the library takes the faster of a ring and a tree."""
    of, kind = _between(rows, "all_reduce"), "all_reduce"
    weights, wire = of["weights"] / of["weights"].sum(), of["wire"]
    depth = np.ceil(np.log2(of["nodes"]))
    within = np.array([steps_of(kind, round(n / nodes), 1)[0] for n, nodes in zip(of["n"], of["nodes"], strict=True)])

    def unpack(x: np.ndarray) -> tuple[float, ...]:
        logistic = 1 / (1 + np.exp(-x[3:]))
        return (*np.exp(x[:3]), logistic[0], logistic[1], 0.4 + 0.6 * logistic[2])

    def log_model(x: np.ndarray) -> np.ndarray:
        base, tree_step, ring_step, fraction, of_tree, p = unpack(x)
        tree = base + within * inside.step_seconds + 2 * depth * tree_step
        ring = base + 2 * (of["n"] - of["nodes"]) * HOP_SECONDS + 2 * (of["nodes"] - 1) * ring_step
        seconds = [(latency**p + (wire / rate) ** p) ** (1 / p)
                   for latency, rate in ((tree, fraction * of_tree), (ring, fraction))]  # fmt: skip
        return np.log(np.minimum(*seconds))

    start = [np.log(2e-5), np.log(7e-5), np.log(1e-4), 2.0, -1.0, 0.0]
    best = search(lambda x: float(weights @ np.abs(log_model(x) - np.log(of["seconds"]))), start)
    error = float(np.median(np.abs(log_model(best) - np.log(of["seconds"]))))
    base, tree_step, ring_step, fraction, of_tree, p = (float(f"{value:.3g}") for value in unpack(best))
    return CollectiveCurve(base, tree_step, fraction, 0.0, p, _source(rows), HOP_SECONDS, ring_step, of_tree), error


ESTIMATE = "estimate: "
NCCL_HOP, NCCL_NET_HOP = 3.4e-6, 14e-6
"""Seconds of a ring's hop by NVLink and by a network in NCCL's model of its own algorithms (github.com/NVIDIA/nccl,
src/graph/tuning.cc: hwLat, Simple)."""
RING_FACTOR = 1.6
"""What a hop takes in large messages over several machines of these, fitted to reduce_scatter on 4 to 128 machines of 8
H100 with 400 Gb/s each: 360, 345, 320, 300, 280 and 260 GB/s (NVIDIA/nccl issue 1229, taken as 8 GB, the largest size
of its tests); within 9% of all six. NCCL's own factor for rings over several machines is 1.4 to 1.9 by version."""
HOP_SECONDS = float(f"{RING_FACTOR * NCCL_HOP:.3g}")
IB = ESTIMATE + (
    "fraction: at best 96 of 100 GB/s, 3 DGX A100 with 4 HDR (GitHub issue); a level of a tree as in NCCL's model"
)
IB_RING = (
    "NVIDIA/nccl issue 1229: reduce_scatter on 4 to 128 machines of 8 H100, 360 to 260 GB/s; "
    "hops in proportion to NCCL's"
)
IB_PAIRS = ESTIMATE + "latency typical"
IB_GATHER = CollectiveCurve(
    20e-6, float(f"{RING_FACTOR * NCCL_NET_HOP:.3g}"), 0.92, 0.0, 0.8, IB_RING, inside_step_seconds=HOP_SECONDS
)
TCP = ESTIMATE + "kernel TCP, typical"
XGMI = ESTIMATE + "public all_reduce runs on 8 MI300X reach 310 to 330 of 448 GB/s; latency typical"
ICI = ESTIMATE + "rings on wires between neighbours; latency of a hop about 1 us (scaling-book)"
GIVEN = {
    "infiniband": {
        "all_reduce": CollectiveCurve(15e-6, NCCL_NET_HOP, 0.92, 0.0, 0.7, IB),
        "all_gather": IB_GATHER,
        "reduce_scatter": IB_GATHER,
        "all_to_all": CollectiveCurve(15e-6, 3e-6, 0.85, 0.0, 0.7, IB_PAIRS),
        "send_recv": CollectiveCurve(8e-6, 2e-6, 0.92, 0.0, 0.8, IB_PAIRS),
    },
    "ethernet": {
        kind: CollectiveCurve(60e-6, 40e-6, 0.8, 0.0, 0.7, TCP) for kind in (*FITTED, "send_recv")
    },
    "xgmi": {kind: CollectiveCurve(10e-6, 1.5e-6, 0.72, 0.0, 0.8, XGMI) for kind in (*FITTED, "send_recv")},
    "ici": {kind: CollectiveCurve(2e-6, 1e-6, 0.9, 0.0, 1.0, ICI) for kind in (*FITTED, "send_recv")},
}  # fmt: skip


def send_recv(gather: CollectiveCurve) -> CollectiveCurve:
    """No measurements at hand: an all_gather of two ranks is a send and a receive at once."""
    fraction = float(f"{gather.fraction * (1 - gather.ramp / 2):.3g}")
    return dataclasses.replace(gather, fraction=fraction, ramp=0.0, source="as all_gather of 2 ranks")


def main(path: str) -> None:
    rows = measured_rows(path)
    curves: dict[str, dict[str, CollectiveCurve]] = {}
    print("| curve | collective | rows | median error |\n|---|---|---|---|")
    for prefix, name, cluster, sizes in BOXES:
        box = [r for r in rows if r["link"].startswith(prefix) and r["nodes"] == 1 and (not sizes or r["n"] in sizes)]
        curves[name] = {}
        for kind in FITTED:
            own = [row for row in box if row["kind"] == kind]
            if own:
                ramp = len({r["n"] for r in own}) > 2 and name != "nvlink2"  # the cube's links are in its graph
                curves[name][kind], error = fit(own, load_cluster(cluster), kind, with_ramp=ramp)
                print(f"| {name} | {kind} | {len(own)} | {error:.1%} |")
            else:  # V100: all_reduce only
                like = curves["nvlink3"][kind]
                curves[name][kind] = dataclasses.replace(
                    like, fraction=curves[name]["all_reduce"].fraction, ramp=0.0,
                    source="not measured: latency of nvlink3, fraction of all_reduce",
                )  # fmt: skip
        curves[name]["send_recv"] = send_recv(curves[name]["all_gather"])
    curves["efa"] = {}
    for kind in FITTED:
        own = [row for row in rows if row["nodes"] > 1 and "EFA" in row["link"] and row["kind"] == kind]
        if own:
            if kind == "all_reduce":
                curves["efa"][kind], error = fit_reduce_between(own, curves["nvlink4"][kind])
            else:
                curves["efa"][kind], error = fit_ring_between(own, kind)
            print(f"| efa | {kind} | {len(own)} | {error:.1%} |")
    at_once = ESTIMATE + "every rank sends to all at once: no ring whose hops follow each other"
    curves["efa"]["all_to_all"] = CollectiveCurve(60e-6, 30e-6, 0.85, 0.0, 0.8, at_once)
    curves["efa"]["send_recv"] = CollectiveCurve(25e-6, 10e-6, 0.85, 0.0, 0.8, ESTIMATE + "typical EFA latency")
    curves |= GIVEN

    lines = ["# Collectives by kind of link; written by benchmarks/distill_collectives.py.", ""]
    for name, by_kind in curves.items():
        for kind, curve in by_kind.items():
            lines.append(f"[{name}.{kind}]")
            for field in dataclasses.fields(curve):
                value = getattr(curve, field.name)
                if field.name in BETWEEN and value == field.default:
                    continue
                lines.append(f'{field.name} = "{value}"' if field.name == "source" else f"{field.name} = {value:.3g}")
            lines.append("")
    OUT.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
