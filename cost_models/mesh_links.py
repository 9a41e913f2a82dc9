"""A mesh on a cluster: for each axis, the links that its collectives cross, and how they share them.

Traffic of one group of n ranks, of which m sit in a node, per byte that a rank sends in a ring (v = (n-1)/n B
for all_gather and reduce_scatter, twice that for all_reduce, B for broadcast):

    inside a node    every member sends v to the next one, or spreads it over its direct links by bandwidth
    between nodes    the node sends v to the next node, v/m through each member (m rings, one per rail)

all_to_all, local buffer b: a member sends (m-1)/n b inside, (n-m)/n b outside. send_recv: member i to member
i+1. All groups of the axis run at once, so their loads add on every link they share, and

    seconds per byte = max over links of load / (bandwidth * fraction * (1 - ramp / ranks in that ring))
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import networkx as nx
import numpy as np

from hardware_profiles import Cluster, Link

from .collective_cost import KINDS, AxisCost, abstract_terms
from .reshard_paths import Edge, reshard_path

MAX_HOPS = 4096  # above this many hops only the traffic of some nodes is followed
SAMPLED_NODES = 6  # of every make, the first ones ...
LAST_NODES = 2  # ... and the last ones, where rings close and chains end
RING_MEMBERS = 8  # up to so many in a node small messages go round the ring; beyond, the depth of a tree is added
LEAST_RING = 2.0  # ranks; a ramp is below 2, so that the rate stays above 0

Loads = dict[str, dict[Edge, list[float]]]  # pattern -> edge -> [load per byte, ranks in the widest ring across it]


def mesh_axes(cluster: Cluster, shape: Mapping[str, int], devices: Sequence[int] | None = None) -> dict[str, AxisCost]:
    """Return the cost of collectives on every axis of a mesh.

    `shape` maps axis names to sizes, row-major: the last axis joins neighbouring ranks. `devices` lists the ranks of a
    submesh in order; by default the first ones of the cluster. A mesh that does not fit raises ValueError.
    """
    for name, size in shape.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis '{name}' has size {size!r}, expected a whole number >= 1")
    wanted = math.prod(shape.values())
    ranks = range(cluster.n_devices) if devices is None else devices
    dims = " x ".join(f"{name}={size}" for name, size in shape.items())
    if wanted > len(ranks):
        owner = f"cluster {cluster.name}" if devices is None else "the list"
        raise ValueError(
            f"mesh {dims} needs {wanted} devices, {owner} has {len(ranks)}: "
            "make an axis smaller or take a larger cluster"
        )
    if devices is not None and len(ranks) != wanted:
        raise ValueError(f"mesh {dims} needs {wanted} devices, the list has {len(ranks)}: pass exactly {wanted}")
    if bad := [r for r in ranks if not 0 <= r < cluster.n_devices] if devices is not None else []:
        raise ValueError(f"cluster {cluster.name} has ranks 0 to {cluster.n_devices - 1}, got {bad}")
    if cluster.abstract:
        return _abstract_axes(cluster, shape)
    grid = np.asarray(list(ranks)[:wanted], dtype=np.int64).reshape(tuple(shape.values()) or (1,))
    axes = {}
    reshard_paths: dict[tuple[int, int], list[Edge]] = {}
    for position, (name, size) in enumerate(shape.items()):
        groups = np.moveaxis(grid, position, -1).reshape(-1, size)
        axes[name] = _axis(cluster, name, groups, reshard_paths)
    return axes


def link_bytes(
    cluster: Cluster, shape: Mapping[str, int], devices: Sequence[int], traffic: Mapping[tuple[str, str], float]
) -> dict[Edge, float]:
    """Return the bytes that collectives on a mesh put on every link, all groups of an axis at once.

    Empty for a cluster that states axes and no links. Of a large mesh only some nodes are followed (see
    `_followed_nodes`). `traffic` has the bytes of all buffers of an axis and a kind of collective, `("tensor",
    "all_reduce")`, each as `AxisCost.seconds` counts them.
    """
    carried: dict[Edge, float] = defaultdict(float)
    if cluster.abstract:
        return carried
    grid = np.asarray(list(devices), dtype=np.int64).reshape(tuple(shape.values()) or (1,))
    reshard_paths: dict[tuple[int, int], list[Edge]] = {}
    for position, (name, size) in enumerate(shape.items()):
        of_axis = {kind: n_bytes for (axis, kind), n_bytes in traffic.items() if axis == name and n_bytes}
        if size == 1 or not of_axis:
            continue
        loads, _, _ = _loads(cluster, np.moveaxis(grid, position, -1).reshape(-1, size), reshard_paths)
        for kind, n_bytes in of_axis.items():
            pattern = kind if kind in ("all_to_all", "send_recv") else "ring"
            for edge, (load, _) in loads[pattern].items():
                carried[edge] += load * n_bytes * _ring_volume(kind, size)
    return carried


def _ring_volume(kind: str, size: int) -> float:
    """Return the bytes a rank of a ring sends per byte of the collective; other patterns count per byte."""
    times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(kind)
    return 1.0 if times is None else times * (size - 1) / size


def _abstract_axes(cluster: Cluster, shape: Mapping[str, int]) -> dict[str, AxisCost]:
    """Return axes of an abstract mesh by name, or by position when all sizes agree in order."""
    by_name = {axis.name: axis for axis in cluster.abstract}
    if [axis.size for axis in cluster.abstract] == list(shape.values()):
        pairs = dict(zip(shape, cluster.abstract, strict=True))
        pairs.update({name: by_name[name] for name in shape if name in by_name and set(shape) == set(by_name)})
    else:
        pairs = {name: by_name[name] for name in shape if name in by_name and by_name[name].size == shape[name]}
    if missing := [name for name in shape if name not in pairs and shape[name] > 1]:
        has = ", ".join(f"{axis.name}={axis.size}" for axis in cluster.abstract)
        requested = ", ".join(f"{name}={shape[name]}" for name in missing)
        raise ValueError(f"abstract cluster {cluster.name} states axes {has}, got {requested}: use its axes and sizes")
    axes = {}
    for name, size in shape.items():
        axis = pairs.get(name)
        terms = dict.fromkeys(KINDS, (0.0, 0.0, 1.0))
        if axis is not None:
            terms = abstract_terms(size, axis.alpha, axis.beta, axis.constants)
        axes[name] = AxisCost(name, size, terms, "abstract")
    return axes


def _axis(cluster: Cluster, name: str, groups: np.ndarray, reshard_paths: dict) -> AxisCost:
    """Return the cost of an axis whose groups of ranks are [group, member]."""
    size = groups.shape[1]
    if size == 1:
        return AxisCost(name, 1, dict.fromkeys(KINDS, (0.0, 0.0, 1.0)), "")
    loads, members, nodes = _loads(cluster, groups, reshard_paths)
    terms: dict[str, tuple[float, float, float]] = {}
    others: dict[str, tuple[tuple[float, float, float], ...]] = {}
    bottleneck = ""
    alike = {pattern: _alike(cluster, loads[pattern], loads) for pattern in ("ring", "all_to_all", "send_recv")}
    for kind in KINDS:
        crossed = alike[kind if kind in ("all_to_all", "send_recv") else "ring"]
        counts = steps_of(kind, members, nodes), (size - nodes if nodes > 1 else 0)
        terms[kind], limiting = _terms(cluster, kind, crossed, counts, size, "tree" if kind == "all_reduce" else "")
        if kind == "all_reduce":
            found = [_terms(cluster, kind, crossed, counts, size, way) for way in _besides_trees(cluster, crossed)]
            if found:
                others[kind] = tuple(other for other, _ in found)
            bottleneck = min([(terms[kind], limiting), *found], key=lambda each: each[0][1])[1]
    return AxisCost(name, size, terms, bottleneck, others)


_Crossed = tuple[Link, float, float, bool]
"""A link, its load per byte, the ranks of the ring across it, and whether it leaves machines."""


def _besides_trees(cluster: Cluster, crossed: Sequence[_Crossed]) -> list[str]:
    """Return the algorithms of an all_reduce, in addition to trees, that the links between machines have."""
    far = [link for link, _, _, is_far in crossed if is_far]
    ring = any(cluster.curves[link.curve]["all_reduce"].ring_step_seconds for link in far)
    return [*(["ring"] if ring else []), *(["sums"] if far and all(link.sums for link in far) else [])]


def _terms(
    cluster: Cluster, kind: str, crossed: Sequence[_Crossed], counts: tuple[tuple[int, int], int], size: int,
    algorithm: str,
) -> tuple[tuple[float, float, float], str]:  # fmt: skip
    """Return the terms of a collective by one algorithm, and the link that limits it.

    `counts` are dependent steps inside machines and between them, and the steps inside machines of a ring over several.
    `algorithm` of an all_reduce is ``tree``, ``ring`` or ``sums`` (by the switches); else empty.
    """
    (inside, between), hops = counts
    per_byte, of_far, sharpness, limiting = 0.0, 0.0, 1.0, ""
    bases, steps_inside, steps_between, of_hops = [0.0], [0.0], [0.0], [0.0]
    for link, load, ring, far in crossed:
        curve = cluster.curves[link.curve][kind]
        rate = link.bandwidth_bytes_per_second * curve.fraction * (1.0 - curve.ramp / max(ring, LEAST_RING))
        if far and algorithm == "tree":
            rate *= curve.tree_fraction
        elif far and algorithm == "sums":  # each byte goes up once and comes down once, at the same time
            rate *= 2 * (size - 1) / size
        # curves between machines were fitted to whole collectives: theirs is the shape, wherever the bytes are slowest
        if load / rate > of_far if far else load / rate > per_byte and not of_far:
            sharpness = curve.sharpness
        of_far = max(of_far, load / rate if far else 0.0)
        if load / rate > per_byte:
            per_byte = load / rate
            limiting = f"{link.name} {link.bandwidth_bytes_per_second / 1e9:.4g} GB/s"
        bases.append(curve.base_seconds)
        if far:
            steps_between.append(curve.ring_step_seconds if algorithm == "ring" else curve.step_seconds)
            of_hops.append(curve.inside_step_seconds)
        else:
            steps_inside.append(curve.step_seconds)
    if algorithm == "ring":
        nodes_hops = 2 * (size - hops - 1)
        latency = 2 * hops * max(*steps_inside, *of_hops) + nodes_hops * max(steps_between)
    elif algorithm == "sums":
        latency = inside * max(steps_inside) + 2 * max(steps_between)
    elif max(of_hops) and kind in ("all_gather", "reduce_scatter"):
        latency = hops * max(*steps_inside, *of_hops) + between * max(steps_between)
    else:
        latency = inside * max(steps_inside) + between * max(steps_between)
    return (max(bases) + latency, per_byte * _ring_volume(kind, size), sharpness), limiting


def _alike(
    cluster: Cluster, crossed: Mapping[Edge, list[float]], loads: Loads
) -> list[tuple[Link, float, float, bool]]:
    """Return the distinct links that a pattern crosses, with load and ring.

    The step of a link that only rings between nodes cross counts per node, others per member. A mesh crosses thousands
    of links, of which few differ: the slowest is found among one of each kind.
    """
    succ, inside, between = cluster.graph._succ, loads["inside"], loads["between"]
    links: dict[tuple[int, float, float, bool], Link] = {}
    for edge, (load, ring) in crossed.items():
        link = succ[edge[0]][edge[1]]["link"]
        links.setdefault((id(link), load, ring, edge in between and edge not in inside), link)
    return [(link, load, ring, far) for (_, load, ring, far), link in links.items()]


def steps_of(kind: str, members: int, nodes: int) -> tuple[int, int]:
    """Return the dependent steps inside a node and between nodes.

    Rings inside, but all_reduce and broadcast of more than RING_MEMBERS add a tree's depth only, as between nodes: the
    library then takes trees for small messages.
    """
    depth = math.ceil(math.log2(nodes)) if nodes > 1 else 0
    tree_members = members
    if members > RING_MEMBERS:
        tree_members = RING_MEMBERS + 2 * math.ceil(math.log2(members / RING_MEMBERS))
    if kind == "all_reduce":
        return 2 * (tree_members - 1), 2 * depth
    if kind == "broadcast":
        return tree_members - 1, depth
    if kind == "send_recv":
        return 1, 1 if nodes > 1 else 0
    return members - 1, nodes - 1


def _loads(cluster: Cluster, groups: np.ndarray, reshard_paths: dict) -> tuple[Loads, int, int]:
    """Return loads of every pattern, the most members of a group in one node, the most nodes of a group."""
    loads: Loads = {key: {} for key in ("ring", "all_to_all", "send_recv", "inside", "between")}
    followed = _followed_nodes(cluster, groups)
    most_members = most_nodes = 1
    size = groups.shape[1]
    for group in groups.tolist():
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank in group:
            by_node[cluster.node_of[rank]].append(rank)
        nodes = list(by_node)
        most_nodes = max(most_nodes, len(nodes))
        most_members = max(most_members, *(len(local) for local in by_node.values()))
        if followed is not None and not followed & by_node.keys():
            continue
        for position, node in enumerate(nodes):
            local, following = by_node[node], by_node[nodes[(position + 1) % len(nodes)]]
            m = len(local)
            here = followed is None or node in followed
            if m > 1 and here:
                for a, b, part in _inside_hops(cluster, local):
                    path = _path(cluster, reshard_paths, a, b)
                    _add(loads, ("ring", "inside"), path, part, m)
                    _add(loads, ("all_to_all",), path, part * (m - 1) / size, m)
            if len(nodes) > 1 and (here or (followed and cluster.node_of[following[0]] in followed)):
                rails = max(m, len(following))
                for i in range(rails):
                    path = _path(cluster, reshard_paths, local[i % m], following[i % len(following)])
                    _add(loads, ("ring", "between"), path, 1 / rails, len(nodes))
                    _add(loads, ("all_to_all",), path, m / rails * (size - m) / size, len(nodes))
        for a, b in pairwise(group):
            if followed is None or cluster.node_of[a] in followed or cluster.node_of[b] in followed:
                _add(loads, ("send_recv",), _path(cluster, reshard_paths, a, b), 1.0, 2)
    return loads, most_members, most_nodes


def _followed_nodes(cluster: Cluster, groups: np.ndarray) -> set[int] | None:
    """Return the nodes to follow: all (None), or of a large mesh some of every make.

    Nodes of one make (devices of the node) carry the same loads. Links that many nodes share beyond their own uplinks
    (an oversubscribed tree) are then only loaded by the followed nodes: an underestimate that small meshes do not have.
    """
    if groups.size <= MAX_HOPS:
        return None
    makes: dict[tuple, list[int]] = defaultdict(list)
    devices_of: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(groups.ravel().tolist()):
        devices_of[cluster.node_of[rank]].append(id(cluster.devices[rank]))
    for node, devices in devices_of.items():
        makes[tuple(devices)].append(node)
    followed: set[int] = set()
    for nodes in makes.values():
        followed.update(nodes[:SAMPLED_NODES], nodes[-LAST_NODES:])
    return followed


def _inside_hops(cluster: Cluster, local: list[int]) -> list[tuple[int, int, float]]:
    """Return (from, to, part of v) for the ring inside a node.

    A member with direct links spreads v over them, where these alone join all members; bridges between pairs do not.
    """
    places = {rank: place for place, rank in enumerate(local)}
    peers = [sorted((p for p in cluster.graph.succ[r] if p in places), key=places.__getitem__) for r in local]
    if not all(peers) or not nx.is_connected(cluster.graph.subgraph(local).to_undirected(as_view=True)):
        return [(rank, local[(i + 1) % len(local)], 1.0) for i, rank in enumerate(local)]
    hops = []
    for rank, reached in zip(local, peers, strict=True):
        direct = [(peer, cluster.graph.succ[rank][peer]["link"].bandwidth_bytes_per_second) for peer in reached]
        total = sum(bandwidth for _, bandwidth in direct)
        hops += [(rank, peer, bandwidth / total) for peer, bandwidth in direct]
    return hops


def _path(cluster: Cluster, reshard_paths: dict, a: int, b: int) -> list[Edge]:
    path = reshard_paths.get((a, b))
    if path is None:
        path = reshard_paths[a, b] = reshard_path(cluster.graph, a, b)
    return path


def _add(loads: Loads, patterns: tuple[str, ...], path: list[Edge], load: float, ring: int) -> None:
    for pattern in patterns:
        table = loads[pattern]
        for edge in path:
            entry = table.get(edge)
            if entry is None:
                table[edge] = [load, ring]
            else:
                entry[0] += load
                entry[1] = max(entry[1], ring)
