"""Clusters from files and names. The file format is described in README.md."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path

import networkx as nx

from .abstract import read_abstract
from .composed import document_named, name_of
from .errors import MOST_TOLD, ProfileError, UnknownClusterError
from .load import (
    DATA,
    DESCRIBE,
    NEW_DEVICE,
    builtin_curves,
    builtin_devices,
    builtin_links,
    near_names,
    read_curves,
    read_device,
    read_link,
    unknown_device,
)  # fmt: skip
from .model import Cluster, Device, Link
from .profile_file import is_measured, read_measured
from .reader import MOST_DEVICES, Document, ProfileErrors, Table, closest, read_document, shown
from .software import AS, software_named, split_software
from .strict import Unreadable, is_there, parse_count, shortened

CLOSE_CLUSTER = 0.85
"""Least similarity of a mistyped cluster name."""
CLUSTERS = DATA / "clusters"
LONGEST_NAME = 4096
MOST_WIRES = 8 * MOST_DEVICES
"""Most links inside machines: to switches on every level, and between devices."""


def list_clusters() -> list[str]:
    """Return the built-in clusters. Most also take a suffix `-xN`: N nodes, or N local processes."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load a cluster by built-in name (`dgx-h100`, `dgx-h100-x8`, `local-x4`) or from a .toml or .json file.

    `dgx-h100-4of8-x2` is two machines of which four GPUs each are used, `dgx-h100-x2+dgx-a100` three machines of two
    kinds on one fabric. ``mixed.toml@0-3,6`` are five of the devices of a cluster, renumbered from 0. ``dgx-h100 as
    megatron-2023`` is a cluster on which that software trains (:mod:`hardware_profiles.software`). The same name
    returns the same object.

    Raises:
        ProfileError: the name or the file is wrong; it lists every failure found.
    """
    if len(str(name_or_path)) > LONGEST_NAME:
        raise UnknownClusterError(f"unknown cluster '{shortened(str(name_or_path))}': no name or path is so long")
    text, trainer = split_software(str(name_or_path))
    if trainer is not None:
        return _run_by(load_cluster(text), trainer)
    text, ranks = split_subset(text)
    if ranks:
        return load_cluster(text).only(ranks)
    if text.endswith((".toml", ".json")):
        path = Path(text)
        document = read_document(path)
        if is_measured(document):
            return _measured_cluster(document, path)
        return build_cluster(document, str(path), default_name=path.stem)
    return _builtin_cluster(text)


@functools.lru_cache(maxsize=64)
def _run_by(cluster: Cluster, trainer: str) -> Cluster:
    name = f"{cluster.name}{AS}{trainer}"
    return dataclasses.replace(cluster, name=name, software=software_named(trainer))


_SUBSET = re.compile(r"(?P<cluster>.+)@(?P<ranks>\d+(-\d+)?(,\d+(-\d+)?)*)")


def split_subset(name: str) -> tuple[str, tuple[int, ...]]:
    """Split ``mixed.toml@0-1,6`` into the cluster's name and the ranks ``(0, 1, 6)``; no ranks mean all."""
    match = _SUBSET.fullmatch(name)
    if match is None:
        return name, ()
    ranks: list[int] = []
    for part in match["ranks"].split(","):
        first, _, last = part.partition("-")
        try:
            numbers = range(parse_count(first), parse_count(last or first) + 1)
        except Unreadable as error:
            raise ProfileError("clusters", [f"'{shortened(name)}': {error}"]) from None
        if len(ranks) + len(numbers) > MOST_DEVICES:
            raise ProfileError("clusters", [f"'{shortened(name)}': no cluster has ranks {part}"])
        ranks += numbers
    if _SUBSET.fullmatch(match["cluster"]):
        raise ProfileError("clusters", [f"'{shortened(name)}' names ranks twice: write them once"])
    return match["cluster"], tuple(ranks)


