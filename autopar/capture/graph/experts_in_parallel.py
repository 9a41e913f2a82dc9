"""Experts that are modules called next to each other, on tensors of one size: one batched computation of all.

``torch.stack([expert(part) for expert, part in zip(experts, x.unbind(1))])`` is how mixtures with a capacity, soft ones
and those of all experts run. The modules are isomorphic (:class:`.run_once.Lockstep`) and differ in their parameters,
and in the part of a tensor that they read. Their parameters are stacked, the parts are the tensor itself, and the body
runs once, with products ``emk,enk->emn`` that can be cut by expert. Such experts are joined by :data:`JOINS`, or summed
up; bodies with fewer than two products, with random numbers, or with operators that are not known to work on each
expert by itself are not batched.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod

import torch
from torch.fx import Node

from autopar.capture.graph.conditional_writes import writes
from autopar.capture.graph.exported_nodes import FxNode, is_symbolic, name_of
from autopar.capture.graph.rows_of_graph import NodeMaker
from autopar.capture.graph.run_once import (
    NORMS,
    PRODUCTS,
    Emit,
    IsomorphicBodies,
    Lockstep,
    NotIsomorphicError,
    are_parameters,
    at,
    aten,
    is_pointwise,
    parts_of,
)

JOINS = ("aten.stack.default", "aten.cat.default")
SAME = ("aten.to.dtype", "aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default",
        "aten.silu.default", "aten.gelu.default", "aten.type_as.default")  # fmt: skip
"""Pointwise operators in addition to those that torch tags."""
ALONG = {"aten.softmax.int": 1, "aten.log_softmax.int": 1, "aten.sum.dim_IntList": 1, "aten.mean.dim": 1,
         "aten.unsqueeze.default": 1, "aten.squeeze.dim": 1, "aten.select.int": 1, "aten.slice.Tensor": 1,
         "aten.chunk.default": 2, "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.glu.default": 1,
         "aten.linalg_vector_norm.default": 2}  # fmt: skip
"""Operators along dims, and the positions of these arguments."""
SHAPED = ("aten.reshape.default", "aten.view.default", "aten.transpose.int", "aten.permute.default")
LEAST_PRODUCTS = 2


def with_experts_at_once(exported: torch.export.ExportedProgram) -> None:
    """Batch experts that are called next to each other in an exported program."""
    graph = exported.graph
    if sum(name_of(node.target) in PRODUCTS for node in graph.nodes) >= 2 * LEAST_PRODUCTS:
        _Joins(graph).rewrite()


class _Joins(NodeMaker):
    def rewrite(self) -> None:
        nodes = list(self.graph.nodes)
        self.place = {node: k for k, node in enumerate(nodes)}
        self.mutable = [k for k, node in enumerate(nodes) if writes(node)]
        for node in nodes:
            if node.op == "call_function" and name_of(node.target) in JOINS:
                self._join(node, list(node.args[0]))  # type: ignore[arg-type]
            elif _adds(node) and not any(_is_sum(user) and user.args[0] is node for user in node.users):
                self._sum(node)

    def _join(self, node: FxNode, parts: list[FxNode]) -> None:
        along = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))  # type: ignore[arg-type, call-overload]
        self.node = node
        with self.graph.inserting_before(node):
            made = self._at_once(parts)
            if made is None:
                return
            n = parts[0].meta["val"].dim()
            stacked = name_of(node.target) == "aten.stack.default"
            along %= n + stacked
            order = [*range(1, along + 1), 0, *range(along + 1, n + 1)]
            if order != list(range(n + 1)):
                made = self._emit(aten.permute.default, (made, order))
            if not stacked:
                made = self._emit(aten.reshape.default, (made, list(node.meta["val"].shape)))
        node.replace_all_uses_with(made)

    def _sum(self, node: Node) -> None:
        """Rewrite a chain of additions of expert outputs."""
        terms: list[FxNode] = []
        first: FxNode = node
        while _is_sum(first) or (first is node and _adds(node)):
            terms.insert(0, first.args[1])
            first = first.args[0]
        if isinstance(first, Node) and first is not node:
            terms.insert(0, first)
        whole = [t for t in terms if isinstance(t, Node)]
        if any(not isinstance(t, Node) and t != 0 for t in terms):  # sum() begins with 0
            return
        if len(whole) < 2 or any(t.meta["val"].shape != node.meta["val"].shape for t in whole):
            return
        start: FxNode = None
        if name_of(whole[0].target) != name_of(whole[1].target):
            start, *whole = whole
        self.node = node
        with self.graph.inserting_before(node):
            made = self._at_once(whole)
            if made is None:
                return
            made = self._emit(aten.sum.dim_IntList, (made, [0]))
            if start is not None:
                made = self._emit(aten.add.Tensor, (start, made))
        node.replace_all_uses_with(made)

    def _at_once(self, parts: list[FxNode]) -> Node | None:
        """Emit [experts ...] of tensors that one expert each computes; None for other tensors."""
        if len(parts) < 2 or len(set(parts)) < len(parts) or any(not isinstance(p, Node) for p in parts):
            return None
        vals = [p.meta["val"] for p in parts]
        if any(is_symbolic(tuple(v.shape)) or v.shape != vals[0].shape or v.dtype != vals[0].dtype for v in vals):
            return None
        survey, body = _Survey(), _ExpertsInFront(self._emit)
        try:
            survey.of(parts)
            if survey.products < LEAST_PRODUCTS or not self._alone(survey.inside, parts):
                return None
            made: Node = body.of(parts)
            return made if made in body.in_front else None
        except NotIsomorphicError:
            return None

    def _alone(self, inside: set[Node], parts: Sequence[Node]) -> bool:
        """Return whether nobody else reads intermediate results of the experts, and nothing is written meanwhile."""
        if any(user not in inside for node in inside - set(parts) for user in _readers(node)):
            return False
        if any(len(_readers(part)) > 1 for part in parts):
            return False
        begin, end = min(self.place[node] for node in inside), self.place[self.node]
        return not any(begin < k < end for k in self.mutable)


class _Survey(Lockstep):
    """The nodes of all bodies, and the number of products of one, before anything is emitted."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: set[Node] = set()
        self.products = 0

    def batched(self, nodes: Sequence[Node]) -> Node:
        """Check that one operator of each expert is known to work with a dim of experts in front."""
        first = nodes[0]
        if any(x.op != first.op or not _alike(x, first) for x in nodes):
            raise NotIsomorphicError
        if are_parameters(nodes) or parts_of(nodes) is not None:
            return first
        if first.op != "call_function" or any(x.target != first.target for x in nodes) or len(set(nodes)) < len(nodes):
            raise NotIsomorphicError
        if not _is_known(first) or any(len(x.args) != len(first.args) or x.kwargs != first.kwargs for x in nodes):
            raise NotIsomorphicError
        self.inside.update(nodes)
        self.products += name_of(first.target) in PRODUCTS
        for k in range(len(first.args)):
            self.of(at(nodes, k))
        return first


