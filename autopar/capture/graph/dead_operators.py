"""A graph without the operators whose result nobody reads."""

from __future__ import annotations

from typing import Any

from autopar.words.graph import Graph, Ref, has_effect, map_refs, refs_in


def without_dead(graph: Graph, user: list[Any]) -> tuple[Graph, list[Any]]:
    """Drop operators whose result nobody reads. Parameters, buffers and inputs stay."""
    alive = {r.node for r in refs_in(graph.outputs)} | {r.node for r in graph.updates.values()}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if node.kind != "op" or has_effect(node.target):
            alive.add(i)
        if i in alive:
            alive.update(r.node for r in node.refs)
    renumber = {old: new for new, old in enumerate(i for i in range(len(graph.nodes)) if i in alive)}

    def move(ref: Ref) -> Ref:
        return Ref(renumber[ref.node], ref.out)

    moves = {old for old, new in renumber.items() if old != new}
    nodes = tuple(
        node.moved(move) if not moves.isdisjoint([r.node for r in node.refs]) else node
        for i, node in enumerate(graph.nodes) if i in renumber
    )  # fmt: skip
    updates = {name: move(ref) for name, ref in graph.updates.items()}
    moved = [None if n is None else renumber[n] for n in user]
    outputs = map_refs(graph.outputs, move)
    return Graph(nodes, outputs, graph.loss, graph.tied, updates, precision=graph.precision), moved
