"""Experts that are modules of their own and compute tensors of one size, beside each other: one computation of all.

``torch.stack([expert(part) for expert, part in zip(experts, x.unbind(1))])`` is how mixtures with a capacity, soft ones
and those of all experts run. The modules compute alike and differ in their parameters, and in which part of a tensor
they take. Here their parameters are stacked, the parts are the tensor itself, and the body runs once, with products
``emk,enk->emn`` that can be cut by expert. What is joined by :data:`JOINS`, or summed up, may be such experts; bodies
with fewer than two products, with random numbers, or with anything that is not known to work on each expert by itself
stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.graph.conditional_writes import writes
from autopar.capture.graph.exported_nodes import is_symbolic, name_of
from autopar.capture.graph.rows_of_graph import NodeMaker
from autopar.capture.graph.run_once import NotAlikeError, is_pointwise

aten = torch.ops.aten
JOINS = ("aten.stack.default", "aten.cat.default")
SAME = ("aten.to.dtype", "aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default",
        "aten.silu.default", "aten.gelu.default", "aten.type_as.default")  # fmt: skip
"""Operators that work on each element beside those that torch says do."""
ALONG = {"aten.softmax.int": 1, "aten.log_softmax.int": 1, "aten.sum.dim_IntList": 1, "aten.mean.dim": 1,
         "aten.unsqueeze.default": 1, "aten.squeeze.dim": 1, "aten.select.int": 1, "aten.slice.Tensor": 1,
         "aten.chunk.default": 2, "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.glu.default": 1,
         "aten.linalg_vector_norm.default": 2}  # fmt: skip
"""Operators along dims, and where these stand."""
PRODUCTS = ("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.addmm.default")
LEAST_PRODUCTS = 2


def with_experts_at_once(exported: Any) -> None:
    """Rewrites experts beside each other in an exported program."""
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

    def _join(self, node: Node, parts: list[Any]) -> None:
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
        """A sum of what experts give, one added to the other."""
        terms: list[Any] = []
        first: Any = node
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
        start: Any = None
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

    def _at_once(self, parts: list[Any]) -> Node | None:
        """[experts ...] of the tensors, each of which an expert makes; None where they are no such."""
        if len(parts) < 2 or len(set(parts)) < len(parts) or any(not isinstance(p, Node) for p in parts):
            return None
        vals = [p.meta["val"] for p in parts]
        if any(is_symbolic(tuple(v.shape)) or v.shape != vals[0].shape or v.dtype != vals[0].dtype for v in vals):
            return None
        body = _Body(self)
        try:
            body.look(parts)
            if body.products < LEAST_PRODUCTS or not self._alone(body.inside, parts):
                return None
            made = body.of(parts)
            return made if made in body.batched else None  # type: ignore[no-any-return]
        except NotAlikeError:
            return None

    def _alone(self, inside: set[Node], parts: Sequence[Node]) -> bool:
        """Whether nobody else reads what experts make on their way, and nothing is written meanwhile."""
        if any(user not in inside for node in inside - set(parts) for user in _readers(node)):
            return False
        if any(len(_readers(part)) > 1 for part in parts):
            return False
        begin, end = min(self.place[node] for node in inside), self.place[self.node]
        return not any(begin < k < end for k in self.mutable)


class _Body:
    """What all experts compute, with a dim of experts in front.

    Args:
        joins: makes operators.
    """

    def __init__(self, joins: _Joins) -> None:
        self.emit = joins._emit
        self.inside: set[Node] = set()
        self.products = 0
        self.made: dict[Node, Node] = {}
        self.batched: set[Node] = set()
        self.seen: set[tuple[Any, ...]] = set()

    # -- whether they are alike

    def look(self, nodes: Sequence[Any]) -> None:
        """Note what the experts compute.

        Raises:
            NotAlikeError: it is not known to be the same of all.
        """
        first = nodes[0]
        if not isinstance(first, Node):
            if isinstance(first, (list, tuple)):
                if any(not isinstance(x, (list, tuple)) or len(x) != len(first) for x in nodes):
                    raise NotAlikeError
                for each in zip(*nodes, strict=True):
                    self.look(each)
            elif any(isinstance(x, Node) or type(x) is not type(first) or x != first for x in nodes):
                raise NotAlikeError
            return
        if all(x is first for x in nodes) or tuple(nodes) in self.seen:
            return
        self.seen.add(tuple(nodes))
        if any(not isinstance(x, Node) or x.op != first.op or not _alike(x, first) for x in nodes):
            raise NotAlikeError
        if _are_parameters(nodes) or _pieces_of(nodes) is not None:
            return
        if first.op != "call_function" or any(x.target != first.target for x in nodes) or len(set(nodes)) < len(nodes):
            raise NotAlikeError
        if not self._is_known(first) or any(len(x.args) != len(first.args) or x.kwargs != first.kwargs for x in nodes):
            raise NotAlikeError
        self.inside.update(nodes)
        self.products += name_of(first.target) in PRODUCTS
        for k in range(len(first.args)):
            self.look([x.args[k] for x in nodes])

    @staticmethod
    def _is_known(node: Node) -> bool:
        name = name_of(node.target)
        if writes(node) or any(isinstance(value, Node) for value in node.kwargs.values()):
            return False
        if name == "aten.dropout.default":
            return not node.args[2] or not node.args[1]
        shaped = ("aten.reshape.default", "aten.view.default", "aten.transpose.int", "aten.permute.default")
        norms = ("aten.layer_norm.default", "aten.rms_norm.default")
        plain = name in SAME or name in ALONG or name in shaped or name in norms or node.target is operator.getitem
        return plain or name in PRODUCTS or is_pointwise(node)

    # -- the body, once

    def of(self, nodes: Sequence[Any]) -> Any:
        """What stands for the same value of every expert.

        Raises:
            NotAlikeError: it cannot be written down for all at once.
        """
        first = nodes[0]
        if not isinstance(first, Node):
            if isinstance(first, (list, tuple)):
                return type(first)(self.of(each) for each in zip(*nodes, strict=True))
            return first
        if all(x is first for x in nodes):
            return first
        if first not in self.made:
            self.made[first] = made = self._made(nodes)
            if made is not first:  # that of the first expert is that of all
                self.batched.add(made)
        return self.made[first]

    def _made(self, nodes: Sequence[Any]) -> Node:
        first, name = nodes[0], name_of(nodes[0].target)
        if _are_parameters(nodes):
            return self.emit(aten.stack.default, (list(nodes),))
        if (piece := _pieces_of(nodes)) is not None:
            return self._whole(*piece, len(nodes))
        if name in PRODUCTS:
            return self._product(nodes)
        if name in ("aten.layer_norm.default", "aten.rms_norm.default"):
            return self._normed(nodes)
        args = [self.of([x.args[k] for x in nodes]) for k in range(len(first.args))]
        kwargs = dict(first.kwargs)
        if not any(x in self.batched for x in args if isinstance(x, Node)):
            return first  # type: ignore[no-any-return]
        if first.target is operator.getitem:
            return self.emit(operator.getitem, tuple(args))
        if name == "aten.dropout.default":
            return args[0]  # type: ignore[no-any-return]
        if args[0] not in self.batched and not (is_pointwise(first) or name in SAME):
            raise NotAlikeError
        if name in ("aten.reshape.default", "aten.view.default"):
            return self.emit(aten.reshape.default, (args[0], [len(nodes), *first.meta["val"].shape]))
        if name == "aten.transpose.int":
            args[1:] = [_behind(d) for d in args[1:]]
        elif name == "aten.permute.default":
            n = first.meta["val"].dim()
            args[1] = [0, *(int(d) % n + 1 for d in args[1])]
        elif name in ALONG:
            place = ALONG[name]
            if len(args) <= place:
                raise NotAlikeError
            args[place] = [*map(_behind, args[place])] if isinstance(args[place], list) else _behind(args[place])
        else:
            rank = first.meta["val"].dim()
            args = [self._aligned(x, rank) if x in self.batched else x for x in args]
        return self.emit(first.target, tuple(args), kwargs)

    def _aligned(self, x: Node, rank: int) -> Node:
        """[experts ...] with as many dims behind as the result has for one expert."""
        experts, *shape = x.meta["val"].shape
        if len(shape) == rank:
            return x
        made = self.emit(aten.reshape.default, (x, [experts, *[1] * (rank - len(shape)), *shape]))
        self.batched.add(made)
        return made

    def _whole(self, whole: Node, dim: int, kept: bool, experts: int) -> Node:
        """[experts ...] of a tensor whose parts along a dim the experts take; ``kept``: each has that dim, too."""
        shape = list(whole.meta["val"].shape)
        if kept:
            whole = self.emit(
                aten.reshape.default, (whole, [*shape[:dim], experts, shape[dim] // experts, *shape[dim + 1 :]])
            )
        n = whole.meta["val"].dim()
        return self.emit(aten.permute.default, (whole, [dim, *(d for d in range(n) if d != dim)]))

    def _product(self, nodes: Sequence[Any]) -> Node:
        first, name = nodes[0], name_of(nodes[0].target)
        left, right, bias = (1, 2, 0) if name == "aten.addmm.default" else (0, 1, 2)
        if first.kwargs:
            raise NotAlikeError
        weights = [x.args[right] for x in nodes]
        x, weight = self.of([x.args[left] for x in nodes]), self.of(weights)
        if weight not in self.batched or weight.meta["val"].dim() != 3 or not isinstance(x, Node):
            raise NotAlikeError
        of_weight = "enk" if name == "aten.linear.default" else "ekn"
        out = list(first.meta["val"].shape)
        if x in self.batched:
            experts, *shape = x.meta["val"].shape
            rows = self.emit(aten.reshape.default, (x, [experts, prod(shape[:-1]), shape[-1]]))
            product = self.emit(aten.einsum.default, (f"emk,{of_weight}->emn", [rows, weight]))
        else:
            shape = list(x.meta["val"].shape)
            rows = self.emit(aten.reshape.default, (x, [prod(shape[:-1]), shape[-1]]))
            product = self.emit(aten.einsum.default, (f"mk,{of_weight}->emn", [rows, weight]))
        made = self.emit(aten.reshape.default, (product, [len(nodes), *out]))
        if len(first.args) > bias and first.args[bias] is not None and (bias == 2 or name == "aten.addmm.default"):
            made = self.emit(aten.add.Tensor, (made, self._of_own(nodes, bias, len(out))))
        return made

    def _of_own(self, nodes: Sequence[Any], k: int, rank: int) -> Any:
        """A vector of each expert, or of all, to be combined with tensors of this many dims."""
        own = self.of([x.args[k] for x in nodes])
        return self._aligned(own, rank) if own in self.batched else own

    def _normed(self, nodes: Sequence[Any]) -> Node:
        """The norm for each expert, with its weight and bias behind."""
        first = nodes[0]
        parameters = 2 if name_of(first.target) == "aten.layer_norm.default" else 1
        x, shape = self.of([x.args[0] for x in nodes]), first.args[1]
        own = [self.of([x.args[k] for x in nodes]) for k in range(2, min(len(first.args), 2 + parameters))]
        if x not in self.batched and not any(w in self.batched for w in own):
            return first  # type: ignore[no-any-return]
        if first.kwargs:
            raise NotAlikeError
        rest = first.args[2 + parameters :]
        made = self.emit(first.target, (x, shape, *[None] * parameters, *rest))
        rank = first.meta["val"].dim()
        for k, combined in zip(range(2, min(len(first.args), 2 + parameters)), (aten.mul.Tensor, aten.add.Tensor),
                               strict=False):  # fmt: skip
            if first.args[k] is not None:
                made = self.emit(combined, (made, self._of_own(nodes, k, rank)))
        return made


def _adds(node: Any) -> bool:
    return isinstance(node, Node) and node.target is aten.add.Tensor and not node.kwargs


def _is_sum(node: Any) -> bool:
    """Whether a node adds two tensors, for one reader."""
    return _adds(node) and len(_readers(node)) <= 1


def _readers(node: Node) -> list[Node]:
    """Users that somebody reads, or that write."""
    return [user for user in node.users if user.users or user.op == "output" or writes(user)]


def _alike(node: Node, other: Node) -> bool:
    """Whether values have the same shapes and dtypes."""
    def shapes(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [shapes(v) for v in value]
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    return bool(shapes(node.meta.get("val")) == shapes(other.meta.get("val")))


def _are_parameters(nodes: Sequence[Any]) -> bool:
    return all(x.op == "placeholder" for x in nodes) and len(set(nodes)) == len(nodes)


def _pieces_of(nodes: Sequence[Any]) -> tuple[Node, int, bool] | None:
    """The tensor of which these are all the equal parts along a dim, in order; the dim, and whether parts keep it."""
    first, n = nodes[0], len(nodes)
    if first.op != "call_function":
        return None
    if first.target is aten.select.int:
        whole, dim = first.args[0], int(first.args[1]) % first.args[0].meta["val"].dim()
        places = [(x.target is first.target and x.args[0], *x.args[1:]) for x in nodes]
        same = places == [(whole, first.args[1], k) for k in range(n)]
        return (whole, dim, False) if same and whole.meta["val"].shape[dim] == n else None
    if first.target is aten.slice.Tensor and len(first.args) >= 4:
        whole, dim, start, end = first.args[:4]
        if any(x.target is not first.target for x in nodes) or not (isinstance(start, int) and isinstance(end, int)):
            return None
        width = end - start
        same = [x.args[:4] for x in nodes] == [(whole, dim, k * width, (k + 1) * width) for k in range(n)]
        dim = int(dim) % whole.meta["val"].dim()
        every_one = same and all(x.args[4:] in ((), (1,)) for x in nodes)
        return (whole, dim, True) if every_one and whole.meta["val"].shape[dim] == n * width else None
    if first.target is not operator.getitem or any(x.target is not operator.getitem for x in nodes):
        return None
    source = first.args[0]
    if [x.args for x in nodes] != [(source, k) for k in range(n)] or len(source.meta["val"]) != n:
        return None
    name, whole = name_of(source.target), source.args[0]
    if name == "aten.unbind.int":
        return whole, int(source.args[1] if len(source.args) > 1 else 0) % whole.meta["val"].dim(), False
    if name not in ("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default"):
        return None
    dim = int(source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)) % whole.meta["val"].dim()
    return (whole, dim, True) if len({tuple(v.shape) for v in source.meta["val"]}) == 1 else None


def _behind(dim: int) -> int:
    """A dim where one more stands in front."""
    return dim + 1 if dim >= 0 else dim


__all__ = ["with_experts_at_once"]
