"""Which products of a graph its policy makes narrow, and which parameters are their weights.

A product in a format that runs becomes the operator that multiplies so (:mod:`autopar.rules.families.narrow_linear`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.errors import CaptureError
from autopar.words.graph import Graph, Node, Ref
from autopar.words.narrow_products import FORMATS, NARROW_LINEAR, NarrowUse
from autopar.words.precision import Precision

PRODUCTS = frozenset({
    "aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default", "aten.bmm.default",
    "aten._grouped_mm.default", "autopar.expert_block.default",
})  # fmt: skip
"""Operators that multiply activations by weights."""
MULTIPLE = 16
"""Sizes of narrow products are multiples of it, as the kernels want (cuBLAS, torch._scaled_mm)."""
LEAST_FEATURES = 512
"""Products with fewer features on a side stay wide unless they are named: they are bound by memory, and routers over
experts, which software keeps wide, are such."""
_OF_A_BLOCK = re.compile(r"(^|\.)\d+(\.|$)")


def with_narrow_products(graph: Graph) -> Graph:
    """Make those products of a graph narrow that its policy names, and mark the parameters that they read as weights.

    These are products of activations by two-dimensional weights (or a stack of them, as of experts) in modules that
    the policy names; if it names none, in modules that stand in a list (``layers.3.mlp``): those before and after the
    list, such as logits, stay wide, and so do small products, such as of routers over experts. Features are multiples
    of 16 in either case.

    Raises:
        CaptureError: the policy names modules, and none of them has such a product.
    """
    policy = graph.precision
    if policy is None or policy.narrow is None:
        return graph
    nodes, read_by = list(graph.nodes), dict[Ref, int]()
    uses = {i: use for i, node in enumerate(nodes) if (use := _use_of(graph, node, policy.products)) is not None}
    if policy.modules and not uses:
        raise CaptureError(f"precision {policy}: {_what_is_wanted(graph)}; give other patterns, or leave modules out")
    for i, use in uses.items():
        for position in use.activations:
            read_by[nodes[i].refs[position]] = read_by.get(nodes[i].refs[position], 0) + 1
    for i, use in uses.items():
        shared = max(read_by[nodes[i].refs[position]] for position in use.activations)
        marked = replace(nodes[i], narrow=use._replace(shared=shared))
        nodes[i] = _as_operator(marked) if policy.narrow.runs else marked
        for position in use.weights:
            _mark_parameters(graph, nodes, graph.nodes[i].refs[position].node, policy.products)
    if policy.narrow.runs:
        for number, node in enumerate(nodes):
            if node.kind == "param" and node.narrow is not None:
                readers = graph.consumers.get(Ref(number), [])
                alone = all(nodes[i].target == NARROW_LINEAR and nodes[i].refs[1] == Ref(number) for i, _ in readers)
                nodes[number] = replace(node, narrow=node.narrow._replace(gathers=alone))
    return replace(graph, nodes=tuple(nodes))


def none_narrow(graph: Graph) -> str:
    """Return what is wrong where a policy asks for narrow products and a graph has none; empty if nothing is."""
    policy = graph.precision
    if policy is None or not policy.products or any(n.narrow for _, n in graph.of_kind("op")):
        return ""
    return f"precision {policy}: {_what_is_wanted(graph)}; all is as under {policy.wide}"


def check_products_run(graph: Graph) -> None:
    """Refuse to run a graph with narrow products that no program multiplies so.

    Raises:
        CaptureError: with the first such product, and what to do.
    """
    if graph.precision is None:
        return
    graph.precision.check_runs()
    for _, node in graph.of_kind("op"):
        if node.narrow is not None and node.target != NARROW_LINEAR:
            of_experts = "products of experts" if _is_of_experts(node) else node.target
            raise CaptureError(
                f"precision {graph.precision}: {of_experts} in '{node.module}' can be planned and priced in "
                f"{node.narrow.format}, but not run\n  leave them wide: precision='{_without(graph.precision, node)}'"
            )


def with_wide_products(graph: Graph) -> Graph:
    """Return the graph with torch's products in the place of narrow ones: that of the model as it is written."""

    def wide(node: Node) -> Node:
        if node.target != NARROW_LINEAR:
            return node
        x, weight, bias, _, transposed = node.args
        if not transposed:
            return replace(node, target="aten.linear.default", args=(x, weight, bias), narrow=None)
        if bias is None:
            return replace(node, target="aten.matmul.default", args=(x, weight), narrow=None)
        return replace(node, target="aten.addmm.default", args=(bias, x, weight), narrow=None)

    return replace(graph, nodes=tuple(map(wide, graph.nodes)))


