"""Clusters of published runs, from the GPU, the numbers of GPUs, and the links that a row names."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from hardware_profiles import Cluster, ProfileError, list_devices
from hardware_profiles.clusters import build_cluster
from published.rows import Run, UnpricedError

NVLINK = {
    "V100": 2, "A100": 3, "A800": 3, "H100": 4, "H200": 4, "H800": 4, "GH200": 4, "B200": 5, "B300": 5, "GB200": 5,
    "GB300": 5,
}  # fmt: skip
ADAPTER = {
    "V100": "ib-edr", "A100": "ib-hdr", "A800": "ib-hdr", "B300": "ib-xdr", "GB300": "ib-xdr", "T4": "ethernet-25",
    "L4": "ethernet-100", "L40S": "roce-100",
}  # fmt: skip
"""The adapter of each GPU in NVIDIA's own systems, where a row names none; of those that are not here 400 Gb/s."""
DOMAIN = 72
"""GPUs of an NVL72 rack."""


def device_of(gpu: str) -> str:
    """The device of the profiles that a published name means.

    Raises:
        UnpricedError: there is none.
    """
    if "mixed" in gpu:
        raise UnpricedError(f"machines of several kinds, and which is where is not in the row: {gpu}")
    plain = _plain(gpu)
    names = {_plain(name): name for name in list_devices()}
    if plain in names:
        return names[plain]
    for ending in ("sxm380gb", "sxm332gb"):
        if plain.endswith(ending):
            plain = plain.replace("sxm3", "sxm2")
    if plain in names:
        return names[plain]
    near = [short for short in names if plain.startswith(short) or short.startswith(plain)]
    if near:
        return names[max(near, key=lambda short: (plain.startswith(short), -len(short)))]
    raise UnpricedError(f"unknown GPU {gpu or '(none)'}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", ""))


def _kind(device: str) -> str:
    return device.split("-")[0]


def cluster_of(run: Run) -> Cluster:
    """The cluster of a run, on which its software trains.

    Raises:
        UnpricedError: the GPU is unknown, or the GPUs do not fill machines.
    """
    device = device_of(run.gpu)
    kind = _kind(device)
    per_node = run.per_node or (4 if kind.startswith("GB") else 8)
    try:
        return _cluster(device, run.n_gpus, per_node, run.intra, run.inter, run.software)
    except ProfileError as error:
        raise UnpricedError(f"no cluster: {' '.join(str(error).split())[:200]}") from None


@cache
def _cluster(device: str, n: int, per_node: int, intra: str, inter: str, software: str) -> Cluster:
    from dataclasses import replace

    from hardware_profiles.software import AS, software_named

    kind, size = _kind(device), per_node
    if kind.startswith("GB") or "NVL72" in intra:  # one NVLink domain over many machines
        most = min(DOMAIN, n)
        size = next(d for d in range(most, 0, -1) if n % d == 0)
    size = min(size, n)
    if n % size:
        raise UnpricedError(f"{n} GPUs do not fill machines of {size}")
    levels = _levels(kind, size, intra)
    node: dict[str, Any] = {"device": device, "n_devices": size, "count": n // size, "level": levels}
    if n > size:
        node["uplink"] = {"link": _uplink(kind, per_node, inter), "devices": 1}
    name = f"{n} {device} by {size}"
    built = build_cluster({"node": [node]}, name, default_name=name)
    record = software_named(software)
    return replace(built, name=f"{name}{AS}{software}", software=record)


def _levels(kind: str, size: int, intra: str) -> list[dict[str, Any]]:
    """How the GPUs of a machine reach each other."""
    text = intra.lower()
    generation = re.search(r"nvlink(\d)", text)
    pairs = "pcie" in text and "pair" in text
    if ("pcie" in text and "nvlink" not in text) or pairs or (not text and kind not in NVLINK):
        found = re.search(r"gen ?(\d)", text)
        old = {"T4": 3, "V100": 3}.get(kind, 4)
        name = f"pcie{found[1] if found and found[1] in '345' else old}"
        if kind == "L40S" and name == "pcie4":  # boxes without peer-to-peer
            name = "pcie4-slow"
        first = "nvlink3" if pairs else name
        # where two sockets share the GPUs, half of them are a socket's; a machine of four has one socket
        sizes = [(2, first), (max(2, size // 2), f"{name}-socket"), (size, f"{name}-host")]
        levels: list[dict[str, Any]] = []
        for devices, link in sizes:
            if devices <= size and (not levels or devices > levels[-1]["devices"]) and size % devices == 0:
                levels.append({"devices": devices, "link": link})
        return levels or [{"devices": size, "link": name}]
    number = int(generation[1]) if generation else NVLINK.get(kind, 4)
    if number == 2:
        link: Any = {"bandwidth_bytes_per_second": 150e9, "latency_seconds": 0.5e-6, "curve": "nvlink2"}
    else:
        link = f"nvlink{min(max(number, 3), 5)}"
    return [{"devices": size, "link": link}]


def _uplink(kind: str, per_node: int, inter: str) -> Any:
    """The adapter of one GPU."""
    text = inter.lower()
    if "efa" in text:
        return "efa"
    curve = "ethernet" if "ethernet" in text else "infiniband"
    if match := re.search(r"(?:(\d+)-)?(\d+) ?gb/s", text):
        low, high = float(match[1] or match[2]), float(match[2])
        per = (low * high) ** 0.5 / 8 * 1e9 / per_node
        return {"bandwidth_bytes_per_second": per, "latency_seconds": 10e-6 if curve == "ethernet" else 2e-6,
                "curve": curve}  # fmt: skip
    for word, link in (("hdr", "ib-hdr"), ("ndr", "ib-ndr"), ("xdr", "ib-xdr"), ("edr", "ib-edr")):
        if word in text:
            return link
    return ADAPTER.get(kind, "ib-ndr")


__all__ = ["cluster_of", "device_of"]
