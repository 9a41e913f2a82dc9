"""Names and files -> devices, links, curves. The built-in data lies in `data/`, one TOML file per noun."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import ProfileError
from .model import COLLECTIVES, CURVES, OP_KINDS, RATES, CollectiveCurve, Device, EfficiencyCurve, Link
from .reader import ProfileErrors, Table, closest, read_document

DATA = Path(__file__).parent / "data"


class Efficiency(NamedTuple):
    """What devices with the same cores have in common: curves by name, and the least seconds of a kernel (None where
    the processor that launches computes)."""

    curves: Mapping[str, EfficiencyCurve]
    kernel_seconds: float | None


@functools.cache
def efficiency_families() -> dict[str, Efficiency]:
    """The families of data/efficiency.toml by name."""
    failures = ProfileErrors("data/efficiency.toml")
    root = Table(read_document(DATA / "efficiency.toml"), "", failures)
    families = {name: read_efficiency(root.table(name)) for name in root.data}
    failures.raise_if_any()
    return families


def read_efficiency(table: Table) -> Efficiency:
    """One table of curves by name; those of OP_KINDS are required, others of CURVES and `kernel_seconds` optional."""
    curves = {}
    for name in (*OP_KINDS, *(n for n in CURVES if n not in OP_KINDS and table.has(n))):
        inner = table.table(name)
        curves[name] = EfficiencyCurve(
            inner.number("fraction", positive=True),
            inner.number("half_m", 0.0),
            inner.number("half_n", 0.0),
            inner.number("half_k", 0.0),
            inner.number("half_mn", 0.0),
            inner.number("half_work", 0.0),
            inner.text("source", ""),
            inner.number("half_row", 0.0),
            inner.number("item_bytes", 0.0),
            inner.number("bytes_per_flop", 0.0),
            inner.number("unaligned", 1.0, positive=True),
        )
        inner.close()
    kernel_seconds = table.number("kernel_seconds") if table.has("kernel_seconds") else None
    table.close()
    return Efficiency(curves, kernel_seconds)


def read_device(name: str, table: Table) -> Device:
    """One device table. `efficiency` is the name of a family or a table of curves."""
    failures = table.failures
    family = table.take(
        "efficiency", expected="the name of a family of data/efficiency.toml, or a table of curves"
    )
    if isinstance(family, str):
        if family not in efficiency_families():
            hint = closest(family, efficiency_families())
            failures.add(f"{table.path}.efficiency", f"got unknown family '{family}': {hint}")
        efficiency = efficiency_families().get(family, Efficiency({}, None))
    else:
        efficiency = read_efficiency(table.table("efficiency")) if family is not None else Efficiency({}, None)
    peaks = table.numbers("peak_flops", positive=True)
    for dtype in peaks:
        if dtype not in RATES:
            failures.add(f"{table.path}.peak_flops.{dtype}", f"is no format with a rate: {closest(dtype, RATES)}")
    if not peaks:
        failures.add(f"{table.path}.peak_flops", "is empty, add at least float32")
    device = Device(
        name,
        table.number("memory_bytes", positive=True),
        table.number("memory_bytes_per_second", positive=True),
        peaks,
        table.number("launch_seconds"),
        efficiency.curves,
        table.texts("sources", {}),
        table.number("power_watts", positive=True) if table.has("power_watts") else None,
        efficiency.kernel_seconds,
    )
    table.close()
    return device


def read_link(name: str, table: Table, known_curves: Mapping[str, object]) -> Link:
    """One link table."""
    sources = table.texts("sources", {})
    link = Link(
        name,
        table.number("bandwidth_bytes_per_second", positive=True),
        table.number("latency_seconds"),
        table.text("curve"),
        "; ".join(f"{key}: {text}" for key, text in sources.items()),
    )
    if link.curve and link.curve not in known_curves:
        hint = closest(link.curve, known_curves)
        table.failures.add(f"{table.path}.curve", f"got unknown curve '{link.curve}': {hint}")
    table.close()
    return link


def read_curves(table: Table) -> dict[str, CollectiveCurve]:
    """The curves of a kind of link. `broadcast` and `send_recv` default to that of all_gather."""
    curves = {}
    for kind in COLLECTIVES:
        if kind in ("broadcast", "send_recv") and not table.has(kind):
            table.asked.add(kind)
            continue
        inner = table.table(kind)
        curves[kind] = CollectiveCurve(
            inner.number("base_seconds"),
            inner.number("step_seconds"),
            inner.number("fraction", positive=True),
            inner.number("ramp", 0.0),
            inner.number("sharpness", 1.0, positive=True),
            inner.text("source", ""),
        )
        if curves[kind].ramp >= 2:
            table.failures.add(f"{inner.path}.ramp", f"got {curves[kind].ramp}, expected a number below 2")
        inner.close()
    for kind in ("broadcast", "send_recv"):
        curves.setdefault(kind, curves["all_gather"])
    table.text("note", "")
    table.close()
    return curves


@functools.cache
def builtin_curves() -> dict[str, dict[str, CollectiveCurve]]:
    """Curve name -> collective -> curve: data/collectives.toml plus those measured on the local machine."""
    curves: dict[str, dict[str, CollectiveCurve]] = {}
    for path in [DATA / "collectives.toml", *sorted((DATA.parent / "measured").glob("curves_*.toml"))]:
        failures = ProfileErrors(path.name)
        root = Table(read_document(path), "", failures)
        curves.update({name: read_curves(root.table(name)) for name in root.data})
        failures.raise_if_any()
    return curves


@functools.cache
def builtin_links() -> dict[str, Link]:
    """Link name -> link, from data/links.toml."""
    failures = ProfileErrors("data/links.toml")
    root = Table(read_document(DATA / "links.toml"), "", failures)
    links = {name: read_link(name, root.table(name), builtin_curves()) for name in root.data}
    failures.raise_if_any()
    return links


@functools.cache
def builtin_devices() -> dict[str, Device]:
    """Device name -> device: data/devices.toml plus the measured local core."""
    devices: dict[str, Device] = {}
    for path in [DATA / "devices.toml", *sorted((DATA.parent / "measured").glob("devices_*.toml"))]:
        failures = ProfileErrors(path.name)
        root = Table(read_document(path), "", failures)
        devices.update({name: read_device(name, root.table(name)) for name in root.data})
        failures.raise_if_any()
    return devices


def list_devices() -> list[str]:
    """The names that `load_device` knows."""
    return sorted(builtin_devices())


def load_device(name: str) -> Device:
    """A built-in device by name. Raises ProfileError naming the closest one when there is none."""
    devices = builtin_devices()
    if name not in devices:
        raise ProfileError("devices", [f"unknown device '{name}': {closest(name, devices)}"])
    return devices[name]
