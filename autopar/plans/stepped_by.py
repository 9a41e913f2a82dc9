"""Which optimizer steps on a parameter, where a script has one for matrices and one for the rest.

Muon is for the matrices of hidden layers; its authors have embeddings, the last layer and all vectors stepped on by
AdamW (https://kellerjordan.github.io/posts/muon). Scripts do that by hand, with two optimizers, and plans for ``muon``
count it so.
"""

from __future__ import annotations

from autopar.words.graph import Graph, Node, Ref
from cost_models.optimizer_bytes import BESIDE_MUON, MUON

_LOOKUP = "aten.embedding.default"


def stepped_by(graph: Graph, param: Node, optimizer: str) -> str:
    """Return the name of the optimizer that steps on a parameter of a graph, under a plan's ``optimizer``."""
    if optimizer != MUON:
        return optimizer
    return MUON if len(param.out.shape) == 2 and param.target not in _outer(graph) else BESIDE_MUON


def matrices_of(graph: Graph, optimizer: str) -> list[tuple[int, Node]]:
    """Return number and node of the trained parameters that are stepped on as whole matrices."""
    if optimizer != MUON:
        return []
    return [(i, n) for i, n in graph.of_kind("param") if n.needs_grad and stepped_by(graph, n, optimizer) == MUON]


def _outer(graph: Graph) -> frozenset[str]:
    """Return the parameters of the first and the last layer: tables that are looked up in, and the last product's."""
    found = graph.derived.get("stepped by AdamW beside Muon")
    if found is None:
        tables, last = set(), set()
        for i, node in graph.of_kind("param"):
            readers = graph.consumers.get(Ref(i, 0), ())
            tables |= {node.target} if any(graph.nodes[k].target == _LOOKUP for k, _ in readers) else set()
        for node in reversed(graph.nodes) if not graph.sends else ():
            read = [graph.nodes[ref.node] for ref in node.refs] if node.kind == "op" else []
            last = {n.target for n in read if n.kind == "param" and n.needs_grad and len(n.out.shape) == 2}
            if last:
                break
        found = graph.derived["stepped by AdamW beside Muon"] = frozenset(tables | last)
    return found
