"""A graph without the operators whose result nobody reads."""

from __future__ import annotations

from typing import Any

from autopar.graph import Graph, Node, Ref, map_refs, refs_in


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

    def move(value: Any) -> Any:
        return map_refs(value, lambda r: Ref(renumber[r.node], r.out))

    nodes = tuple(
        Node(**{**_fields(node), "args": move(node.args), "kwargs": move(node.kwargs)})
        for i, node in enumerate(graph.nodes)
        if i in renumber
    )
    updates = {name: move(ref) for name, ref in graph.updates.items()}
    moved = [None if n is None else renumber[n] for n in user]
    return Graph(nodes, move(graph.outputs), graph.loss, graph.tied, updates), moved


def _fields(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in Node.__dataclass_fields__}


def has_effect(target: str) -> bool:
    """Operators that write to their inputs though their schema does not say so."""
    return target in ("aten.batch_norm.default", "aten.instance_norm.default")
