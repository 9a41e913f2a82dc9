"""Which products of a graph its policy makes narrow, and which parameters are their weights."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from autopar.words.graph import Graph, Node, Ref
from autopar.words.narrow_products import NarrowUse

PRODUCTS = frozenset({
    "aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default", "aten.bmm.default",
    "aten._grouped_mm.default", "autopar.expert_block.default",
})  # fmt: skip
"""Operators that multiply activations by weights."""
MULTIPLE = 16
"""Sizes of narrow products are multiples of it, as the kernels want (cuBLAS, torch._scaled_mm)."""
LEAST_FEATURES = 512
"""Products with fewer features on a side stay wide: they are bound by memory, and routers over experts, which software
keeps wide, are such."""
_OF_A_BLOCK = re.compile(r"(^|\.)\d+(\.|$)")


def with_narrow_products(graph: Graph) -> Graph:
    """Mark the products of a graph that its policy makes narrow, and the parameters that they read as weights.

    These are products of activations by two-dimensional weights (or a stack of them, as of experts) in modules that
    stand in a list (``layers.3.mlp``): those before and after the list, such as logits, stay wide. So do products with
    sizes that are small or no multiples of 16, such as of routers over experts.
    """
    policy = graph.precision
    if policy is None or not policy.products:
        return graph
    nodes, read_by = list(graph.nodes), dict[Ref, int]()
    uses = {i: use for i, node in enumerate(nodes) if (use := _use_of(graph, node, policy.products)) is not None}
    for i, use in uses.items():
        for position in use.activations:
            read_by[nodes[i].refs[position]] = read_by.get(nodes[i].refs[position], 0) + 1
    for i, use in uses.items():
        shared = max(read_by[nodes[i].refs[position]] for position in use.activations)
        nodes[i] = replace(nodes[i], narrow=use._replace(shared=shared))
        for position in use.weights:
            _mark_parameters(graph, nodes, graph.nodes[i].refs[position].node, policy.products)
    return replace(graph, nodes=tuple(nodes))


def none_narrow(graph: Graph) -> str:
    """Return what is wrong where a policy asks for narrow products and a graph has none; empty if nothing is."""
    policy = graph.precision
    if policy is None or not policy.products or any(n.narrow for _, n in graph.of_kind("op")):
        return ""
    return (
        f"precision {policy}: no product of the model would be in {policy.products}: it wants products in modules of a "
        f"list (layers.0), with {LEAST_FEATURES} features or more on both sides, and features and rows of a microbatch "
        f"that are multiples of {MULTIPLE}; all is priced as {policy.wide}"
    )


def _use_of(graph: Graph, node: Node, name: str) -> NarrowUse | None:
    if node.target not in PRODUCTS or not _OF_A_BLOCK.search(node.module):
        return None
    activations, weights = [], []
    for position, ref in enumerate(node.refs):
        spec = graph.spec(ref)
        if spec.dtype not in ("bfloat16", "float16", "float32") or len(spec.shape) < 2:
            continue
        if ref.node in graph.from_inputs:
            activations.append(position)
        elif any(size % MULTIPLE or size < LEAST_FEATURES for size in spec.shape[-2:]):
            return None
        else:
            weights.append(position)
    rows = prod(graph.spec(node.refs[activations[0]]).shape[:-1]) if activations else 0
    if not activations or not weights or rows % MULTIPLE:
        return None
    return NarrowUse(name, tuple(activations), tuple(weights))


def _mark_parameters(graph: Graph, nodes: list[Node], start: int, name: str) -> None:
    """Mark the parameters that a weight is computed from."""
    waiting = [start]
    while waiting:
        node = graph.nodes[at := waiting.pop()]
        if node.kind == "param" and len(node.out.shape) > 1:
            nodes[at] = replace(nodes[at], narrow=NarrowUse(name))
        waiting += [ref.node for ref in node.refs]