def _measured_cluster(document: Mapping[str, object], path: Path) -> Cluster:
    """Return the cluster that a profile file names, renamed, with the measurements."""
    failures = ProfileErrors(str(path))
    root = Table(dict(document), "", failures)
    name = root.text("cluster")
    measured = read_measured(root)
    root.close()
    failures.raise_if_any()
    beside = path.parent / name
    base = load_cluster(beside if name.endswith((".toml", ".json")) and is_there(beside) else name)
    if base.is_profile:
        raise ProfileError(str(path), [f"cluster: '{name}' is a profile itself, name the cluster that it is of"])
    return dataclasses.replace(base, name=path.stem, measured=measured)


def cluster_from(
    gpu: str, n_devices: int, per_node: int | None = None, *, inside: str = "", between: str = ""
) -> Cluster:
    """Return a cluster of one kind of device, with the links that such machines usually have.

    Args:
        gpu: a device of data/devices.toml, in any spelling (``h100-sxm-80gb``, ``T4-16GB``).
        n_devices: in all machines.
        per_node: devices in a machine; the device's domain (8, 72 of an NVL72) if it is not said.
        inside: the link in a machine, by name or in words (``nvlink4``, ``PCIe Gen3``); the device's own where empty.
            Words with ``NVL72`` make one domain of up to 72 devices, whatever ``per_node`` says.
        between: the network, by the name of a link for each device (``ib-ndr``) or in words with the rate of a whole
            machine (``4x HDR``, ``RoCE 1600Gb/s per node``, ``50Gb/s Ethernet``); empty: an adapter for each device of
            the generation of its PCIe.

    Raises:
        ProfileError: a name or number makes no sense.
    """
    return load_cluster(name_of(gpu, n_devices, per_node, inside, between))


_PART = re.compile(r"(?P<stem>.+?)(-(?P<some>[1-9]\d*)of(?P<all>[1-9]\d*))?(-x(?P<copies>[1-9]\d*))?")


@functools.lru_cache(maxsize=64)
def _builtin_cluster(name: str) -> Cluster:
    parts = [document_named(part) or _builtin_document(part) for part in name.split("+")]
    document = parts[0]
    for part in parts[1:]:
        if any(set(each) - {"node", "description", "suffix"} for each in (document, part)):
            raise ProfileError("clusters", [f"'{name}': only clusters of machines on one fabric can be added up"])
        document["node"] += part["node"]
    if len(parts) > 1:
        document["description"] = "machines of several kinds on one fabric"
    return build_cluster(document, f"{name}.toml", default_name=name)


def _builtin_document(name: str) -> Document:
    """Return the document of one kind of machines: `dgx-h100`, `dgx-h100-x8`, `dgx-h100-4of8-x2`."""
    stem, some, copies = name, None, None
    if stem not in list_clusters() and (match := _PART.fullmatch(name)):
        try:
            stem, copies = match["stem"], parse_count(match["copies"] or "0") or None
            some = (parse_count(match["some"]), parse_count(match["all"])) if match["some"] else None
        except Unreadable as error:
            raise ProfileError("clusters", [f"'{shortened(name)}': {error}"]) from None
    if stem not in list_clusters():
        raise UnknownClusterError(f"unknown cluster '{shortened(name)}': {_advice(name, stem)}")
    document = read_document(CLUSTERS / f"{stem}.toml")
    scale = document.get("suffix")
    if copies is not None:
        if scale not in ("nodes", "devices"):
            raise ProfileError("clusters", [f"cluster '{stem}' has no suffix -xN, got '{name}': use '{stem}'"])
        document["node"][0]["count" if scale == "nodes" else "n_devices"] = copies
    if some is not None:
        node = document["node"][0]
        have, size = some
        if scale != "nodes" or node["n_devices"] != size or have > size:
            raise ProfileError("clusters", [f"'{name}': machines of '{stem}' have {node.get('n_devices')} devices"])
        node["n_devices"] = have
        levels = [level for level in node.get("level", []) if level.get("devices", size) >= have or
                  not have % level["devices"]]  # fmt: skip
        for level in levels:
            level["devices"] = min(level.get("devices", size), have)
        node["level"] = [level for i, level in enumerate(levels) if i == 0 or
                         level["devices"] > levels[i - 1]["devices"]]  # fmt: skip
    return document


