"""Answers of ``devices``, ``clusters`` and ``clusters new``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from autopar.cli.schemas.registry import answer


@dataclass(frozen=True, kw_only=True)
class DeviceEntry:
    """A device that cluster files can name."""

    name: Annotated[str, "its name"]
    memory_bytes: Annotated[float, "bytes by the data sheet"]
    memory_bytes_per_second: Annotated[float, "bandwidth of its memory"]
    peak_flops: Annotated[dict[str, float], "operations per second of dense products, by format"]
    launch_seconds: Annotated[float, "seconds to start a kernel"]
    usable_bytes: Annotated[float | None, "bytes that a process can allocate, where measured"]
    power_watts: Annotated[float | None, "power of the board"]
    link: Annotated[str | None, "the link to other devices of its domain"]
    domain: Annotated[int, "devices that the link joins"]
    host_link: Annotated[str | None, "the link to its host"]
    sources: Annotated[dict[str, str], "the source of each number"]


@answer("devices", "autopar devices")
@dataclass(frozen=True, kw_only=True)
class DevicesAnswer:
    """All devices that cluster files can name."""

    devices: list[DeviceEntry]


@dataclass(frozen=True, kw_only=True)
class ClusterEntry:
    """A cluster."""

    name: Annotated[str, "its name, or that of its file"]
    devices: Annotated[int, "number of devices"]
    nodes: Annotated[int, "number of machines"]
    kinds: Annotated[dict[str, int], "number of devices by kind"]
    description: Annotated[str, "one sentence"]


@answer("clusters", "autopar clusters", "autopar clusters list")
@dataclass(frozen=True, kw_only=True)
class ClustersAnswer:
    """The built-in clusters, or the named ones."""

    clusters: list[ClusterEntry]


@answer("new-cluster", "autopar clusters new")
@dataclass(frozen=True, kw_only=True)
class NewClusterAnswer:
    """The description of one's own cluster."""

    file: Annotated[str | None, "path of the written file; null without -o"]
    document: Annotated[dict[str, Any], "contents of the file"]
    devices: Annotated[int, "number of devices"]
    nodes: Annotated[int, "number of machines"]
    network: Annotated[str | None, "the link between machines; null for one machine"]
