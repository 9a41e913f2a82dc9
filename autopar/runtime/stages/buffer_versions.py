"""Buffers whose old values outlive the forward that changes them.

New values are put into a buffer when the forward is done. What autograd has kept of the old ones for the backward, and
what becomes the new value of another buffer, must then be a copy: the model's own ``clone()`` is none in a graph, where
values never change.
"""

from __future__ import annotations

from autopar.rules.aliasing import may_alias
from autopar.rules.operator_call import call_of
from autopar.words.graph import Graph


def outliving(graph: Graph) -> frozenset[str]:
    """Return the names of the buffers that the program is given a copy of."""
    names = set()
    for i, node in graph.of_kind("buffer"):
        if node.target not in graph.updates:
            continue
        reached = {i}
        for n in range(i + 1, len(graph.nodes)):
            if any(r.node in reached for r in graph.nodes[n].refs) and not (
                graph.forward_only and not may_alias(call_of(graph.nodes[n], graph.spec))
            ):  # what is computed of the old value and kept by nobody may lie where it likes
                reached.add(n)
        others = {ref.node for name, ref in graph.updates.items() if name != node.target}
        if reached & others or any(graph.nodes[n].needs_grad for n in reached):
            names.add(node.target)
    return frozenset(names)
