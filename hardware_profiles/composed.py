"""Clusters of a kind of device in a few words, where no file describes them: so many GPUs, so many to a machine.

``cluster_from("A100-SXM-80GB", 64, between="4x HDR")`` has the links that such machines usually have; its name,
``64xA100-SXM-80GB/8/nvlink3/4x200gbps``, gives the same cluster again (:func:`hardware_profiles.load_cluster`).
"""

from __future__ import annotations

import math
import re

from .errors import ProfileError
from .load import builtin_devices, builtin_links, load_device
from .model import Device
from .reader import MOST_DEVICES, Document, closest

DEFAULT_BETWEEN = {"pcie3": "ethernet-25", "pcie4": "ib-hdr", "pcie5": "ib-ndr"}
"""Default network between machines, by the machines' PCIe."""
GBIT = 1e9 / 8
"""Bytes per second of a gigabit per second."""
SMALL_ADAPTER = 25.0
"""Gb/s per device below which the devices of a machine are assumed to share one adapter."""
_NAME = re.compile(
    r"(?P<n>[1-9]\d{0,5})x(?P<gpu>[^/]+)/(?P<per_node>[1-9]\d{0,5})(/(?P<inside>[^/]*))?(/(?P<between>[^/]*))?"
)
_ADAPTERS = re.compile(r"(?P<adapters>[1-9]\d{0,3})x(?P<gbits>\d+(\.\d+)?)gbps(-(?P<kind>efa|ethernet))?")
NETWORKS = ("ib-", "ethernet-", "roce-", "efa", "tcpx-", "slingshot-", "dcn")
"""Prefixes of the names of links between machines."""
INFINIBAND = {"edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
"""Gb/s of an adapter."""


def document_named(name: str) -> Document | None:
    """Return the document of a composed cluster name (``64xA100-SXM-80GB/8/nvlink3/4x200gbps``), or None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    n, per_node = int(match["n"]), int(match["per_node"])
    return cluster_document(device_of(match["gpu"]), n, per_node, match["inside"] or "", match["between"] or "", name)


def name_of(gpu: str, n_devices: int, per_node: int | None, inside: str, between: str) -> str:
    """Return the name that composes a cluster from the arguments of :func:`hardware_profiles.cluster_from`."""
    device, where = device_of(gpu), f"{n_devices}x{gpu}"
    for number, what in ((n_devices, "devices"), (1 if per_node is None else per_node, "devices in a machine")):
        if not 1 <= number <= MOST_DEVICES:
            raise ProfileError(where, [f"{number} {what}, give 1 to {MOST_DEVICES}"])
    if "nvl72" in inside.lower() and (per_node or 0) < 72:  # of rows that count the trays of a rack as machines
        per_node = None
    per_node = min(per_node or _usual_machine(device, n_devices), n_devices)
    parts = [f"{n_devices}x{device.name}", str(per_node), _link_named(device, inside, where) if per_node > 1 else ""]
    if n_devices > per_node:
        parts.append(_network_named(between or DEFAULT_BETWEEN.get(device.host_link, "ib-ndr"), per_node, where))
    return "/".join(parts).rstrip("/")


def device_of(gpu: str) -> Device:
    """Return a device by its name in any spelling: ``a100-sxm-80gb``, ``T4-16GB``, ``H100``."""
    known = {name.lower(): name for name in builtin_devices()}
    text = gpu.strip().lower().replace(" ", "-")
    found = known.get(text) or known.get(re.sub(r"-\d+gb$", "", text))
    return load_device(found or gpu)


def _usual_machine(device: Device, n_devices: int) -> int:
    """Return the devices per machine: the domain, 8 without one; fewer where there are fewer.

    Domains that do not divide the devices are filled equally: 128 of an NVL72 are two times 64.
    """
    domain = device.domain if device.domain > 2 else 8
    if n_devices <= domain:
        return n_devices
    nodes = math.ceil(n_devices / domain)
    while n_devices % nodes:
        nodes += 1
    return n_devices // nodes


def cluster_document(device: Device, n: int, per_node: int, inside: str, between: str, where: str) -> Document:
    """Return the document of a cluster, as :func:`hardware_profiles.build_cluster` reads it."""
    if not 1 <= n <= MOST_DEVICES or n % per_node:
        raise ProfileError(where, [f"{n} devices do not fill machines of {per_node}: give a multiple, {MOST_DEVICES:,} "
                                   "at most"])  # fmt: skip
    node: Document = {"device": device.name, "n_devices": per_node, "count": n // per_node}
    if per_node > 1:
        node |= _wiring(device, per_node, _link_named(device, inside, where))
    if n > per_node or between:
        network = between or DEFAULT_BETWEEN.get(device.host_link, "ib-ndr")
        node["uplink"] = _uplink(_network_named(network, per_node, where), per_node)
    return {"node": [node], "description": f"{per_node} {device.name} in a machine, composed from its name"}


def _link_named(device: Device, inside: str, where: str) -> str:
    """Return the name of the link in a machine, from its name or published words (``PCIe Gen3``)."""
    text = inside.strip().lower()
    if not text:
        return device.link or device.host_link or "pcie4"
    if text in builtin_links() and not text.startswith(NETWORKS):
        return text
    if "nvlink" in text and device.link.startswith("nvlink"):
        generation = re.search(r"nvlink-?(\d)", text)
        if generation is None or f"nvlink{generation[1]}" in device.link:
            return device.link
    if (match := re.search(r"pcie\D*([345])", text)) and "nvlink" not in text:
        return f"pcie{match[1]}"
    within = [link for link in builtin_links() if not link.startswith(NETWORKS)]
    raise ProfileError(where, [f"'{inside}' names no link inside a machine of {device.name} (which stands before that "
                               f"between machines): {closest(text, within)}"])  # fmt: skip


def _wiring(device: Device, per_node: int, link: str) -> Document:
    """Return the keys of a node: its switches, pairs or torus."""
    if link.startswith("pcie") or device.domain == 2:
        host = link if link.startswith("pcie") else device.host_link
        levels = [(2, host), (4, f"{host}-socket"), (8, f"{host}-host")]
        wide = [(size, name) for size, name in levels if size < per_node and per_node % size == 0]
        wide.append((per_node, next((name for size, name in levels if size >= per_node), f"{host}-host")))
        bridges = {} if link.startswith("pcie") or per_node % 2 else {"pairs": {"link": link, "of": 2}}
        return {"level": [{"devices": size, "link": name} for size, name in wide], **bridges}
    if link.startswith("xgmi"):
        return {"pairs": {"link": link}}
    if link.startswith(("ici", "neuronlink")):
        return {"torus": {"shape": _torus(per_node, 3 if link in ("ici-v4", "ici-v5p") else 2), "link": link}}
    return {"level": [{"devices": per_node, "link": link}]}


def _torus(n: int, axes: int) -> list[int]:
    """Return sizes, as equal as possible, with the product ``n``."""
    sizes = []
    for left in range(axes, 0, -1):
        size = next(s for s in range(max(1, round(n ** (1 / left))), 0, -1) if n % s == 0)
        sizes.append(size if left > 1 else n)
        n //= sizes[-1]
    return sizes


def _network_named(between: str, per_node: int, where: str) -> str:
    """Return the name of a machine's network: a link per device, or ``4x200gbps``, ``1x50gbps-ethernet``.

    Words: ``4x HDR``, ``400Gb/s per node``, ``RoCE 1600Gb/s per node``, ``EFA``, ``50Gb/s Ethernet``, each with the
    rate of the whole machine. Of ``10-50Gb/s`` the larger is meant.
    """
    text = between.strip().lower()
    if text in builtin_links() or _ADAPTERS.fullmatch(text):
        return text
    kind = next((word for word in INFINIBAND if word in text), "")
    adapters = next((int(n) for n in re.findall(rf"\b(\d+)\s*x\s*(?:{kind})" if kind else r"(?!)", text)), 0)
    rates = [float(n) for n in re.findall(r"(\d+(?:\.\d+)?)\s*gb(?:it)?/?p?s", text)]
    if rates:
        gbits = max(rates)
    elif kind:
        gbits = INFINIBAND[kind] * (adapters or per_node)
    elif "efa" in text:
        return "efa"
    else:
        links = closest(text, builtin_links())
        raise ProfileError(where, [f"'{between}' names no network: give its rate for a machine, such as '400Gb/s' or "
                                   f"'4x HDR', or a link for each device ({links})"])  # fmt: skip
    end = "-efa" if "efa" in text else "-ethernet" if "ethernet" in text and "roce" not in text else ""
    if not adapters:
        adapters = per_node if gbits / per_node >= SMALL_ADAPTER else 1
    return f"{adapters}x{gbits / adapters:g}gbps{end}"


def _uplink(network: str, per_node: int) -> Document:
    """Return the uplink of a machine from the name of its network."""
    match = _ADAPTERS.fullmatch(network)
    if match is None:
        return {"link": network, "devices": 1}
    sharing = math.ceil(per_node / int(match["adapters"]))
    bandwidth = int(match["adapters"]) * float(match["gbits"]) * GBIT / math.ceil(per_node / sharing)
    curve = {"efa": "efa", "ethernet": "ethernet"}.get(match["kind"] or "", "infiniband")
    link = {"name": network, "bandwidth_bytes_per_second": bandwidth, "latency_seconds": 2e-6, "curve": curve}
    return {"link": link, "devices": sharing}