def _without(policy: Precision, node: Node) -> Precision:
    """Return a policy with patterns that leave out a node's module and all that are called alike."""
    alike = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", node.module)
    return replace(policy, modules=(*(policy.modules or ("*.[0-9]*.*",)), f"!{alike}"))


def _what_is_wanted(graph: Graph) -> str:
    policy = graph.precision
    assert policy is not None
    where = f"{' or '.join(policy.modules)}" if policy.modules else "a list (layers.0)"
    least = "" if policy.modules else f"{LEAST_FEATURES} features or more on both sides, "
    return (
        f"no product of the model would be in {policy.products}: it wants products in modules of {where}, with {least}"
        f"features that are multiples of {MULTIPLE}"
    )


def _use_of(graph: Graph, node: Node, name: str) -> NarrowUse | None:
    policy = graph.precision
    assert policy is not None
    named = policy.picks(node.module)
    if node.target not in PRODUCTS or named is False or (named is None and not _OF_A_BLOCK.search(node.module)):
        return None
    least = MULTIPLE if named else LEAST_FEATURES
    activations, weights = [], []
    for position, ref in enumerate(node.refs):
        spec = graph.spec(ref)
        if spec.dtype not in ("bfloat16", "float16", "float32", "float64") or len(spec.shape) < 2:
            continue
        if ref.node in graph.from_inputs:
            activations.append(position)
        elif any(size % MULTIPLE or size < least for size in spec.shape[-2:]):
            return None
        else:
            weights.append(position)
    if not activations or not weights:
        return None
    use = NarrowUse(name, tuple(activations), tuple(weights))
    return use if not FORMATS[name].runs or _is_of_experts(node) or _can_be_operator(graph, node, use) else None


def _is_of_experts(node: Node) -> bool:
    return node.target in ("aten._grouped_mm.default", "autopar.expert_block.default")


def _can_be_operator(graph: Graph, node: Node, use: NarrowUse) -> bool:
    """Return whether a product is ``x @ weight + bias``, with one matrix of weights and nothing else."""
    if len(use.activations) != 1 or len(use.weights) != 1 or len(graph.spec(node.refs[use.weights[0]]).shape) != 2:
        return False
    if node.target == "aten.addmm.default":
        bias = graph.spec(node.refs[0]).shape
        factors = (*node.args[3:], *node.kwargs.values())
        return use.activations == (1,) and len(bias) == 1 and bias[0] == node.out.shape[-1] and set(factors) <= {1}
    return use.activations == (0,) and use.weights == (1,) and node.target != "aten.bmm.default"


def _as_operator(node: Node) -> Node:
    """Return a marked product as the operator that multiplies so; experts stay what they are."""
    if _is_of_experts(node):
        return node
    assert node.narrow is not None
    if node.target == "aten.addmm.default":
        bias, x, weight = node.args[:3]
    else:
        (x, weight), bias = node.args[:2], node.args[2] if len(node.args) > 2 else None
    transposed = node.target != "aten.linear.default"
    return replace(
        node, target=NARROW_LINEAR, args=(x, weight, bias, node.narrow.format, transposed), kwargs={},
        narrow=node.narrow._replace(activations=(0,), weights=(1,)),
    )  # fmt: skip


def _mark_parameters(graph: Graph, nodes: list[Node], start: int, name: str) -> None:
    """Mark the parameters that a weight is computed from."""
    waiting = [start]
    while waiting:
        node = graph.nodes[at := waiting.pop()]
        if node.kind == "param" and len(node.out.shape) > 1:
            nodes[at] = replace(nodes[at], narrow=NarrowUse(name))
        waiting += [ref.node for ref in node.refs]
