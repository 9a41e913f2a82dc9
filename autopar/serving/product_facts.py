"""Facts of a graph about its products: which weights they take, which rows, and what follows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

from autopar.rules.experts.expert_program import body_of
from autopar.rules.experts.experts import EXPERTS
from autopar.rules.notation import Rule
from autopar.words.graph import Graph, Ref, Spec


class StoredProduct(NamedTuple):
    """A product with a stored weight, in the graph.

    Attributes:
        node: its operator.
        source: number of the operator that makes the activations.
        activation, weight: which input is the activations, which the weight.
        parameters: names of the parameters that the weight is made of.
        format: of the weight.
        rows: ``TOKENS`` or ``REQUESTS``.
    """

    node: int
    source: int
    activation: int
    weight: int
    parameters: tuple[str, ...]
    format: str
    rows: str


def expert_matrices(graph: Graph, i: int) -> list[tuple[int, int, int]]:
    """Return ``(experts, k, n)`` of each product of an operator of experts."""
    node = graph.nodes[i]
    if node.target == EXPERTS:
        return [tuple(graph.spec(node.refs[1]).shape)]  # type: ignore[list-item]
    steps = body_of(node.args[1]).steps
    return [tuple(graph.spec(node.refs[args[1].number]).shape) for target, args, _ in steps if target == EXPERTS]  # type: ignore[misc]


def sizes_of(rule: Rule, product: StoredProduct, pieces: Mapping[str, int | Fraction]) -> tuple[int, int, int]:
    """Return ``(rows, n, k)`` of a product on one rank."""
    weight = {f for dim in rule.inputs[product.weight] for f in dim}
    rows = {f for dim in rule.inputs[product.activation] for f in dim}
    out = {f for dim in rule.outputs[0] for f in dim}

    def size(factors: set[str]) -> int:
        return prod(rule.size_at(f, pieces) for f in factors)

    n = size((weight & out) - rows)
    return max(1, size(out - (weight - rows))), n, max(1, size(weight - out))


def of_tokens(spec: Spec, tokens: int) -> bool:
    """Return whether a tensor has rows of all tokens."""
    return any(size % tokens == 0 for size in spec.shape)


def parameters_of(graph: Graph, ref: Ref) -> Iterator[str]:
    """Yield the names of the parameters that a tensor is made of."""
    node = graph.nodes[ref.node]
    if node.kind == "param":
        yield node.target
    elif node.kind == "op":
        for before in node.refs:
            if before.node not in graph.from_inputs:
                yield from parameters_of(graph, before)


def unmoved(graph: Graph, rules: Sequence[Rule | None], ref: Ref) -> int:
    """Return the operator whose values a tensor has, in another shape or format."""
    while graph.nodes[ref.node].kind == "op" and graph.nodes[ref.node].refs:
        rule, node = rules[ref.node], graph.nodes[ref.node]
        if rule is None or not (rule.kind == "none" or ".to." in node.target):
            break
        if graph.spec(node.refs[0]).n_elements != graph.spec(ref).n_elements:
            break
        ref = node.refs[0]
    return ref.node


def only_to_outputs(graph: Graph, rules: Sequence[Rule | None]) -> frozenset[int]:
    """Return the operators behind which only outputs are, and no product or attention: the head, and what follows."""
    last: set[int] = set()
    for i in range(len(graph.nodes) - 1, -1, -1):
        if graph.nodes[i].kind != "op":
            break
        readers = [r for out in range(len(graph.nodes[i].outs)) for r, _ in graph.consumers.get(Ref(i, out), ())]
        kinds = [rule.kind if (rule := rules[r]) is not None else "" for r in readers]
        if last.issuperset(readers) and not {"matmul", "conv", "attention"}.intersection(kinds):
            last.add(i)
    return frozenset(last)
