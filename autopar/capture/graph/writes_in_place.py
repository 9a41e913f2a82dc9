"""Buffers that a forward writes in part are written where they lie: in a graph, every write makes a whole new tensor.

A cache of keys and values is as large as the weights, and a call writes one position of it. Where nothing wants a
gradient and nobody else reads the old value, the operator that makes the new one writes into it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.words.graph import Graph, Ref

IN_PLACE = {
    "aten.index_copy.default": "aten.index_copy_.default", "aten.index_put.default": "aten.index_put_.default",
    "aten.scatter.src": "aten.scatter_.src", "aten.scatter.value": "aten.scatter_.value",
}  # fmt: skip
"""Operators that write to a part of their first input, and what they are in place."""


def write_in_place(graph: Graph) -> Graph:
    """Replace the operators that make new values of buffers by those that write to them."""
    if not graph.forward_only:
        return graph
    places: dict[int, str] = {}
    numbers = {node.target: i for i, node in graph.of_kind("buffer")}
    kept = [*graph.updates.values(), *(out for out in graph.outputs if isinstance(out, Ref))]
    for name in graph.written:
        buffer, written = numbers[name], graph.updates[name]
        writers = _writers(graph, buffer, written)
        olds = [Ref(buffer), *(Ref(i) for i in writers[:-1])]
        if writers and kept.count(written) == 1 and not any(old in kept for old in olds):
            places |= {i: IN_PLACE[graph.nodes[i].target] for i in writers}
    if not places:
        return graph
    nodes = [replace(node, target=places[i]) if i in places else node for i, node in enumerate(graph.nodes)]
    return replace(graph, nodes=tuple(nodes))


def _writers(graph: Graph, buffer: int, written: Ref) -> list[int]:
    """Return the operators from a buffer to its new value, if each writes to what it alone reads; else none."""
    writers: list[int] = []
    ref = written
    while ref != Ref(buffer):
        node = graph.nodes[ref.node]
        if node.target not in IN_PLACE or node.out != graph.nodes[buffer].out or _adds(node.args, node.kwargs):
            return []
        writers.insert(0, ref.node)
        ref = node.refs[0]
        if len(graph.consumers[ref]) > 1:
            return []
    return writers


def _adds(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether a call of ``index_put`` adds to what is there."""
    return bool(kwargs.get("accumulate")) or (len(args) > 3 and args[3] is True)