def _advice(name: str, stem: str) -> str:
    """Return what to write instead of an unknown name."""
    of_devices = re.fullmatch(r"([1-9]\d*)x([^/]+)", name)
    if of_devices and of_devices[2] in builtin_devices():
        return f"give the devices per machine, such as {name}/8"
    if of_devices:
        return unknown_device(of_devices[2], builtin_devices())
    forms = "most also as -xN; 64xH100-SXM-80GB/8 of any device; local-x4 for processes on this machine"
    if near := near_names(stem, list_clusters(), CLOSE_CLUSTER):
        return f"{near} ({forms}; a file ends in .toml or .json; {DESCRIBE})"
    return f"no known name is like it ('autopar clusters' lists them; {forms}); for other hardware, {NEW_DEVICE}"


class _Builder:
    """A collector of devices and edges while a cluster document is read."""

    def __init__(
        self, failures: ProfileErrors, devices: Mapping[str, Device], links: Mapping[str, Link], curves: Mapping
    ):
        self.failures, self.known_devices, self.known_links, self.curves = failures, devices, links, curves
        self.graph = nx.DiGraph()
        self.devices: list[Device] = []
        self.node_of: list[int] = []
        self.n_nodes = 0

    def link(self, table: Table, key: str, default: Link | None = None) -> Link | None:
        """Return a link by name or from an inline table; `default` if the key is absent (None: required)."""
        if default is not None and not table.has(key):
            table.asked.add(key)
            return default
        value = table.take(key, expected="the name of a link, or a table with its numbers")
        if isinstance(value, dict):
            inner = table.table(key)
            return read_link(inner.text("name", "link"), inner, self.curves)
        if value is not None and (not isinstance(value, str) or value not in self.known_links):
            hint = closest(shown(value), self.known_links)
            self.failures.add(f"{table.path}.{key}", f"got unknown link {shown(value)}: {hint}")
        return self.known_links.get(value) if isinstance(value, str) else None

    def both(self, table: Table) -> tuple[Link | None, Link | None]:
        """Return the links of both directions, `link` and `down`, which defaults to the first."""
        up = self.link(table, "link")
        return up, self.link(table, "down", up) if up else None

    def join(self, a: int | str, b: int | str, up: Link | None, down: Link | None) -> None:
        if up is not None:
            self.graph.add_edge(a, b, link=up)
        if down is not None:
            self.graph.add_edge(b, a, link=down)


