"""Common subexpressions: equal expressions are computed once.

Only cold operators are merged, those that depend on no parameter: masks and positions that every layer computes. An
operator that draws random numbers equals no other, and neither does one that reads running statistics, which an
operator of the graph writes although its schema does not say so: two reads of it are two values.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.aliasing.schemas import seeded
from autopar.capture.graph.dead_operators import has_effect
from autopar.capture.graph.drafts import Draft
from autopar.words.graph import Node, Ref, map_refs


def merge_common_subexpressions(draft: Draft) -> Draft:
    """Move every reference to an expression that was computed before there; numbers of nodes stay.

    Nodes that nobody reads any more are left to :mod:`.dead_operators`.
    """
    nodes = draft.nodes
    moved: dict[int, int] = {}
    first: dict[object, int] = {}
    unsteady = {r.node for n in nodes if has_effect(n.target) for r in n.refs if nodes[r.node].kind == "buffer"}

    def move(ref: Ref) -> Ref:
        return Ref(moved[ref.node], ref.out) if ref.node in moved else ref

    result: list[Node] = []
    for i, node in enumerate(nodes):
        if node.kind != "op":
            result.append(node)
            continue
        refs = node.refs
        if any(r.node in moved for r in refs):
            node = node.moved(move)
        if any(r.node in unsteady for r in refs):
            unsteady.add(i)
        elif not node.hot and not seeded(node.target) and not has_effect(node.target):
            key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())), node.outs)
            if first.setdefault(key, i) != i:
                moved[i] = first[key]
        result.append(node)
    if not moved:
        return draft
    return replace(draft, nodes=result, outputs=map_refs(draft.outputs, move), updates=map_refs(draft.updates, move))
