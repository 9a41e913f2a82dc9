"""What joins devices to the memory of their host, and that memory: records, read from data/host_links.toml.

A device's own profile may have the same table (``[devices.NAME.host]`` in a cluster file), which then takes precedence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from .reader import ProfileErrors, Table, read_document

_FILE = Path(__file__).parent / "data" / "host_links.toml"


@dataclass(frozen=True)
class HostLink:
    """One device's way to the memory of its host, and that memory.

    Attributes:
        name: the table.
        to_host_bytes_per_second, to_device_bytes_per_second: rate of a copy from and to pinned memory, alone.
        both_fraction: part of its rate that each direction keeps while the other copies, too.
        shared_by: devices that share the wire into the host.
        latency_seconds: of a copy, beside its bytes.
        memory_bytes: the host's memory that ``memory_devices`` devices share: of a socket, or of a Grace.
        memory_bytes_per_second: nominal bandwidth of that memory.
        memory_devices: the devices that share it, and the cores beside it.
        cores: of the processors beside that memory; 0 where not known.
        source: where the numbers come from.
    """

    name: str
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    both_fraction: float = 1.0
    shared_by: int = 1
    latency_seconds: float = 1e-5
    memory_bytes: float = 0.0
    memory_bytes_per_second: float = 0.0
    memory_devices: int = 1
    source: str = ""
    cores: int = 0


def read_host_link(name: str, table: Table) -> HostLink:
    """Read one table."""
    link = HostLink(
        name,
        table.number("to_host_bytes_per_second", positive=True),
        table.number("to_device_bytes_per_second", positive=True),
        table.number("both_fraction", 1.0, positive=True),
        table.integer("shared_by", 1),
        table.number("latency_seconds", 1e-5),
        table.number("memory_bytes", positive=True),
        table.number("memory_bytes_per_second", positive=True),
        table.integer("memory_devices", 1),
        table.text("source", ""),
        table.integer("cores", 0, low=0),
    )
    if link.both_fraction > 1:
        table.failures.add(f"{table.path}.both_fraction", f"got {link.both_fraction}, expected a number up to 1")
    table.close()
    return link


@functools.cache
def _tables() -> tuple[dict[str, HostLink], dict[str, HostLink]]:
    """Return the tables by the devices that they name, and by their own names."""
    failures = ProfileErrors("data/host_links.toml")
    root = Table(read_document(_FILE), "", failures)
    by_device: dict[str, HostLink] = {}
    by_name: dict[str, HostLink] = {}
    for name in root.data:
        table = root.table(name)
        devices = table.text("devices", "")
        by_name[name] = read_host_link(name, table)
        by_device.update({device.strip(): by_name[name] for device in devices.split(",") if devices})
    failures.raise_if_any()
    return by_device, by_name


def builtin_host_link(device: str, host_link: str) -> HostLink | None:
    """Return what joins a built-in device to its host; None for one of which nothing is known, such as a processor."""
    by_device, by_name = _tables()
    return by_device.get(device) or by_name.get(host_link)
