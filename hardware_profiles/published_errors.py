"""Errors of predictions against published runs, by software and device: the band shown with a prediction.

``data/errors.toml`` is written by ``benchmarks/accuracy.py --errors`` from the same rows as docs/accuracy.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .model import Cluster
from .reader import ProfileErrors, Table, read_document
from .strict import is_there

_FILE = Path(__file__).parent / "data" / "errors.toml"
ANY = "any"
"""In place of a device: of all devices together."""


@dataclass(frozen=True)
class ErrorBand:
    """Errors of prices against published runs, as unsigned fractions of the measured value.

    Attributes:
        software, device: the software and the device of the runs; the device is ``any`` if those on one device are too
            few.
        rows: runs with compared seconds; 0 where only memory was compared.
        seconds_median, seconds_90: median and 90th percentile of the errors.
        memory_rows, memory_median, memory_90: the same of memory.
    """

    software: str
    device: str
    rows: int = 0
    seconds_median: float | None = None
    seconds_90: float | None = None
    memory_rows: int = 0
    memory_median: float | None = None
    memory_90: float | None = None


@functools.cache
def error_bands() -> Mapping[tuple[str, str], ErrorBand]:
    """Return all bands by software and device; none if the table was never written."""
    if not is_there(_FILE):
        return {}
    failures = ProfileErrors("data/errors.toml")
    root = Table(read_document(_FILE), "", failures)
    bands = {}
    for software in root.data:
        of_software = root.table(software)
        for device in of_software.data:
            bands[software, device] = _read(software, device, of_software.table(device))
        of_software.close()
    root.close()
    failures.raise_if_any()
    return bands


def _read(software: str, device: str, table: Table) -> ErrorBand:
    def number(name: str) -> float | None:
        return table.number(name) if table.has(name) else None

    band = ErrorBand(
        software, device, table.integer("rows", 0, low=0), number("seconds_median"), number("seconds_90"),
        table.integer("memory_rows", 0, low=0), number("memory_median"), number("memory_90"),
    )  # fmt: skip
    table.close()
    return band


def error_band(cluster: Cluster) -> ErrorBand | None:
    """Return the band of a cluster's software on its slowest device, or on any device; None without runs."""
    if cluster.abstract:
        return None
    bands, software = error_bands(), cluster.software.name
    device = cluster.slowest(range(cluster.n_devices)).name
    return bands.get((software, device)) or bands.get((software, ANY))