class _ExpertsInFront(IsomorphicBodies):
    """The body of all experts, with a dim of experts in front of the tensors in ``in_front``."""

    def __init__(self, emit: Emit) -> None:
        super().__init__(emit)
        self.in_front: set[Node] = set()

    def batched(self, nodes: Sequence[Node]) -> Node:
        """Emit the operator of all experts."""
        if are_parameters(nodes):
            made = self.emit(aten.stack.default, (list(nodes),))
        elif (parts := parts_of(nodes)) is not None:
            made = self._whole(*parts, len(nodes))
        else:
            made = super().batched(nodes)
        if made is not nodes[0]:  # the node of the first expert takes the place of all
            self.in_front.add(made)
        return made

    def operator(self, nodes: Sequence[Node]) -> Node:
        """Emit an operator that is neither a product nor a norm."""
        first, name = nodes[0], name_of(nodes[0].target)
        args = [self.of(at(nodes, k)) for k in range(len(first.args))]
        if not any(x in self.in_front for x in args if isinstance(x, Node)):
            return first
        if first.target is operator.getitem:
            return self.emit(operator.getitem, tuple(args))
        if name == "aten.dropout.default":
            return args[0]  # type: ignore[no-any-return]
        if args[0] not in self.in_front and not (is_pointwise(first) or name in SAME):
            raise NotIsomorphicError
        if name in ("aten.reshape.default", "aten.view.default"):
            return self.emit(aten.reshape.default, (args[0], [len(nodes), *first.meta["val"].shape]))
        if name == "aten.transpose.int":
            args[1:] = map(_behind, args[1:])
        elif name == "aten.permute.default":
            n = first.meta["val"].dim()
            args[1] = [0, *(int(d) % n + 1 for d in args[1])]
        elif name in ALONG:
            place = ALONG[name]
            if len(args) <= place:
                raise NotIsomorphicError
            args[place] = [*map(_behind, args[place])] if isinstance(args[place], list) else _behind(args[place])
        else:
            rank = first.meta["val"].dim()
            args = [self._aligned(x, rank) if x in self.in_front else x for x in args]
        return self.emit(first.target, tuple(args), dict(first.kwargs))

    def _aligned(self, x: Node, rank: int) -> Node:
        """Return [experts ...] with as many dims behind as the result has for one expert."""
        experts, *shape = x.meta["val"].shape
        if len(shape) == rank:
            return x
        made = self.emit(aten.reshape.default, (x, [experts, *[1] * (rank - len(shape)), *shape]))
        self.in_front.add(made)
        return made

    def _whole(self, whole: Node, dim: int, kept: bool, experts: int) -> Node:
        """Return [experts ...] of a tensor whose parts along a dim the experts take; ``kept``: with that dim."""
        shape = list(whole.meta["val"].shape)
        if kept:
            whole = self.emit(
                aten.reshape.default, (whole, [*shape[:dim], experts, shape[dim] // experts, *shape[dim + 1 :]])
            )
        n = whole.meta["val"].dim()
        return self.emit(aten.permute.default, (whole, [dim, *(d for d in range(n) if d != dim)]))

    def product(self, nodes: Sequence[Node], left: int, right: int, turned: bool) -> Node:
        """Emit the product of each expert as one einsum."""
        x, weight = self.of(at(nodes, left)), self.of(at(nodes, right))
        if weight not in self.in_front or weight.meta["val"].dim() != 3 or not isinstance(x, Node):
            raise NotIsomorphicError
        front = int(x in self.in_front)
        *shape, k = x.meta["val"].shape
        rows = self.emit(aten.reshape.default, (x, [*shape[:front], prod(shape[front:]), k]))
        equation = f"{'e' * front}mk,{'enk' if turned else 'ekn'}->emn"
        product = self.emit(aten.einsum.default, (equation, [rows, weight]))
        return self.emit(aten.reshape.default, (product, [len(nodes), *nodes[0].meta["val"].shape]))

    def own(self, values: Sequence[FxNode], rank: int) -> Node:
        """Return a vector of each expert, or of all, to be combined with tensors of this many dims."""
        own: Node = self.of(values)
        return self._aligned(own, rank) if own in self.in_front else own

    def norm(self, nodes: Sequence[Node], parameters: int) -> Node:
        """Emit the norm for each expert, then its weight and bias."""
        own = [self.of(at(nodes, k)) for k in (0, *range(2, min(len(nodes[0].args), 2 + parameters)))]
        return super().norm(nodes, parameters) if any(x in self.in_front for x in own) else nodes[0]


def _is_known(node: Node) -> bool:
    """Return whether an operator can have a dim of experts in front."""
    name = name_of(node.target)
    if writes(node) or any(isinstance(value, Node) for value in node.kwargs.values()):
        return False
    if name == "aten.dropout.default":
        return not node.args[2] or not node.args[1]
    return (
        name in SAME or name in ALONG or name in SHAPED or name in NORMS or name in PRODUCTS
        or node.target is operator.getitem or is_pointwise(node)
    )  # fmt: skip


def _adds(node: FxNode) -> bool:
    return isinstance(node, Node) and node.target is aten.add.Tensor and not node.kwargs


def _is_sum(node: FxNode) -> bool:
    """Return whether a node adds two tensors for one reader."""
    return _adds(node) and len(_readers(node)) <= 1


def _readers(node: Node) -> list[Node]:
    """Return the users that have readers or write."""
    return [user for user in node.users if user.users or user.op == "output" or writes(user)]


def _alike(node: Node, other: Node) -> bool:
    """Return whether values have the same shapes and dtypes."""
    def shapes(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [shapes(v) for v in value]
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    return bool(shapes(node.meta.get("val")) == shapes(other.meta.get("val")))


def _behind(dim: int) -> int:
    """Return a dim's position after one more was put in front."""
    return dim + 1 if dim >= 0 else dim
