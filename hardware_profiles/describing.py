"""Files of one's own clusters, from a few words: the device, how many to a machine, machines, links."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .composed import cluster_document, device_of, name_of
from .errors import ProfileError
from .load import builtin_devices, efficiency_families
from .model import RATES, Device
from .reader import Document, closest

LAUNCH_SECONDS = 8e-6
"""Seconds of the host per operator, where nothing else is known: torch in eager mode on a fast host."""
INSIDE_SECONDS = 5e-7
"""Latency of a link inside a machine of which only the rate is known: that of NVLink 3."""
GROUPS = ("devices", "links")


@dataclass(frozen=True)
class NewDevice:
    """A device that no list has, by its data sheet.

    Attributes:
        memory_bytes, memory_bytes_per_second: of its memory.
        peak_flops: dense FLOP/s by format (``bfloat16``, ``float32``, ...).
        family: the family of data/efficiency.toml whose cores are most like its own.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    peak_flops: Mapping[str, float]
    family: str

    def check(self) -> None:
        """Refuse a name, a format or a family that cannot be.

        Raises:
            ProfileError: with all that is wrong.
        """
        wrong = []
        if not re.fullmatch(r"[\w.+-]{1,60}", self.name):
            wrong.append(f"the device's name is {self.name!r}: use letters, digits, '-', '.', '_' and '+'")
        if self.name in builtin_devices():
            wrong.append(f"'{self.name}' is a known device: leave out its numbers, or give it another name")
        wrong += [f"'{dtype}' is no format with a rate: {closest(dtype, RATES)}" for dtype in self.peak_flops
                  if dtype not in RATES]  # fmt: skip
        if not self.peak_flops:
            wrong.append("no rate is given: give at least one, such as bfloat16=989 TFLOP/s")
        if self.family not in efficiency_families():
            wrong.append(f"'{self.family}' is no family of devices: {closest(self.family, efficiency_families())}")
        if wrong:
            raise ProfileError("new device", wrong)

    @property
    def document(self) -> Document:
        """The table ``[devices.NAME]`` of a cluster file."""
        return {
            "memory_bytes": self.memory_bytes, "memory_bytes_per_second": self.memory_bytes_per_second,
            "peak_flops": dict(self.peak_flops), "launch_seconds": LAUNCH_SECONDS, "efficiency": self.family,
        }  # fmt: skip


def described_cluster(
    name: str, gpu: str | NewDevice, per_node: int, nodes: int, inside: str = "", between: str = ""
) -> Document:
    """Return the document of a cluster file, which :func:`hardware_profiles.build_cluster` reads.

    Args:
        name: the cluster's name.
        gpu: a known device, in any spelling, or a new one.
        per_node, nodes: devices of a machine, machines.
        inside: the link in a machine as for :func:`hardware_profiles.cluster_from`, or its rate in one direction, such
            as ``300GB/s``; empty: the device's own, PCIe 4 of a new one.
        between: the network as for :func:`hardware_profiles.cluster_from`, such as ``1x200gbps``, ``ib-hdr``.

    Raises:
        ProfileError: a name or number makes no sense.
    """
    if isinstance(gpu, NewDevice):
        gpu.check()
        device = _device(gpu)
    else:
        device = device_of(gpu)
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB/s", inside.strip(), re.IGNORECASE)
    inside = "" if rate else inside
    if not isinstance(gpu, NewDevice):
        name_of(device.name, per_node * nodes, per_node, inside, between)  # checks the numbers
    document = cluster_document(device, per_node * nodes, per_node, inside, between, name)
    node = document["node"][0]
    if rate and per_node > 1:
        for key in ("pairs", "torus"):
            node.pop(key, None)
        link = {"name": "inside", "bandwidth_bytes_per_second": float(rate[1]) * 1e9,
                "latency_seconds": INSIDE_SECONDS, "curve": "nvlink3"}  # fmt: skip
        node["level"] = [{"devices": per_node, "link": link}]
    if nodes == 1:
        node.pop("uplink", None)
    said = f"{nodes} machine{'s' * (nodes > 1)} of {per_node} {device.name}"
    described: Document = {"name": name, "description": said}
    if isinstance(gpu, NewDevice):
        described["devices"] = {gpu.name: gpu.document}
    return {**described, "node": [node]}


def _device(new: NewDevice) -> Device:
    """Return a new device without curves, for its wiring alone."""
    return Device(
        new.name, new.memory_bytes, new.memory_bytes_per_second, new.peak_flops, LAUNCH_SECONDS, {},
        domain=8, host_link="pcie4",
    )  # fmt: skip


def adapters_of(between: str, adapters: int, per_node: int) -> str:
    """Return the name of a machine's network of so many adapters, each with a rate such as ``200Gb/s`` or ``HDR``.

    Raises:
        ProfileError: the text has no rate.
    """
    named = {"edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
    text = between.strip().lower()
    match = re.search(r"(\d+(?:\.\d+)?)\s*(?:gb(?:it)?/?p?s)", text)
    gbits = float(match[1]) if match else next((rate for word, rate in named.items() if word in text), 0.0)
    if not gbits:
        raise ProfileError("network", [f"'{between}' has no rate: give that of one adapter, such as 200Gb/s or HDR"])
    kind = "-efa" if "efa" in text else "-ethernet" if "ethernet" in text and "roce" not in text else ""
    if adapters > per_node:
        raise ProfileError("network", [f"{adapters} adapters for {per_node} devices: give at most one per device"])
    return f"{adapters}x{gbits:g}gbps{kind}"


def network_words(network: str, per_node: int) -> str:
    """Return a machine's network (:func:`adapters_of`) in words: ``one 200 Gb/s adapter for its 8 devices``."""
    match = re.match(r"(\d+)x([\d.]+)gbps", network)
    assert match is not None
    n = int(match[1])
    share = "for each device" if n == per_node else f"for its {per_node} devices"
    return f"{'one' if n in (1, per_node) else n} {match[2]} Gb/s adapter{'s' * (1 < n < per_node)} {share}"


def toml_of(document: Document) -> str:
    """Return a cluster document as TOML: plain keys, ``[devices.NAME]``, ``[[node]]``."""
    lines = [f"{key} = {_value(value)}" for key, value in document.items() if not isinstance(value, (dict, list))]
    for group in GROUPS:
        for name, table in document.get(group, {}).items():
            lines += ["", f"[{group}.{json.dumps(name)}]", *(f"{key} = {_value(v)}" for key, v in table.items())]
    for node in document["node"]:
        lines += ["", "[[node]]", *(f"{key} = {_value(value)}" for key, value in node.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """Return a value in one line of TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value)
