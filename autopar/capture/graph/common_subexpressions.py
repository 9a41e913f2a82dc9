"""Equal expressions are computed once: on the finished graph, where every value is what it is for good.

Only cold operators are merged, those that depend on no parameter: masks and positions that every layer makes again. An
operator that draws numbers is like no other, and so is one that reads what an operator of the graph writes beside its
schema (running statistics): two reads of it are two values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.capture.aliasing.schemas import seeded
from autopar.capture.graph.dead_operators import has_effect
from autopar.words.graph import Node, Ref


def merged(nodes: Sequence[Node]) -> tuple[list[Node], dict[int, int]]:
    """The nodes with every reference to an expression that stood before moved there, and where it was moved.

    The numbers of nodes stay; those that nobody reads any more are for
    :func:`~autopar.capture.graph.dead_operators.without_dead`.
    """
    moved: dict[int, int] = {}
    first: dict[Any, int] = {}
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
    return result, moved


__all__ = ["merged"]