def _read_node(table: Table, builder: _Builder, alone: bool, uplink_needed: bool) -> None:
    """Read one [[node]] table: `count` machines of one make. A machine that is `alone` needs no uplink."""
    failures, path = builder.failures, table.path
    name, count = table.text("name", "node"), table.integer("count", 1)
    devices = _node_devices(table, builder)
    processors = table.integer("processors", 0, low=0)
    part = min(1.0, processors / len(devices)) if processors and devices else 1.0
    if part < 1.0:  # processes that share cores each get their part
        devices = [_share(device, part) for device in devices]
    levels = _node_levels(table, builder, len(devices), part)
    inner_links = _torus_links(table, builder, len(devices)) + _pair_links(table, builder, len(devices))
    for item in table.tables("link", []):
        ends = item.integer("from", low=0), item.integer("to", low=0)
        if max(ends) >= max(len(devices), 1):
            failures.add(item.path, f"joins devices {ends[0]} and {ends[1]}, the node has {len(devices)}")
        inner_links.append((*ends, *builder.both(item)))
        item.close()
    uplink = None
    if table.has("uplink"):
        inner = table.table("uplink")
        uplink = (*builder.both(inner), inner.integer("devices", 1), inner.text("fabric", "fabric"))
        inner.close()
    elif uplink_needed:
        failures.add(f"{path}.uplink", "is missing, the cluster has several nodes: add [node.uplink] with a link")
    table.close()
    total = len(builder.devices) + count * len(devices)
    wires = count * (len(inner_links) + len(devices) * len(levels))
    for made, most, what in ((total, MOST_DEVICES, "devices"), (wires, MOST_WIRES, "links")):
        if made > most:
            failures.add(f"{path}.count", f"makes {made:,} {what}, expected at most {most:,}: describe a part of it")
            return
    for _ in range(count):
        node, first = f"{name}{builder.n_nodes}", len(builder.devices)
        ranks = list(range(first, first + len(devices)))
        builder.graph.add_nodes_from(ranks)
        builder.devices += devices
        builder.node_of += [builder.n_nodes] * len(devices)
        builder.n_nodes += 1
        children: list[tuple[int, int | str]] = list(enumerate(ranks))  # (local rank of its first device, graph node)
        for number, (size, up, down) in enumerate(levels):
            parents: dict[int, str] = {}
            for local, child in children:
                parent = parents.setdefault(local // size, f"{node}/level{number}.{local // size}")
                builder.join(child, parent, up, down)
            children = [(index * size, parent) for index, parent in parents.items()]
        for a, b, up, down in inner_links:
            builder.join(first + a, first + b, up, down)
        if uplink is not None and not alone:
            up, down, sharing, fabric = uplink
            for local, rank in enumerate(ranks):
                nic = f"{node}/nic{local // sharing}"
                builder.join(rank, nic, up, down)
                builder.join(nic, fabric, up, down)


def _node_devices(table: Table, builder: _Builder) -> list[Device]:
    """Return the devices of a node, without the unknown ones."""
    if table.has("devices"):
        names = table.take("devices")
        if not isinstance(names, list) or not names:
            problem = f"got {shown(names)}, expected a list of device names, one per device"
            builder.failures.add(f"{table.path}.devices", problem)
            names = []
    else:
        names = [table.take("device", expected="the name of a device")] * table.integer("n_devices", 1)
    named = [n if isinstance(n, str) else shown(n) for n in names if n is not None]
    for unknown in sorted({n for n in named if n not in builder.known_devices})[:MOST_TOLD]:
        builder.failures.add(f"{table.path}.device", f"got {unknown_device(unknown, builder.known_devices)}")
    return [builder.known_devices[n] for n in named if n in builder.known_devices]


def _node_levels(
    table: Table, builder: _Builder, n_devices: int, part: float
) -> list[tuple[int, Link | None, Link | None]]:
    """Return ``(devices, link up, link down)`` of each level of switches in a node."""
    levels, below = [], 1
    for level in table.tables("level", []):
        size = level.integer("devices", max(n_devices, 1))
        if size % below:
            problem = f"got {size}, expected a multiple of {below} (the level below it)"
            builder.failures.add(f"{level.path}.devices", problem)
        up, down = builder.both(level)
        crowded = level.text("crowded_curve", "")
        if crowded and crowded not in builder.curves:
            hint = closest(crowded, builder.curves)
            builder.failures.add(f"{level.path}.crowded_curve", f"got unknown curve '{crowded}': {hint}")
        if part < 1.0 and up and down:
            up, down = (_share_link(link, part, crowded) for link in (up, down))
        levels.append((size, up, down))
        level.close()
        below = size
    return levels


_InnerLinks = list[tuple[int, int, Link | None, Link | None]]


def _torus_links(table: Table, builder: _Builder, n_devices: int) -> _InnerLinks:
    """Add the links of ``torus = { shape = [4, 4, 4], link = "ici-v5p" }`` between neighbours along every axis.

    Rings are closed where an axis has more than two devices.
    """
    if not table.has("torus"):
        return []
    inner = table.table("torus")
    shape, link = inner.take("shape", expected="the sizes of its axes"), builder.link(inner, "link")
    inner.close()
    if (
        not isinstance(shape, list)
        or not all(type(size) is int and size > 0 for size in shape)
        or (math.prod(shape) != n_devices)
    ):
        builder.failures.add(f"{inner.path}.shape", f"got {shown(shape)}, expected sizes that make {n_devices} devices")
        return []
    found: _InnerLinks = []
    stride = n_devices
    for size in shape:
        stride //= size
        for device in range(n_devices):
            at = device // stride % size
            if at + 1 < size or size > 2:
                found.append((device, device + ((at + 1) % size - at) * stride, link, link))
    return found


def _pair_links(table: Table, builder: _Builder, n_devices: int) -> _InnerLinks:
    """Add the links of ``pairs = { link = "xgmi3", of = 8 }`` between all devices of each group of ``of`` devices."""
    if not table.has("pairs"):
        return []
    inner = table.table("pairs")
    link, size = builder.link(inner, "link"), inner.integer("of", n_devices, low=2)
    inner.close()
    if n_devices % size:
        builder.failures.add(f"{inner.path}.of", f"got {size}, expected a divisor of {n_devices} devices")
        return []
    return [
        (first + a, first + b, link, link)
        for first in range(0, n_devices, size)
        for a in range(size)
        for b in range(a + 1, size)
    ]


def _share(device: Device, part: float) -> Device:
    """Return the device when it gets only `part` of a core's time."""
    return dataclasses.replace(
        device,
        memory_bytes=device.memory_bytes * part,
        memory_bytes_per_second=device.memory_bytes_per_second * part,
        peak_flops={dtype: rate * part for dtype, rate in device.peak_flops.items()},
        launch_seconds=device.launch_seconds / part,
    )


def _share_link(link: Link, part: float, crowded_curve: str) -> Link:
    """Return a link that cores operate, when each process gets only `part` of a core's time."""
    bandwidth = link.bandwidth_bytes_per_second * part
    return dataclasses.replace(link, bandwidth_bytes_per_second=bandwidth, curve=crowded_curve or link.curve)


def build_cluster(document: Mapping[str, object], where: str, default_name: str = "cluster") -> Cluster:
    """Build a cluster from a document; `where` names it in errors, which are raised as one ProfileError."""
    failures = ProfileErrors(where)
    root = Table(dict(document), "", failures)
    root.text("suffix", "")
    name, description = root.text("name", default_name), root.text("description", "")
    overlap = root.flag("overlap", True)
    if root.has("abstract"):
        cluster = read_abstract(root.table("abstract"), name, description)
        root.close()
        failures.raise_if_any()
        return cluster
    own_curves, own_links, own_devices = (root.table("curves", {}), root.table("links", {}), root.table("devices", {}))
    curves = builtin_curves() | {key: read_curves(own_curves.table(key)) for key in own_curves.data}
    links = builtin_links() | {key: read_link(key, own_links.table(key), curves) for key in own_links.data}
    devices = builtin_devices() | {key: read_device(key, own_devices.table(key)) for key in own_devices.data}
    builder = _Builder(failures, devices, links, curves)

    nodes = root.tables("node")
    extra = root.tables("link", [])
    total = sum(count if isinstance(count := n.data.get("count"), int) else 1 for n in nodes)
    for node in nodes:
        _read_node(node, builder, alone=total == 1, uplink_needed=total > 1 and not extra)
    for item in extra:
        ends = [item.take("from", expected="a rank or a switch"), item.take("to", expected="a rank or a switch")]
        for key, end in zip(("from", "to"), ends, strict=True):
            if isinstance(end, int) and not 0 <= end < len(builder.devices):
                last = len(builder.devices) - 1
                failures.add(f"{item.path}.{key}", f"got rank {end}, the cluster has ranks 0 to {last}")
        up = builder.link(item, "link")
        one_way = item.flag("one_way", False)
        down = builder.link(item, "down", up) if up else None
        if None not in ends:
            builder.join(ends[0], ends[1], up, None if one_way else down)
        item.close()
    root.close()
    failures.raise_if_any()
    if len(builder.devices) > 1 and not nx.is_strongly_connected(builder.graph):
        raise ProfileError(where, ["node: not every device reaches every other one: add a level, link or uplink"])
    return Cluster(
        name, tuple(builder.devices), builder.graph, tuple(builder.node_of), curves, overlap, (), description
    )
