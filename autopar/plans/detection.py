"""Detection of the cluster from the GPU and the machine that every rank reports.

The name describes what was found: ``dgx-h100-x4`` is four machines of eight, ``dgx-h100-4of8-x2`` two machines of which
four GPUs each are used, ``dgx-h100-x2+dgx-a100`` machines of two kinds. Device i of the cluster is rank i, so the ranks
of a machine must follow each other: what is near in the cluster has to be near in fact.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopar.errors import MeshError
from hardware_profiles import Cluster, device_named, list_clusters, load_cluster
from hardware_profiles.strict import parse_json

ACROSS_HOSTS = frozenset({"nvl72-gb200", "nvl72-gb300"})
"""Clusters whose fast links join devices of several hosts."""


class RankRecord(NamedTuple):
    """The hardware of one rank, and its machine.

    Attributes:
        product, memory_bytes: as the GPU's driver gives them.
        on_host: how many ranks its machine has, where the launcher says it (LOCAL_WORLD_SIZE).
    """

    host: str
    product: str
    memory_bytes: float
    on_host: int | None = None


class _Machine(NamedTuple):
    """Ranks of one machine that follow each other, all with the same device."""

    device: str
    ranks: int


def record_here() -> RankRecord:
    """Return the record of this process and its current GPU."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name, memory = torch.cuda.get_device_name(), properties.total_memory
    return RankRecord(socket.gethostname(), name, memory, int(local) if local.isdigit() else None)


def dumps(record: RankRecord) -> str:
    """Return a record as text, for other ranks."""
    return json.dumps(record)


def loads(text: str) -> RankRecord:
    """Return the record that :func:`dumps` wrote."""
    return RankRecord(*parse_json(text))


def hosts_of(records: Sequence[RankRecord]) -> list[list[int]]:
    """Return the ranks of each machine, in order of the ranks.

    Machines that have one name (containers often do) are told apart by how many ranks the launcher puts on each.

    Raises:
        MeshError: the ranks of a machine do not follow each other.
    """
    blocks: list[list[int]] = []
    for rank, record in enumerate(records):
        last = records[blocks[-1][0]] if blocks else None
        full = last is not None and last.on_host is not None and len(blocks[-1]) == last.on_host
        if last is not None and last.host == record.host and not full:
            blocks[-1].append(rank)
        else:
            blocks.append([rank])
    names = [records[block[0]].host for block in blocks]
    for host in dict.fromkeys(names):
        parts = [block for block, name in zip(blocks, names, strict=True) if name == host]
        if len(parts) > 1 and any(len(part) != records[part[0]].on_host for part in parts):
            shown = ", ".join(_span(part) for part in parts[:4]) + (", ..." if len(parts) > 4 else "")
            raise MeshError(
                f"ranks {shown} of the mesh are on machine '{host}' and others are between them, so what is near on "
                "the mesh would be on other machines: number the ranks machine by machine, as torchrun does, and give "
                "a DeviceMesh its ranks in this order"
            )
    return blocks


def cluster_of_ranks(records: Sequence[RankRecord]) -> str:
    """Return the name of the cluster whose devices are those of the ranks, in their order.

    Raises:
        MeshError: a GPU has no profile, or no built-in cluster has it; a machine has GPUs of several kinds, or more
            than the built-in one; or ranks are not ordered by machines.
    """
    machines = []
    for block in hosts_of(records):
        devices = {}
        for rank in block:
            device, reason = device_named(records[rank].product, records[rank].memory_bytes)
            if device is None:
                raise MeshError(f"{reason}; {_ask()}")
            devices[device] = rank
        if len(devices) > 1:
            shown = " and ".join(f"{device} (rank {rank})" for device, rank in devices.items())
            raise MeshError(f"machine '{records[block[0]].host}' has GPUs of several kinds, {shown}; {_ask()}")
        machines.append(_Machine(next(iter(devices)), len(block)))
    return _name_of(machines)


def check_nodes(cluster: Cluster, name: str, records: Sequence[RankRecord]) -> str:
    """Return what differs between the machines of a named cluster and those of the ranks; "" if nothing does."""
    blocks = hosts_of(records)
    for block in blocks:
        nodes = {cluster.node_of[rank] for rank in block if rank < cluster.n_devices}
        if len(nodes) > 1:
            return f"ranks {_span(block)} are on one machine, and on {len(nodes)} of cluster '{name}'"
    for before, after in itertools.pairwise(blocks):
        if after[0] < cluster.n_devices and cluster.node_of[before[-1]] == cluster.node_of[after[0]]:
            if name.split("-x")[0] not in ACROSS_HOSTS:
                return (
                    f"ranks {before[-1]} and {after[0]} are on machines '{records[before[-1]].host}' and "
                    f"'{records[after[0]].host}', and on one of cluster '{name}'"
                )
    return ""


def _name_of(machines: Sequence[_Machine]) -> str:
    parts: list[tuple[str, int, int, int]] = []  # name, devices of one machine, of the built-in one, machines
    for machine in machines:
        name = _builtin_of(machine.device)
        size = load_cluster(name).n_devices
        across = name in ACROSS_HOSTS
        if machine.ranks > size:
            raise MeshError(
                f"{machine.ranks} ranks with {machine.device} are on one machine, and those of cluster '{name}' have "
                f"{size}; {_ask()}"
            )
        if parts and parts[-1][0] == name and (across or parts[-1][1] == machine.ranks):
            last = parts.pop()
            grown = (name, last[1] + machine.ranks, size, 1) if across else (*last[:3], last[3] + 1)
            parts.append(grown)
        else:
            parts.append((name, machine.ranks, size, 1))
    alone = len(parts) == 1
    return "+".join(_text(*part, alone=alone) for part in parts)


def _text(name: str, ranks: int, size: int, machines: int, alone: bool) -> str:
    if alone and machines == 1 and ranks <= size:
        return name  # a part of one machine
    if name in ACROSS_HOSTS and ranks > size:
        machines, ranks = -(-ranks // size), size
    some = "" if ranks == size else f"-{ranks}of{size}"
    return f"{name}{some}" + (f"-x{machines}" if machines > 1 else "")


def _builtin_of(device: str) -> str:
    fitting = [name for name in list_clusters() if {d.name for d in load_cluster(name).devices} == {device}]
    if not fitting:
        raise MeshError(f"no built-in cluster is of {device}; {_ask()}")
    return min(fitting, key=lambda each: (not each.startswith("dgx"), each))


def _ask() -> str:
    return (
        f"pass cluster= with a name ({', '.join(list_clusters())}) or the path of a file that describes these machines "
        "and what joins them ('autopar clusters new' writes one)"
    )


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
