"""Routes on the link graph: the edges that a transfer from one rank to another crosses."""

from __future__ import annotations

import heapq
from itertools import pairwise

import networkx as nx

HOP_SECONDS = 1e-9  # added per hop, so that of two routes with equal latency the one with fewer hops is taken

Edge = tuple[int | str, int | str]


def reshard_path(graph: nx.DiGraph, source: int, target: int) -> list[Edge]:
    """Return the edges of the route of least latency; ValueError if there is none.

    Switches forward traffic; devices do where nothing else joins the two, as the chips of a torus.
    """
    path = _route(graph, source, target, False) or _route(graph, source, target, True)
    if path is None:
        raise ValueError(f"no route from rank {source} to rank {target}: add the missing links to the cluster file")
    return path


def _route(graph: nx.DiGraph, source: int, target: int, through_devices: bool) -> list[Edge] | None:
    """Return the route, or None.

    Dijkstra from both ends; a hub with thousands of ports (the fabric) is met from both sides and never expanded:
    networkx's own search finds the same routes (a test compares them), but looks at every port of the hub, and takes 35
    ms a route instead of 0.02 on 16,384 devices.
    """
    best, meeting = float("inf"), None
    neighbours = (graph.succ, graph.pred)
    ends = (source, target)
    distance: tuple[dict, dict] = ({source: 0.0}, {target: 0.0})
    parent: tuple[dict, dict] = ({}, {})
    order = 0
    heaps: tuple[list, list] = ([(0.0, 0, source)], [(0.0, 0, target)])
    while heaps[0] and heaps[1] and heaps[0][0][0] + heaps[1][0][0] < best:
        side = 0 if heaps[0][0][0] <= heaps[1][0][0] else 1
        so_far, _, node = heapq.heappop(heaps[side])
        if so_far > distance[side][node]:
            continue
        if isinstance(node, int) and node != ends[side] and not through_devices:
            continue
        for neighbour, edge in neighbours[side][node].items():
            if isinstance(neighbour, int) and neighbour != ends[1 - side] and not through_devices:
                continue
            total = so_far + edge["link"].latency_seconds + HOP_SECONDS
            if total < distance[side].get(neighbour, float("inf")):
                distance[side][neighbour], parent[side][neighbour] = total, node
                order += 1
                heapq.heappush(heaps[side], (total, order, neighbour))
                if neighbour in distance[1 - side] and total + distance[1 - side][neighbour] < best:
                    best, meeting = total + distance[1 - side][neighbour], neighbour
    if meeting is None:
        return None
    path = [meeting]
    while path[-1] != source:
        path.append(parent[0][path[-1]])
    path.reverse()
    while path[-1] != target:
        path.append(parent[1][path[-1]])
    return list(pairwise(path))
