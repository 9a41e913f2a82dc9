"""Buffers that operators write to while the program runs, such as the running statistics of a norm.

A rank has one copy of such a buffer. Where several operators write to it (a norm that layers share), or others read it
both before and after it is written, all of them have to hold it in the same pieces: they hold it whole, unless pins say
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, has_effect


def held_whole(graph: Graph) -> Mapping[int, Sequence[int]]:
    """Return the operators that hold a buffer replicated, with the positions of such buffers in their ``refs``."""
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for ref in {*node.refs} if node.kind == "op" else ():
            if graph.nodes[ref.node].kind == "buffer":
                readers.setdefault(ref.node, []).append(i)
    positions: dict[int, list[int]] = {}
    for buffer, users in readers.items():
        writers = [i for i in users if has_effect(graph.nodes[i].target)]
        both_sides = any(users[0] < i < users[-1] for i in writers)
        for i in users if both_sides else writers if len(writers) > 1 else ():
            refs = graph.nodes[i].refs
            positions.setdefault(i, []).extend(k for k, ref in enumerate(refs) if ref.node == buffer)
    return positions


def holds_whole(strategy: Strategy, positions: Sequence[int]) -> bool:
    """Return whether a strategy takes the tensors at `positions` uncut."""
    return not any(strategy.ins[k].is_cut for k in positions)
