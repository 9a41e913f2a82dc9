"""Folding: identical blocks are found in the graph and decided once, so that planning does not grow with depth.

Two stretches of operators are the same block if operator, literals, shapes and dtypes agree one by one, and every
input is either shared by both (a mask, say), or the corresponding tensor of its own block, or comes from the block
before. Where blocks are, and how long, follows from the graph alone, not from module names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.graph import Graph

MIN_CONTRACTIONS = 4
"""A block has at least this many operators with a parameter of two or more dims: neighbouring layers of a plain MLP
must stay free to differ (one is cut by columns, the next by rows)."""
MIN_REPEATS = 3
GRAM = 4
"""Operators in a row by which a place is known: single operators are alike everywhere."""
PERIODS = 12
"""Distances that are tried, the most frequent first: others are those of rare operators."""


@dataclass(frozen=True)
class Fold:
    """Which nodes are decided together.

    Attributes:
        representative: for every node, the number of the node that is decided in its place.
        blocks: ``(first operator, length, repeats)`` of every repeated stretch, in operator positions.
    """

    representative: tuple[int, ...]
    blocks: tuple[tuple[int, int, int], ...]

    @property
    def counts(self) -> Counter[int]:
        """How many nodes each representative stands for."""
        return Counter(self.representative)


def unfolded(graph: Graph) -> Fold:
    """Every node for itself."""
    return Fold(tuple(range(len(graph.nodes))), ())


def fold(graph: Graph) -> Fold:
    """Find the repeated blocks of a graph."""
    ops = [i for i, n in enumerate(graph.nodes) if n.kind == "op"]
    position = [-1] * len(graph.nodes)
    for p, i in enumerate(ops):
        position[i] = p
    signs = [graph.alike[i] for i in ops]
    representative = list(range(len(graph.nodes)))
    taken = [False] * len(ops)
    blocks = []
    for period in _periods(signs):
        start = 0
        while start + period < len(ops):
            if taken[start] or signs[start] != signs[start + period]:
                start += 1
                continue
            run = _run(graph, ops, position, signs, taken, start, period)
            if run is None:
                start += 1
                continue
            first, repeats = run
            step = period
            while _contractions(graph, ops[first : first + step]) < MIN_CONTRACTIONS and repeats >= 2 * MIN_REPEATS:
                step, repeats = step * 2, repeats // 2
            if repeats >= MIN_REPEATS and _contractions(graph, ops[first : first + step]) >= MIN_CONTRACTIONS:
                _merge(graph, ops, representative, first, step, repeats)
                taken[first : first + step * repeats] = [True] * (step * repeats)
                blocks.append((first, step, repeats))
                start = first + step * repeats
            else:
                start = first + 1
    return Fold(tuple(representative), tuple(sorted(blocks)))


def _periods(signs: list[int]) -> list[int]:
    """Distances at which the sequence of signatures repeats, most frequent first."""
    last: dict[tuple[int, ...], int] = {}
    periods: Counter[int] = Counter()
    for p in range(len(signs) - GRAM + 1):
        key = tuple(signs[p : p + GRAM])
        if key in last:
            periods[p - last[key]] += 1
        last[key] = p
    return [p for p, n in sorted(periods.items(), key=lambda e: (-e[1], e[0])) if n >= 2][:PERIODS]


def _run(
    graph: Graph, ops: list[int], position: list[int], signs: list[int], taken: list[bool], start: int, period: int
) -> tuple[int, int] | None:
    """``(first operator, repeats)`` of the repeated stretch that begins at ``start``, if there is one."""
    end = start
    while (
        end + period < len(ops)
        and not taken[end]
        and not taken[end + period]
        and signs[end] == signs[end + period]
        and _same_inputs(graph, ops, position, start, end, period)
    ):
        end += 1
    repeats = (end - start) // period + 1
    return (start, repeats) if repeats >= MIN_REPEATS else None


def _same_inputs(graph: Graph, ops: list[int], position: list[int], start: int, at: int, period: int) -> bool:
    first = at - start < period
    for ref, next_ref in zip(graph.nodes[ops[at]].refs, graph.nodes[ops[at + period]].refs, strict=True):
        a, b = position[ref.node], position[next_ref.node]  # -1: no operator
        if ref.out == next_ref.out and (ref.node == next_ref.node or (b - a == period and a >= 0)):
            continue
        if a < 0 and b < 0:
            if graph.nodes[ref.node].kind != graph.nodes[next_ref.node].kind or graph.nodes[ref.node].kind == "input":
                return False
        elif first and start <= b < start + period and a < start:
            continue  # the first block is fed from before the blocks, the others from the block before
        else:
            return False
    return True


def _contractions(graph: Graph, ops: list[int]) -> int:
    return sum(
        any(graph.nodes[r.node].kind == "param" and len(graph.spec(r).shape) >= 2 for r in graph.nodes[i].refs)
        for i in ops
    )


def _merge(graph: Graph, ops: list[int], representative: list[int], first: int, length: int, repeats: int) -> None:
    nodes = graph.nodes
    for offset in range(length):
        base = ops[first + offset]
        owned = any(nodes[r.node].kind in ("param", "buffer") for r in nodes[base].refs)
        for block in range(1, repeats):
            twin = ops[first + block * length + offset]
            representative[twin] = base
            for a, b in zip(nodes[base].refs, nodes[twin].refs, strict=True) if owned else ():
                if a.node != b.node and nodes[b.node].kind in ("param", "buffer") and representative[b.node] == b.node:
                    representative[b.node] = representative[a.node]
