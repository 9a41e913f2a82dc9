"""State that a program keeps in pieces: buffers that a forward writes and later calls read, such as caches.

Where nothing wants a gradient, the integer program decides how such a buffer is stored, as it decides operators: one
item has the placements that its readers want and its writers make; the item makes the buffer's old value and reads its
new one, so that what is written is what the next call reads. A program of other shapes over the same buffers takes
their placements as given. In training, and without a hot new value, buffers follow what reads them
(:mod:`.plan_completion`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import product

from autopar.words.graph import Graph, Node
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATED, State
from autopar.words.shards import fits


def kept_buffers(graph: Graph, given: Collection[str] = ()) -> frozenset[int]:
    """Return the numbers of the buffers whose storage is decided: those that change, and those of names in ``given``.

    There are none in a graph with gradients. Frozen parameters that a forward writes, which are hot, are left out.
    """
    if not graph.forward_only:
        return frozenset()
    names = {*graph.written, *given}
    return frozenset(i for i, node in graph.of_kind("buffer") if node.target in names and not node.hot)


def with_hot_state(graph: Graph, buffers: Collection[int]) -> Graph:
    """Return the graph with some buffers hot, and all that follows from them, so that these are decided together."""
    if not buffers:
        return graph
    key = "hot state", frozenset(buffers)
    done: Graph | None = graph.derived.get(key)
    if done is None:
        nodes: list[Node] = []
        for i, node in enumerate(graph.nodes):
            hot = node.hot or i in buffers or any(nodes[ref.node].hot for ref in node.refs)
            nodes.append(node if hot == node.hot else replace(node, hot=hot))
        done = graph.derived[key] = replace(graph, nodes=tuple(nodes))
    return done


def storage_options(node: Node, wanted: Iterable[State], mesh: Mesh, pinned: State | None) -> list[State]:
    """Return the placements in which a buffer may be stored: on each axis whole, or cut as some operator has it."""
    if pinned is not None:
        return [pinned]
    options = [
        sorted({REPLICATED, *(state[a] for state in wanted if state[a].is_shard)}) if size > 1 else [REPLICATED]
        for a, (_, size) in enumerate(mesh)
    ]
    return [s for s in map(State, product(*options)) if not s.has_units and fits(node.out.shape, s, mesh)]


def stored_states(graph: Graph, given: Mapping[str, State] | None) -> dict[str, State]:
    """Return the placements of those buffers of a graph that are given."""
    names = {node.target for _, node in graph.of_kind("buffer")}
    return {name: state for name, state in (given or {}).items() if name in names}
