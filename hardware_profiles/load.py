"""Devices, links and curves by name. The built-in data is in `data/`, one TOML file per noun."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .errors import ProfileError
from .host_links import builtin_host_link, read_host_link
from .model import COLLECTIVES, CURVES, OP_KINDS, RATES, CollectiveCurve, Device, EfficiencyCurve, Link
from .reader import ProfileErrors, Table, closest, read_document
from .strict import shortened

DATA = Path(__file__).parent / "data"


class Efficiency(NamedTuple):
    """Properties common to devices with the same cores: curves by name, and the minimum seconds of a kernel.

    The minimum is None if the processor that launches computes.
    """

    curves: Mapping[str, EfficiencyCurve]
    kernel_seconds: float | None


@functools.cache
def efficiency_families() -> dict[str, Efficiency]:
    """Return the families of data/efficiency.toml by name."""
    failures = ProfileErrors("data/efficiency.toml")
    root = Table(read_document(DATA / "efficiency.toml"), "", failures)
    families = {name: read_efficiency(root.table(name)) for name in root.data}
    failures.raise_if_any()
    return families


def read_efficiency(table: Table) -> Efficiency:
    """Read one table of curves by name; OP_KINDS are required, other CURVES and `kernel_seconds` optional."""
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
    """Read one device table. `efficiency` is the name of a family or a table of curves."""
    failures = table.failures
    family = table.take("efficiency", expected="the name of a family of data/efficiency.toml, or a table of curves")
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
    host_link = table.text("host_link", "")
    host = read_host_link(name, table.table("host")) if table.has("host") else builtin_host_link(name, host_link)
    device = Device(
        name,
        table.number("memory_bytes", positive=True),
        table.number("memory_bytes_per_second", positive=True),
        peaks,
        table.number("launch_seconds"),
        efficiency.curves,
        table.texts("sources", {}),
        table.number("power_watts", positive=True) if table.has("power_watts") else None,
        kernel_seconds=efficiency.kernel_seconds,
        link=table.text("link", ""),
        domain=table.integer("domain", 1),
        host_link=host_link,
        host=host,
    )
    table.close()
    return device


def read_link(name: str, table: Table, known_curves: Mapping[str, object]) -> Link:
    """Read one link table."""
    sources = table.texts("sources", {})
    link = Link(
        name,
        table.number("bandwidth_bytes_per_second", positive=True),
        table.number("latency_seconds"),
        table.text("curve"),
        "; ".join(f"{key}: {text}" for key, text in sources.items()),
        table.flag("sums", False),
    )
    if link.curve and link.curve not in known_curves:
        hint = closest(link.curve, known_curves)
        table.failures.add(f"{table.path}.curve", f"got unknown curve '{link.curve}': {hint}")
    table.close()
    return link


def read_curves(table: Table) -> dict[str, CollectiveCurve]:
    """Read the curves of a kind of link. `broadcast` and `send_recv` default to that of all_gather."""
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
            inner.number("inside_step_seconds", 0.0),
            inner.number("ring_step_seconds", 0.0),
            inner.number("tree_fraction", 1.0, positive=True),
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
    """Return data/collectives.toml and the local machine's curves: name -> collective -> curve."""
    curves: dict[str, dict[str, CollectiveCurve]] = {}
    for path in [DATA / "collectives.toml", *sorted((DATA.parent / "measured").glob("curves_*.toml"))]:
        failures = ProfileErrors(path.name)
        root = Table(read_document(path), "", failures)
        curves.update({name: read_curves(root.table(name)) for name in root.data})
        failures.raise_if_any()
    return curves


@functools.cache
def builtin_links() -> dict[str, Link]:
    """Return the links of data/links.toml by name."""
    failures = ProfileErrors("data/links.toml")
    root = Table(read_document(DATA / "links.toml"), "", failures)
    links = {name: read_link(name, root.table(name), builtin_curves()) for name in root.data}
    failures.raise_if_any()
    return links


