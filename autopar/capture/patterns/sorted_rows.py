"""Rows that are brought in the order of their experts and back stay in their own order.

``order = picked.flatten().argsort(); y = f(x[order // k]); out.index_add_(0, order // k, y)`` sorts the rows of a whole
batch, which no rank has. What works on each row by itself gives the same in any order: ``f(x[order]) == f(x)[order]``.
So here such a function is computed of the rows as they were, and where they are put back by the order, or added up by
it, they already stand there. Grouped products (:mod:`autopar.capture.patterns.grouped_rows`) become products of rows
with the matrix of their expert: the number that was sorted by, where the groups' ends are its running counts, and else
the group of the row's place in the order.

What reads sorted rows in any other way has them as they were traced.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.drafts import TracedProgram
from autopar.capture.graph.expert_counts import CASTS, counted_numbers
from autopar.capture.graph.exported_nodes import flat, name_of
from autopar.capture.graph.row_by_row import VIEWS, check
from autopar.capture.graph.rows_of_graph import NodeMaker, Rows, val_of
from autopar.capture.graph.run_once import is_pointwise
from autopar.capture.graph.same_masks import SHAPED, behind
from autopar.capture.passes import PROGRAM, Pass, register
from autopar.errors import CaptureError
from autopar.rules.experts.experts import EXPERTS
from autopar.words.trees import PyTree

aten = torch.ops.aten
PRODUCT = "autopar.expert_linear_in_order.default"
GROUPS = "aten.searchsorted.Tensor"
FILLED = ("aten.zeros", "aten.full", "aten.new_zeros", "aten.zeros_like", "aten.empty", "aten.empty_like")
"""What makes tensors that are the same in any order of their rows, or hold nothing."""
SORTS = ("aten.argsort.default", "aten.argsort.stable", "aten.sort.default", "aten.sort.stable")
PUTS = ("aten.index_put.default", "aten.index_put_.default")
ADDS = ("aten.index_add.default", "aten.index_add_.default", "aten.scatter_add.default", "aten.scatter_add_.default")
MOVES = ("aten.expand.default", "aten.permute.default", "aten.transpose.int", "aten.dropout.default")
"""Operators for which the dim of rows would have to be followed, and those that draw for each place."""


def keep_rows_in_place(program: TracedProgram) -> None:
    """Compute sorted rows in their own order, in a program with grouped products."""
    graph = program.graph
    if any(name_of(node.target) in (PRODUCT, GROUPS) for node in graph.nodes):
        _Unsorted(graph).rewrite()


@dataclass(frozen=True)
class _Order:
    """A permutation of rows.

    Attributes:
        node: int [rows], which row stands at each place.
        of: what was sorted.
    """

    node: Node
    of: Node

    @property
    def n(self) -> int:
        return int(self.node.meta["val"].shape[0])


class _Unsorted(NodeMaker):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.in_place: dict[Node, tuple[Node, _Order]] = {}
        """Tensors of sorted rows: the same rows in their own order, and the order."""
        self.several: dict[Node, tuple[Node, _Order]] = {}
        """What has several such results."""
        self.routing: dict[Node, Node] = {}
        """For an order, the expert of each row by the ends of groups."""
        self.orders: list[_Order] = []
        """Orders by which rows were taken, the last one last."""

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            self.node, name = node, name_of(node.target)
            if node.op != "call_function":
                continue
            with self.graph.inserting_before(node):
                if name == PRODUCT:
                    self._product(node)
                elif name == GROUPS:
                    self._grouped(node)
                elif not self._taken(node, name) and not self._put_back(node, name):
                    self._computed_in_place(node, name)

    # -- orders

    def _order(self, node: object) -> _Order | None:
        """Return the permutation that an index is, in any shape of one dim that matters."""
        unshaped = behind(node, SHAPED)
        if not isinstance(unshaped, Node) or not isinstance(unshaped.meta.get("val"), torch.Tensor):
            return None
        source = unshaped.args[0] if unshaped.target is operator.getitem and unshaped.args[1] == 1 else unshaped
        if not isinstance(source, Node) or name_of(source.target) not in SORTS or unshaped.meta["val"].dim() != 1:
            return None
        sorted_: Any = next(a for a in source.args if isinstance(a, Node))
        return _Order(unshaped, sorted_)

    def _index(self, node: object) -> tuple[_Order, int] | None:
        """Return the order in an index, and its divisor: ``order // k`` is the token of each row."""
        unshaped = behind(node, SHAPED)
        if isinstance(unshaped, Node) and unshaped.target in (aten.floor_divide.default, aten.div.Tensor_mode):
            by = unshaped.args[1]
            mode = unshaped.kwargs.get("rounding_mode")
            floor = unshaped.target is aten.floor_divide.default or mode in ("floor", "trunc")
            order = self._order(unshaped.args[0])
            return (order, by) if order is not None and isinstance(by, int) and floor else None
        order = self._order(unshaped)
        return None if order is None else (order, 1)

    def _index_of_rows(self, node: object) -> tuple[_Order, int] | None:
        """Return the order in an index that has a column for each feature, and its divisor."""
        if not isinstance(node, Node) or node.target is not aten.expand.default:
            return None
        column: Any = node.args[0]
        if column.meta["val"].dim() != 2 or column.meta["val"].shape[1] != 1:
            return None
        if column.target is aten.unsqueeze.default:
            column = column.args[0]
        return self._index(column)

    # -- in

    def _taken(self, node: Node, name: str) -> bool:
        """Check whether a node takes rows by an order."""
        index: tuple[_Order, int] | None = None
        source: Any = node.args[0] if node.args else None
        if name == "aten.index.Tensor" and len(node.args[1]) == 1:  # type: ignore[arg-type]
            index = self._index(node.args[1][0])  # type: ignore[index]
            index = index if index is not None and node.args[1][0].meta["val"].dim() == 1 else None  # type: ignore
        elif name == "aten.index_select.default" and node.args[1] == 0:
            index = self._index(node.args[2])
        elif name == "aten.gather.default" and node.args[1] == 0:
            index = self._index_of_rows(node.args[2])
            if index is not None and node.args[2].meta["val"].shape[1:] != source.meta["val"].shape[1:]:  # type: ignore
                index = None
        if index is None or source in self.in_place:
            return False
        order, each = index
        rows, shape = source, source.meta["val"].shape
        if shape[0] * each != order.n:
            return False
        if each > 1:
            rows = self.emit(aten.unsqueeze.default, (rows, 1))
            rows = self.emit(aten.expand.default, (rows, [shape[0], each, *shape[1:]]))
            rows = self.emit(aten.reshape.default, (rows, [order.n, *shape[1:]]))
        self.in_place[node] = self.emit(aten.clone.default, (rows,)), order
        self.orders.append(order)
        return True

    # -- on the way

    def _product(self, node: Node) -> None:
        rows, weight, ends = node.args
        if rows in self.in_place:
            unsorted, order = self.in_place[rows]  # type: ignore[index]
            routing = self._routing(order, ends)
            product = self.emit(torch.ops.autopar.expert_linear.default, (unsorted, weight, routing))
            self.in_place[node] = product, order
        groups = self._groups(ends, int(val_of(rows).shape[0]))
        product = self.emit(torch.ops.autopar.expert_linear.default, (rows, weight, groups))
        node.replace_all_uses_with(product)
        self.graph.erase_node(node)
        if node in self.in_place:
            self.in_place[product] = self.in_place.pop(node)

    def _grouped(self, node: Node) -> None:
        """Replace the group of each place, by the ends of groups: in the rows' own order it is their routing."""
        ends, places = node.args[:2]
        n = int(node.meta["val"].shape[0]) if node.meta["val"].dim() == 1 else 0
        whole = isinstance(places, Node) and name_of(places.target).startswith("aten.arange") and n in places.args
        if not whole or not node.kwargs.get("right") or len(node.args) > 2:
            return
        of = _counted(ends)
        orders = [o for o in self.orders if o.n == n]
        orders = [o for o in orders if of is not None and behind(o.of, CASTS) is of] or orders
        if orders:
            self.in_place[node] = self._routing(orders[-1], ends), orders[-1]

    def _groups(self, ends: object, n: int) -> Node:
        """Return the group of each place, int [n]."""
        kind = {"dtype": torch.int64, "device": val_of(ends).device}
        places = self.emit(aten.arange.start_step, (0, n, 1), kind)
        ends = self.emit(aten.to.dtype, (ends, torch.int64))
        return self.emit(aten.searchsorted.Tensor, (ends, places), {"right": True})

    def _routing(self, order: _Order, ends: Any) -> Node:
        """Return the expert of each row in its own order, int [rows]."""
        if ends not in self.routing:
            if _counted(ends) is behind(order.of, CASTS):
                routing = self.emit(aten.reshape.default, (order.of, [-1]))
                routing = self.emit(aten.to.dtype, (routing, torch.int64))
            else:
                groups = self._groups(ends, order.n)
                zeros = self.emit(aten.zeros_like.default, (groups,))
                routing = self.emit(aten.scatter.src, (zeros, 0, order.node, groups))
            self.routing[ends] = routing
        return self.routing[ends]

    def _computed_in_place(self, node: Node, name: str) -> None:
        """Note what a node makes of rows in their own order, if it works on each by itself."""
        if node.target is operator.getitem and node.args[0] in self.several:
            computed, order = self.several[node.args[0]]  # type: ignore[index]
            self.in_place[node] = self.emit(operator.getitem, (computed, node.args[1])), order
            return
        args = [n for n in node.all_input_nodes if n in self.in_place]
        schema = getattr(node.target, "_schema", None)
        if not args or schema is None or schema.is_mutable or name in MOVES or node.target is operator.getitem:
            return
        order = self.in_place[args[0]][1]
        outs = flat(node.meta["val"])
        if any(self.in_place[n][1] != order for n in args) or any(not _has_rows(v, order.n) for v in outs):
            return
        if any(not _has_rows(n.meta["val"], order.n) for n in args) or self._others_have_rows(node, args, order.n):
            return
        try:
            if name != EXPERTS:
                anywhere = [x for x in node.all_input_nodes if _is_filled(x) and _has_rows(x.meta["val"], order.n)]
                of_rows = [*args, *anywhere]
                check(node, of_rows, [Rows(order.node, n) for n in of_rows], 0, self.refused)
            elif {node.args[0], node.args[2]} != set(args):
                return
        except CaptureError:
            return
        replaced = {n: self.in_place[n][0] for n in args}
        computed = self.emit(
            node.target, torch.fx.node.map_arg(node.args, lambda n: replaced.get(n, n)),
            dict(torch.fx.node.map_arg(node.kwargs, lambda n: replaced.get(n, n))),
        )  # fmt: skip
        if isinstance(node.meta["val"], (list, tuple)):
            self.several[node] = computed, order
        else:
            self.in_place[node] = computed, order

    def _others_have_rows(self, node: Node, args: list[Node], n: int) -> bool:
        """Check whether rows that are not sorted meet those that are: they would stand at other places."""
        if name_of(node.target).split(".")[1] in VIEWS:
            return False
        others: list[Any] = [x.meta.get("val") for x in node.all_input_nodes if x not in args and not _is_filled(x)]
        rank = max(x.meta["val"].dim() for x in args)
        return is_pointwise(node) and any(_has_rows(v, n) and v.dim() >= rank for v in others)

    # -- out

    def _put_back(self, node: Node, name: str) -> bool:
        """Check whether rows are put in their places again, or added up by them."""
        args: PyTree = node.args
        if name in PUTS and len(args[1]) == 1 and args[2] in self.in_place and not any(args[3:]):
            index = self._index(args[1][0])
            rows, order = self.in_place[args[2]]
            same = index == (order, 1) and val_of(args[0]).shape == val_of(rows).shape
            return same and self._written(node, rows)
        if name == "aten.index.Tensor" and args[0] in self.in_place and len(args[1]) == 1:
            rows, order = self.in_place[args[0]]
            back = self._order(args[1][0])
            if back is not None and back.of is order.node:
                node.replace_all_uses_with(rows)
                return True
        if name in ADDS and args[1] == 0 and not node.kwargs and args[3] in self.in_place:
            index = self._index(args[2]) if "index_add" in name else self._index_of_rows(args[2])
            rows, order = self.in_place[args[3]]
            shape = list(val_of(rows).shape)
            if index is None or index[0] != order:
                return False
            if list(val_of(args[0]).shape) != [order.n // index[1], *shape[1:]]:
                return False
            if index[1] > 1:
                rows = self.emit(aten.reshape.default, (rows, [order.n // index[1], index[1], *shape[1:]]))
                rows = self.emit(aten.sum.dim_IntList, (rows, [1]))
            return self._written(node, self.emit(aten.add.Tensor, (args[0], rows)))
        return False

    def _written(self, node: Node, result: Node) -> bool:
        """Replace a node by one with the same result, which writes in place where the node did."""
        if name_of(node.target).split(".")[1].endswith("_"):
            result = self.emit(aten.copy_.default, (node.args[0], result))
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        return True


def _is_filled(node: Node) -> bool:
    return name_of(node.target).rpartition(".")[0] in FILLED


def _has_rows(val: object, n: int) -> bool:
    return isinstance(val, torch.Tensor) and val.dim() > 0 and val.shape[0] == n


def _counted(ends: object) -> Any:
    """Return the numbers of which a tensor holds the running counts, ``bincount(x).cumsum(0)``; else None."""
    total = behind(ends, CASTS)
    if not isinstance(total, Node) or total.target is not aten.cumsum.default:
        return None
    return counted_numbers(total.args[0])


register(
    Pass("sorted_rows", PROGRAM, keep_rows_in_place,
         "no rank has all rows to sort them by expert, and experts give the same for rows in any order"),
    before="experts_at_once",
)  # fmt: skip
