"""Rates of small sizes: what devices reach where they stream weights and caches for few rows. From small_rates.toml.

Curves of products (:mod:`.model`) are fitted to products of a thousand rows and more. A decode step has a few rows: it
streams weights and caches from memory, and its collectives are a few kilobytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path

from .model import Device
from .reader import ProfileErrors, Table, read_document

GENERAL = "general"
"""The table for devices that no other names."""
_FILE = Path(__file__).parent / "data" / "small_rates.toml"


@dataclass(frozen=True)
class SmallRates:
    """Rates of one family of devices.

    Attributes:
        name: the family.
        devices: names of its devices; empty for all that no other family names.
        weight_fraction: part of the memory's bandwidth that streaming the weight of a thin product reaches.
        narrow_fraction: the same of weights of less than 8 bits, which cores unpack.
        cache_fraction: part that reading the cache in decode attention reaches.
        compute_fraction: part of the curve of products that a product inside a step keeps: between others, not alone.
        grouped_fraction: part that products of many experts in one kernel keep of that again.
        grouped_half: what such products add to the half sizes ``n`` and ``k`` of the curve: tiles of narrow experts are
            filled in part.
        join: exponent p of ``(memory^p + compute^p)^(1/p)``: large for a corner, 1 for the sum.
        widening: seconds of computing with 4-bit weights that are widened to 16 bits, over those of 16-bit weights.
        kernel_seconds: seconds of a kernel in a graph beside its work: start, end, and the gap to the next.
        attention_seconds: least seconds of decode attention, with the kernel that joins its parts (split-k).
        push_seconds: seconds of an all-reduce in one kernel, in which each device reads all others' buffers.
        push_step_seconds: what each device of the group adds to them.
        push_fraction: part of a link's bandwidth that such a kernel reaches.
        push_bytes: largest buffer that an engine adds in this way even where the library is faster.
        source: where the numbers come from.
    """

    name: str
    devices: tuple[str, ...] = ()
    weight_fraction: float = 0.8
    narrow_fraction: float = 0.58
    cache_fraction: float = 0.7
    compute_fraction: float = 0.8
    grouped_fraction: float = 0.6
    grouped_half: float = 0.0
    join: float = 3.0
    widening: float = 1.4
    kernel_seconds: float = 2e-6
    attention_seconds: float = 5e-6
    push_seconds: float = 4e-6
    push_step_seconds: float = 4e-7
    push_fraction: float = 0.4
    push_bytes: float = 2.2e6
    source: str = ""


@functools.cache
def small_rates() -> dict[str, SmallRates]:
    """Return all families by name."""
    failures = ProfileErrors("data/small_rates.toml")
    root = Table(read_document(_FILE), "", failures)
    found = {name: _read(name, root.table(name)) for name in root.data}
    failures.raise_if_any()
    return found


def _read(name: str, table: Table) -> SmallRates:
    values: dict[str, object] = {}
    for each in fields(SmallRates):
        if each.name == "name" or not table.has(each.name):
            continue
        if each.name == "devices":
            values[each.name] = tuple(name.strip() for name in table.text(each.name).split(","))
        elif each.name == "source":
            values[each.name] = table.text(each.name)
        else:
            values[each.name] = table.number(each.name)
    table.close()
    return SmallRates(name, **values)  # type: ignore[arg-type]


@functools.cache
def small_rates_of(device: Device) -> SmallRates:
    """Return the rates of a device's family, or the general ones."""
    for rates in small_rates().values():
        if device.name in rates.devices:
            return rates
    return small_rates()[GENERAL]