@functools.cache
def builtin_devices() -> dict[str, Device]:
    """Return the devices of data/devices.toml and the measured local core, by name."""
    devices: dict[str, Device] = {}
    for path in [DATA / "devices.toml", *sorted((DATA.parent / "measured").glob("devices_*.toml"))]:
        failures = ProfileErrors(path.name)
        root = Table(read_document(path), "", failures)
        devices.update({name: read_device(name, root.table(name)) for name in root.data})
        failures.raise_if_any()
    return devices


def list_devices() -> list[str]:
    """Return the names that `load_device` knows."""
    return sorted(builtin_devices())


def load_device(name: str) -> Device:
    """Return a built-in device by name.

    Raises:
        ProfileError: there is none; it names the closest one, or what a file must say.
    """
    devices = builtin_devices()
    if name not in devices:
        raise ProfileError("devices", [unknown_device(name, devices)])
    return devices[name]


def unknown_device(name: str, known: Mapping[str, Device]) -> str:
    """Return a message about an unknown device: names that are close, or how a file describes a new one.

    Close is a name that shares the word of a chip (``H100``) or differs by a sign: ``TPU-v7`` is not a mistyped
    ``TPU-v4``, and a ``B100`` is no B300.
    """
    if hint := near_names(name, known):
        return f"unknown device '{shortened(name)}': {hint} For another one, {DESCRIBE}"
    return f"unknown device '{shortened(name)}', and none has a name like it: {NEW_DEVICE}"


def near_names(name: str, known: Iterable[str], cutoff: float | None = None) -> str:
    """Return ``did you mean ...?`` with the names that are close (:func:`unknown_device`); empty if none is."""
    low = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), low, n=1, cutoff=cutoff or CLOSE_NAME)
    near = {low[each] for each in close if not _is_another_product(name, each)}
    near = near or {each for each in low.values() if _chips(name) & _chips(each)}
    near |= {each for each in low.values() if name and each.lower().startswith(name.lower())}
    one_of = "" if len(near) == 1 else "one of "
    listed = f"'{min(near)}'" if len(near) == 1 else ", ".join(sorted(near)[:MOST_NAMES])
    return f"did you mean {one_of}{listed}?" if near else ""


def _is_another_product(name: str, known: str) -> bool:
    """Return whether two names are those of two products: a ``dgx-b400`` is no mistyped ``dgx-b300``.

    They have another digit or another letter; a character more or less, or a letter for a digit, is mistyped.
    """
    words, others = (re.findall(r"[a-z]+\d+", each.lower()) for each in (name, known))
    pairs = [(a, b) for a, b in zip(words, others) if a != b and len(a) == len(b)]
    return any(all(x.isdigit() == y.isdigit() for x, y in zip(a, b)) for a, b in pairs)


def _chips(name: str) -> set[str]:
    """Return the words of a device's name that identify the chip: those with a digit that are no memory size."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    digits = {word for word in words if any(c.isdigit() for c in word)}
    return {word for word in digits if not re.fullmatch(r"v?\d+|\d+gb|v\d[a-z]", word)}


CLOSE_NAME = 0.9
"""Least similarity of a mistyped device name."""
MOST_NAMES = 6
DESCRIBE = "'autopar clusters new' writes a cluster file for any device and network"
NEW_DEVICE = """describe it ('autopar clusters new' asks for its numbers) in a .toml file, in SI units:
    [devices.NAME]
    memory_bytes = 80e9                  # and its rate:
    memory_bytes_per_second = 3.35e12
    peak_flops = { bfloat16 = 989e12, float32 = 67e12 }   # dense, by type
    launch_seconds = 4e-6
    efficiency = "hopper"                # the nearest family of data/efficiency.toml, or curves
    [[node]]
    device = "NAME"
    n_devices = 8
    level = [{ devices = 8, link = "nvlink4" }]            # a link of data/links.toml, or a table with its rate
    uplink = { link = "ib-ndr" }                           # where there are several machines
  and give the file's path as the cluster; autopar profile measures a model's ops on this machine"""
