"""Products that make several things at once, such as q, k and v, taken apart to be priced.

Frameworks with tensor parallelism store such a weight so that every rank has its heads of all three. A parameter of
autopar is cut into pieces that follow one another, so of a module with one weight for q, k and v every rank would need
parts of several pieces. What the framework runs is what the model runs with one matrix for each: a layout of that model
is priced, and its plan says that it is not one of the module as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.plans.stage_graphs import hot_ops
from autopar.words.graph import Graph, Node, Ref, map_refs

SPLIT = "aten.split_with_sizes.default"
PRODUCTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "aten.linear.default": ((1, 0), (2, 0)), "aten.addmm.default": ((0, -1), (2, 1)), "aten.mm.default": ((1, 1),),
}  # fmt: skip
"""By product, the positions of its parameters and the dim of each that has the features."""
RESHAPE = "aten.reshape.default"


@dataclass(frozen=True)
class _Fused:
    """A product, the reshapes behind it, and the operator that takes its features apart, by node number."""

    product: int
    reshapes: tuple[int, ...]
    split: int


def separated(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """Return a graph in which fused products are one product for each part of their features, and their modules.

    It is the same graph if there are none.
    """
    known = graph.derived.get("separated products")
    if known is None:
        known = graph.derived["separated products"] = _separated(graph)
    return known  # type: ignore[no-any-return]


def _separated(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    found = [fused for i in hot_ops(graph) if (fused := _fused(graph, i)) is not None]
    if not found:
        return graph, ()
    by_split = {fused.split: fused for fused in found}
    dropped = {i for fused in found for i in (fused.product, *fused.reshapes, fused.split)}
    params = {ref.node for fused in found for ref in _params(graph, fused.product).values()}
    leaves: list[Node] = []
    moved: dict[Ref, Ref] = {}
    part_of: dict[tuple[int, int], int] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "op":
            continue
        if i not in params:
            moved[Ref(i)] = Ref(len(leaves))
            leaves.append(node)
    for fused in found:
        sizes = graph.nodes[fused.split].args[1]
        for position, ref in _params(graph, fused.product).items():
            node = graph.nodes[ref.node]
            for k, size in enumerate(sizes):
                dim = dict(PRODUCTS[graph.nodes[fused.product].target])[position]
                shape = list(node.out.shape)
                shape[dim] = size
                part_of[ref.node, k] = len(leaves)
                spec = node.out._replace(shape=tuple(shape))
                leaves.append(replace(node, name=f"{node.name}_{k}", target=f"{node.target}[{k}]", outs=(spec,)))
    nodes = leaves
    for i, node in enumerate(graph.nodes):
        if node.kind != "op":
            continue
        if i in by_split:
            for k in range(len(node.outs)):
                moved[Ref(i, k)] = _part(graph, by_split[i], k, nodes, moved, part_of)
        elif i not in dropped:
            for out in range(len(node.outs)):
                moved[Ref(i, out)] = Ref(len(nodes), out)
            nodes.append(node.moved(moved.__getitem__) if node.refs else node)
    outputs = tuple(moved[out] if isinstance(out, Ref) else out for out in graph.outputs)
    updates = {name: moved[ref] for name, ref in graph.updates.items()}
    modules = tuple(dict.fromkeys(graph.nodes[fused.product].module for fused in found))
    return replace(graph, nodes=tuple(nodes), outputs=outputs, updates=updates), modules


def _part(
    graph: Graph, fused: _Fused, k: int, nodes: list[Node], moved: Mapping[Ref, Ref],
    part_of: Mapping[tuple[int, int], int],
) -> Ref:  # fmt: skip
    """Add the product of part ``k`` and its reshapes to ``nodes``, and return its result."""
    split, product = graph.nodes[fused.split], graph.nodes[fused.product]
    size = split.args[1][k]
    params = {ref.node for ref in _params(graph, fused.product).values()}
    last = Ref(-1)
    for i in (fused.product, *fused.reshapes):
        node = graph.nodes[i]
        spec = node.out._replace(shape=(*node.out.shape[:-1], size))

        def find(ref: Ref, before: Ref = last) -> Ref:
            if ref.node in params:
                return Ref(part_of[ref.node, k])
            return moved[ref] if before.node < 0 else before

        args = tuple(map_refs(a, find) for a in node.args)
        if i != fused.product:
            args = (args[0], [*args[1][:-1], size], *args[2:])
        kwargs = {name: map_refs(value, find) for name, value in node.kwargs.items()}
        last = Ref(len(nodes))
        nodes.append(replace(node, name=f"{node.name}_part{k}", args=args, kwargs=kwargs, outs=(spec,)))
    assert product.target in PRODUCTS
    return last


def _params(graph: Graph, i: int) -> dict[int, Ref]:
    """Return the parameters that a product has features of, by position in its arguments."""
    node = graph.nodes[i]
    return {
        position: arg for position, _ in PRODUCTS[node.target]
        if position < len(node.args) and isinstance(arg := node.args[position], Ref)
    }  # fmt: skip


def _fused(graph: Graph, i: int) -> _Fused | None:
    """Return the operators from a product to the one that splits its features; None if there is none."""
    node = graph.nodes[i]
    if node.target not in PRODUCTS:
        return None
    params = _params(graph, i)
    if not params or any(graph.nodes[ref.node].kind != "param" for ref in params.values()):
        return None
    if any(len(graph.consumers[ref]) > 1 or ref in graph.outputs for ref in params.values()):
        return None
    if any(graph.nodes[ref.node].target in graph.tied.values() for ref in params.values()):
        return None
    reshapes: list[int] = []
    at = i
    while True:
        ref, users = Ref(at), graph.consumers.get(Ref(at), [])
        if len(users) != 1 or ref in graph.outputs:
            return None
        at = users[0][0]
        user = graph.nodes[at]
        shape = graph.spec(ref).shape
        if user.target == SPLIT:
            dim = user.args[2] if len(user.args) > 2 else user.kwargs.get("dim", 0)
            parts = user.args[1]
            same = dim % len(shape) == len(shape) - 1 and sum(parts) == shape[-1]
            return _Fused(i, tuple(reshapes), at) if same else None
        if user.target != RESHAPE or not user.out.shape or user.out.shape[-1] != shape[-1]:
            return None
        reshapes.append(at)
