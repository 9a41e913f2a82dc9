"""Prices of an optimizer's step on the host next to measured ones, and the memory that it frees on the device.

    python benchmarks/host_optimizer.py

Nothing is fitted to these rows: rates of memory are those of data sheets (hardware_profiles/data/host_links.toml, or
the row's own machine), so that all of them are held out. A row says what a step with the state on the host took beyond
one on the device, and what that freed. docs/measurements/host-optimizer.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.data_sheet_costs import STEP_PASSES
from cost_models.host_link import HostCopies, host_copies
from cost_models.host_step import UNFUSED, host_step_seconds
from hardware_profiles import HostLink, load_device


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        what: model, machine and source.
        elements: parameters of one device whose state is on the host.
        value_bytes, moment_bytes: of each, as it is stored, and of its moments together.
        freed_value: the values that the optimizer steps on leave the device, too.
        device: the device; ``host``: its host where that is not a built-in one.
        more_seconds: what a step took more; None where it is not known.
        freed_bytes: what the device had less; None where it is not known.
        fused: the step makes one pass.
        threads: of the step, where known.
    """

    what: str
    elements: float
    value_bytes: int
    moment_bytes: int
    freed_value: bool
    device: str
    more_seconds: float | None
    freed_bytes: float | None
    host: HostLink | None = None
    fused: bool = True
    threads: str = ""


DESKTOP = HostLink("Ryzen 5600, DDR4-3200", 25.5e9, 25.5e9, memory_bytes=64e9, memory_bytes_per_second=51.2e9)
GIB = 2.0**30
ROWS = (
    Row("H200, 16 cores: GPT of 438 M, float32 masters, here, fused", 0.438e9, 4, 8, True, "H200-SXM-141GB", 0.100,
        (13.532 - 8.614) * GIB, threads="16"),
    Row("the same, half of the state", 0.219e9, 4, 8, True, "H200-SXM-141GB", 0.056, (13.532 - 10.980) * GIB,
        threads="16"),
    Row("the same, torch's default (not fused)", 0.438e9, 4, 8, True, "H200-SXM-141GB", 0.617, None, fused=False,
        threads="16"),
    Row("4070 Ti SUPER, Ryzen 5600: ViT-g of 1.1 B in bfloat16, torchao's CPUOffloadOptimizer (its README)", 1.1e9, 2,
        4, False, "RTX-4090", 0.25, (9.82 - 5.24) * 1e9, DESKTOP, threads="not said"),
    Row("H100: Qwen3-0.6B, Megatron's optimizer_offload_fraction=1 (NeMo-RL#3628)", 0.596e9, 4, 8, False,
        "H100-SXM-80GB", 0.926, (15.24 - 10.53) * GIB, threads="not said"),
    Row("the same, fraction 0.5", 0.298e9, 4, 8, False, "H100-SXM-80GB", 0.435, (15.24 - 14.13) * GIB,
        threads="not said"),
    Row("16 H100: Qwen3-30B-A3B, tp=2 pp=2 ep=4, fraction 1 (Megatron-Bridge, docs/training/cpu-offloading.md)",
        30.5e9 / 16, 4, 8, False, "H100-SXM-80GB", None, 15.3e9, threads="not said"),
)  # fmt: skip


def priced(row: Row) -> tuple[float, float]:
    """Return the seconds that a step takes more by its price, copies hidden, and the bytes that it frees."""
    device = load_device(row.device)
    host = HostCopies(row.host) if row.host is not None else host_copies(device)
    n_bytes = row.elements * row.value_bytes
    seconds = host_step_seconds("adamw", n_bytes, host) * (1.0 if row.fused else UNFUSED)
    on_device = STEP_PASSES["adamw"] * n_bytes / device.memory_bytes_per_second
    freed = row.elements * (row.moment_bytes + row.value_bytes * row.freed_value)
    return seconds - on_device, freed


def table() -> str:
    """Return the rows in Markdown."""
    lines = ["| measured | threads | s more | priced | GB freed | priced |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        seconds, freed = priced(row)
        said = ["", "", "", ""]
        if row.more_seconds is not None:
            said[:2] = f"{row.more_seconds:.3f}", f"{seconds:.3f} ({seconds / row.more_seconds - 1:+.0%})"
        if row.freed_bytes is not None:
            said[2:] = f"{row.freed_bytes / 1e9:.2f}", f"{freed / 1e9:.2f} ({freed / row.freed_bytes - 1:+.0%})"
        lines.append(f"| {row.what} | {row.threads} | {' | '.join(said)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
