"""Seconds of collectives of a step: a few kilobytes in decodes, many megabytes in prefills.

Among devices that reach each other's memory an engine adds small buffers in one kernel, in which each device reads all
others (one-shot); larger ones, and all other collectives, are the library's (NCCL, with NVLS where switches add up):

    one-shot    start + step n + (n - 1) bytes / (link * fraction)      up to ``push_bytes``
    library     by the curves of the links
"""

from __future__ import annotations

import weakref

from cost_models.collective_cost import AxisCost
from cost_models.mesh_links import mesh_axes
from hardware_profiles import Cluster, Device
from hardware_profiles.small_rates import SmallRates

from .work import StepExchange

LIBRARY_NAMES = {"send": "send_recv"}
"""Kinds that the library's prices name otherwise."""

_axes: weakref.WeakKeyDictionary[Cluster, dict[tuple[int, int], AxisCost]] = weakref.WeakKeyDictionary()
_links: weakref.WeakKeyDictionary[Cluster, float] = weakref.WeakKeyDictionary()


def axis_of(cluster: Cluster, group: int, stride: int) -> AxisCost:
    """Return the price of the library's collectives in a group whose neighbours are ``stride`` ranks apart.

    Raises:
        ValueError: the group does not fit the cluster.
    """
    known = _axes.setdefault(cluster, {})
    if (group, stride) not in known:
        known[group, stride] = mesh_axes(cluster, {"group": group, "inner": stride})["group"]
    return known[group, stride]


def link_bytes_per_second(cluster: Cluster) -> float:
    """Return the bandwidth of the fastest link that leaves the first device; 0 where it has none."""
    if cluster not in _links:
        edges = cluster.graph.out_edges(0, data="link") if 0 in cluster.graph else ()
        _links[cluster] = max((link.bandwidth_bytes_per_second for _, _, link in edges), default=0.0)
    return _links[cluster]


def exchange_seconds(
    cluster: Cluster, device: Device, small: SmallRates, exchange: StepExchange, n_bytes: float, *, pushes: bool
) -> float:
    """Return the seconds of one collective or message.

    Args:
        cluster: where it runs.
        device: one of the devices in the group.
        small: rates of small sizes of the device.
        exchange: kind, group and stride.
        n_bytes: size of the whole tensor.
        pushes: small all-reduces may run in one kernel.
    """
    kind = LIBRARY_NAMES.get(exchange.kind, exchange.kind)
    group = 2 if exchange.kind == "send" else exchange.group
    if group <= 1 or n_bytes <= 0:
        return 0.0
    seconds = axis_of(cluster, group, exchange.stride).seconds(kind, n_bytes)
    reach = (group - 1) * exchange.stride + 1
    link = link_bytes_per_second(cluster)
    if not (pushes and kind == "all_reduce" and link and reach <= min(device.domain, _machine(cluster))):
        return seconds
    read = (group - 1) * n_bytes / (link * small.push_fraction)
    pushed = small.push_seconds + small.push_step_seconds * group + read
    return pushed if n_bytes <= small.push_bytes else min(seconds, pushed)


def _machine(cluster: Cluster) -> int:
    """Return the devices in the machine of the first rank."""
    return cluster.node_of.count(cluster.node_of[0])
