"""Routed experts in a graph become one operator each: the products, and the operators on each row between them.

Rows may then travel to the rank of their expert once, not once for each product
(:mod:`autopar.rules.experts.expert_block`). A block is the products of rows by the same routing that follow from each
other, all operators on the way from the first to the last, and what is added to the last by expert (a bias). Every
operator inside must work on each row by itself, as its rule says, and nothing outside may read what is made on the way;
else the products stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

import torch

from autopar.errors import RuleError
from autopar.rules.experts.expert_block import BLOCK
from autopar.rules.experts.expert_program import COMMON, EXPERT, ROW, Body, Value
from autopar.rules.experts.experts import EXPERTS
from autopar.rules.operator_call import call_of
from autopar.rules.registry import RULES, rule_for
from autopar.words.graph import Node, Ref, Spec, map_refs

LOOKUP = "aten.embedding.default"


def with_expert_blocks(nodes: Sequence[Node], read: Sequence[Ref]) -> list[Node]:
    """Return the nodes with every block in the place of its last operator; its others have no readers then.

    Args:
        nodes: the nodes of a graph.
        read: values that are read outside of the nodes: outputs, new values of buffers.
    """
    result = list(nodes)
    by_routing: dict[Ref, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.target == EXPERTS:
            by_routing.setdefault(node.args[2], []).append(i)
    for routing, products in by_routing.items():
        names = {node.name for node in result}
        block = _Block(result, routing, products, {ref.node for ref in read}).node(names)
        if block is not None:
            result[block[0]] = block[1]
    return result


class _Block:
    """The block of all products by one routing; ``read`` are the nodes that are read outside."""

    def __init__(self, nodes: Sequence[Node], routing: Ref, products: Sequence[int], read: set[int]) -> None:
        self.nodes, self.routing, self.read = nodes, routing, read
        self.readers: dict[int, set[int]] = {}
        for i in range(products[0], len(nodes)):
            for ref in nodes[i].refs:
                self.readers.setdefault(ref.node, set()).add(i)
        weight = nodes[products[0]].args[1]
        self.n_experts = self.spec(weight).shape[0]
        self.last = products[-1]
        self.inside = self._on_the_way(products)
        self._take_what_is_added()
        self.tensors: dict[Ref, str] = {}

    def spec(self, ref: Ref) -> Spec:
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec

    def _on_the_way(self, products: Sequence[int]) -> set[int]:
        """Return the operators from any product to the last one, both included, with the lookups that they read."""
        from_products = set(products)
        for i in range(products[0], self.last + 1):
            if any(ref.node in from_products for ref in self.nodes[i].refs):
                from_products.add(i)
        inside = {self.last}
        for i in range(self.last, products[0] - 1, -1):
            if i in inside:
                inside.update(ref.node for ref in self.nodes[i].refs if ref.node in from_products)
        for i in list(inside):
            inside.update(ref.node for ref in self.nodes[i].refs if self._is_lookup(ref.node))
        return inside

    def _is_lookup(self, i: int) -> bool:
        """Return whether a node looks up a row's vector by its expert."""
        node = self.nodes[i]
        return (
            node.target == LOOKUP and len(node.args) == 2 and node.args[1] == self.routing
            and self.spec(node.args[0]).shape[0] == self.n_experts
        )  # fmt: skip

    def _take_what_is_added(self) -> None:
        """Extend the block by operators that combine its result with vectors of the row's expert."""
        while self.last not in self.read and len(self.readers.get(self.last, ())) == 1:
            [reader] = self.readers[self.last]
            others = {ref.node for ref in self.nodes[reader].refs} - {self.last}
            if not others or not all(map(self._is_lookup, others)):
                return
            self.inside |= {reader, *others}
            self.last = reader

    def node(self, names: set[str]) -> tuple[int, Node] | None:
        """Return the number of the node that the block replaces, and the block, or None; ``names`` are taken."""
        order = sorted(self.inside)
        products = [i for i in order if self.nodes[i].target == EXPERTS]
        if len(products) < 2 or len({self.nodes[i].again for i in order}) > 1 or len(self.nodes[self.last].outs) > 1:
            return None
        for i in order:
            if i != self.last and (i in self.read or not self.readers.get(i, set()) <= self.inside):
                return None
            if not self._by_rows(i):
                return None
        main = self.nodes[products[0]].args
        first = {ref: self.tensors[ref] for ref in main[:2]}
        tensors = {**first, **{ref: role for ref, role in self.tensors.items() if ref not in first}}
        if tensors[main[0]] != ROW or tensors[main[1]] != EXPERT:
            return None
        body = self._body(order, tensors)
        if body is None:
            return None
        name = _free(names, self.nodes[products[0]].name.replace("linear", "block"))
        last, begin = self.nodes[self.last], self.nodes[products[0]]
        args = ([*tensors, self.routing], body.text)
        return self.last, replace(last, name=name, target=BLOCK, args=args, kwargs={}, module=begin.module,
                                  source=begin.source, hot=any(self.nodes[i].hot for i in order))  # fmt: skip

    def _by_rows(self, i: int) -> bool:
        """Return whether an operator works on each row by itself; note the roles of its tensors from outside."""
        node = self.nodes[i]
        if self._is_lookup(i):
            return self._note(node.args[0], EXPERT)
        if node.target not in RULES:
            return False
        try:
            rule = rule_for(call_of(node, self.spec))
        except RuleError:
            return False
        if rule.random or rule.localize is not None or rule.shape_arg is not None:
            return False
        row = _lead(rule.outputs[0])
        if row is None or any(_lead(term) != row for term in rule.outputs) or row not in rule.cuttable:
            return False
        if any(row in lowering.factors for lowering in rule.lowerings) or row in {*rule.in_as, *rule.out_as}:
            return False
        for ref, term in zip(node.refs, rule.inputs, strict=True):
            if ref == self.routing:
                continue
            of_rows = _lead(term) == row
            if any(row in dim for dim in term[1:]) or (ref.node in self.inside and not of_rows):
                return False
            role = EXPERT if node.target == EXPERTS and ref == node.args[1] else ROW if of_rows else COMMON
            if ref.node not in self.inside and not self._note(ref, role):
                return False
        return True

    def _note(self, ref: Ref, role: str) -> bool:
        return self.tensors.setdefault(ref, role) == role

    def _body(self, order: Sequence[int], tensors: dict[Ref, str]) -> Body | None:
        """Return the steps; None if an argument cannot be written as text."""
        numbers = {ref: Value(k) for k, ref in enumerate([*tensors, self.routing])}
        at = {i: len(numbers) + k for k, i in enumerate(order)}

        def value(ref: Ref) -> Value:
            return Value(at[ref.node], ref.out) if ref.node in at else numbers[ref]

        steps = []
        for i in order:
            node = self.nodes[i]
            if not _is_plain((node.args, node.kwargs)):
                return None
            steps.append((node.target, map_refs(node.args, value), map_refs(node.kwargs, value)))
        return Body(tuple(tensors.values()), tuple(steps))


def _lead(term: Sequence[Sequence[str]]) -> str | None:
    """Return the only factor of the first dim of a term."""
    return term[0][0] if term and len(term[0]) == 1 else None


def _is_plain(value: object) -> bool:
    """Return whether a block can write arguments as text."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, (type(None), bool, int, str, torch.dtype, Ref))


def _free(names: set[str], name: str) -> str:
    """Return a name that no node has."""
    k, free = 0, name
    while free in names:
        k += 1
        free = f"{name}_{k}"
    return free
