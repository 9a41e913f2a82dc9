"""The cheapest tree of single-axis steps from the state in which a tensor is made to all states its readers want.

Each step changes one axis and is one collective or none. Consumers that want the same state share its copy, and routes
share their common beginnings, so the whole tree is a directed Steiner tree in the small graph of states. With few
wanted states (nearly always one or two) it is found exactly by the dynamic program over subsets of wanted states of
Dreyfus and Wagner (Networks 1, 1971), in its directed form.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product

from autopar.planner.effort import EFFORT
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, REPLICATED, Placement, State, steps_from
from autopar.words.shards import fits

Edge = tuple[State, State]
STEP_SECONDS = 1e-15
"""Added to every step, so that of two paths that cost the same, or nothing, the one of fewer steps is taken."""


@lru_cache(maxsize=200_000)
def state_graph(
    shape: tuple[int, ...], mesh: Mesh, sources: tuple[tuple[Placement, ...], ...],
    targets: tuple[tuple[Placement, ...], ...],
) -> tuple[tuple[State, ...], tuple[Edge, ...]]:  # fmt: skip
    """Return the states between the placements that producers make and consumers want, and the steps between them.

    A step never makes a placement that no consumer wants, but for the whole value that two steps may pass through.
    """
    passing = [
        tuple(dict.fromkeys((*t, *(p for p in s if p.is_replicated)))) for s, t in zip(sources, targets, strict=True)
    ]
    every = [tuple(dict.fromkeys((*s, *p))) for s, p in zip(sources, passing, strict=True)]
    every_state = map(State, product(*every))
    states = tuple(s for s in every_state if fits(shape, s, mesh))
    legal = set(states)
    edges = tuple((s, d) for s in states for _, d in steps_from(s, passing) if d in legal)
    return states, edges


def axis_sets(states: Sequence[State], n_axes: int) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements that occur on each axis, sorted."""
    return tuple(tuple(sorted({s[a] for s in states})) for a in range(n_axes))


def reshard_path(
    shape: tuple[int, ...], mesh: Mesh, grad: bool, source: State, targets: Sequence[State],
    price: Callable[[State, State], float],
) -> tuple[float, tuple[Edge, ...]] | None:  # fmt: skip
    """Return the price and the steps of the cheapest tree from a state to every target; None if one is out of reach.

    Without ``grad`` (no gradient flows) ``R`` is the only spelling of a replicated value; ``price`` gives the seconds
    of a step.
    """
    wanted = sorted(set(targets) - {source})
    if not wanted:
        return 0.0, ()
    n = len(mesh)
    sources = axis_sets([source], n)
    whole = (INVARIANT, REPLICATED) if grad else (REPLICATED,)
    goals = tuple(tuple(dict.fromkeys((*axis, *whole))) for axis in axis_sets(wanted, n))
    states, edges = state_graph(shape, mesh, sources, goals)
    number = {s: i for i, s in enumerate(states)}
    if source not in number or any(t not in number for t in wanted):
        return None
    into: list[list[tuple[int, float]]] = [[] for _ in states]
    for s, d in edges:
        into[number[d]].append((number[s], price(s, d) + STEP_SECONDS))
    if len(wanted) > EFFORT.exact_readers:  # one after the other, each from the nearest state that exists
        return _greedy(states, number, into, source, wanted)
    tree = _cheapest_tree(into, number[source], [number[t] for t in wanted])
    if tree is None:
        return None
    return _as_tree(source, wanted, {(states[v], states[u]): None for v, u in tree}, price)


def _cheapest_tree(
    into: Sequence[Sequence[tuple[int, float]]], source: int, wanted: Sequence[int]
) -> dict[tuple[int, int], None] | None:
    """Return the edges of the cheapest tree from a state to all wanted ones, by numbers; None if one is out of reach.

    ``into`` are the edges into each state with their prices. The dynamic program is that of Dreyfus and Wagner.
    """
    inf = float("inf")
    full = (1 << len(wanted)) - 1
    best = [[inf] * len(into) for _ in range(full + 1)]
    how: list[list[object]] = [[None] * len(into) for _ in range(full + 1)]
    for mask in range(1, full + 1):
        row, steps = best[mask], how[mask]
        if mask & (mask - 1) == 0:
            row[wanted[mask.bit_length() - 1]] = 0.0
        sub = (mask - 1) & mask
        while sub:
            complement = mask ^ sub
            if sub < complement:
                a, b = best[sub], best[complement]
                for v in range(len(into)):
                    cost = a[v] + b[v]
                    if cost < row[v]:
                        row[v], steps[v] = cost, (sub, complement)
            sub = (sub - 1) & mask
        heap = [(c, v) for v, c in enumerate(row) if c < inf]
        heapq.heapify(heap)
        while heap:
            c, v = heapq.heappop(heap)
            if c > row[v]:
                continue
            for u, w in into[v]:
                if c + w < row[u]:
                    row[u], steps[u] = c + w, v
                    heapq.heappush(heap, (c + w, u))
    if best[full][source] == inf:
        return None
    tree: dict[tuple[int, int], None] = {}
    stack = [(full, source)]
    while stack:
        mask, v = stack.pop()
        step = how[mask][v]
        if step is None:
            continue
        if isinstance(step, tuple):
            stack.extend([(step[0], v), (step[1], v)])
        else:
            assert isinstance(step, int)
            tree[v, step] = None
            stack.append((mask, step))
    return tree


def _as_tree(
    source: State, wanted: Sequence[State], edges: dict[Edge, None], price: Callable[[State, State], float]
) -> tuple[float, tuple[Edge, ...]]:
    """Keep one step into each state, ordered from the root, and only those that lead to a wanted state."""
    parent: dict[State, State] = {}
    reached = [source]
    for state in reached:
        for s, d in edges:
            if s == state and d not in parent and d != source:
                parent[d] = s
                reached.append(d)
    needed: set[State] = set()
    for t in wanted:
        while t != source:
            needed.add(t)
            t = parent[t]
    steps = tuple((parent[d], d) for d in reached if d in needed)
    return sum(price(s, d) for s, d in steps), steps


def _greedy(
    states: Sequence[State], number: dict[State, int], into: list[list[tuple[int, float]]], source: State,
    wanted: Sequence[State],
) -> tuple[float, tuple[Edge, ...]] | None:  # fmt: skip
    out: list[list[tuple[int, float]]] = [[] for _ in states]
    for d, sources in enumerate(into):
        for s, w in sources:
            out[s].append((d, w))
    have = {number[source]}
    steps: list[Edge] = []
    total = 0.0
    missing = {number[t] for t in wanted}
    while missing - have:
        dist = {v: 0.0 for v in have}
        parent: dict[int, int] = {}
        heap = [(0.0, v) for v in sorted(have)]
        nearest = None
        while heap:
            c, v = heapq.heappop(heap)
            if c > dist[v]:
                continue
            if v in missing and v not in have:
                nearest = v
                break
            for u, w in out[v]:
                if c + w < dist.get(u, float("inf")):
                    dist[u], parent[u] = c + w, v
                    heapq.heappush(heap, (c + w, u))
        if nearest is None:
            return None
        total += dist[nearest]
        path = []
        v = nearest
        while v not in have:
            path.append(v)
            v = parent[v]
        for u in reversed(path):
            steps.append((states[parent[u]], states[u]))
            have.add(u)
    return total, tuple(steps)
