"""The body of turns that are alike, run once on all rows.

Turns of a loop over experts compute the same of the same rows and differ in what each expert has of its own:
parameters, or the ``e``-th part of one that all share. Here the body is written down once. Products with an expert's
matrix become products by rows (:mod:`autopar.rules.experts.experts`), and a vector or a number of an expert (a bias,
the weight of a norm, a scale) is looked up by the expert of each row.

A dropout inside draws one mask for all rows, and what it keeps is a factor that is made beside the products: so the
products and all that is between them still work on each row by itself, wherever the row is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
Emit = Callable[..., Any]
PRODUCTS = (aten.matmul.default, aten.mm.default)
TURNED = {"row_major": "ab,bc->ac", "column_major": "ab,cb->ac"}


class NotAlikeError(Exception):
    """The turns differ in more than what each expert has of its own."""


def is_pointwise(node: Node) -> bool:
    """Whether each element of the result follows from the same element of what is given."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


@dataclass(frozen=True)
class TakenRows:
    """Which rows turns work on.

    Attributes:
        gathers: tensors of rows: of which tensor they were taken, and where.
        positions: tensors of the places of rows.
    """

    gathers: Mapping[Node, tuple[Node, dict[int, int]]]
    positions: Collection[Node]


class TurnBody:
    """The body of all turns, run once.

    Args:
        expert: int [rows].
        taken: the rows that each turn takes, where they become ``each`` rows of which every one has an expert of its
            own: a turn computes a position once if any of its experts is that of the turn.
    """

    def __init__(self, emit: Emit, expert: Any, taken: TakenRows | None = None, each: int = 1) -> None:
        self.emit, self.expert, self.taken, self.each = emit, expert, taken, each
        self.made: dict[Any, Any] = {}
        self.tables: dict[Any, Any] = {}

    def of(self, nodes: Sequence[Any]) -> Any:
        """What stands for the same value of every turn.

        Raises:
            NotAlikeError: the turns do not compute the same.
        """
        first = nodes[0]
        if not isinstance(first, Node):
            if isinstance(first, (list, tuple)):
                if any(not isinstance(x, (list, tuple)) or len(x) != len(first) for x in nodes):
                    raise NotAlikeError
                return type(first)(self.of(each) for each in zip(*nodes, strict=True))
            if any(isinstance(x, Node) or type(x) is not type(first) or x != first for x in nodes):
                raise NotAlikeError
            return first
        if self.taken is not None and first in self.taken.positions:
            raise NotAlikeError
        if all(x is first for x in nodes):
            return first
        if first not in self.made and self.taken is not None and all(x in self.taken.gathers for x in nodes):
            self.made[first] = self._of_each(nodes, self.taken)
        if first not in self.made:
            if any(not isinstance(x, Node) or x.op != "call_function" or x.target != first.target for x in nodes):
                raise NotAlikeError
            if first.kwargs.keys() != nodes[-1].kwargs.keys() or len({len(x.args) for x in nodes}) > 1:
                raise NotAlikeError
            self.made[first] = self._call(nodes)
        return self.made[first]

    def _of_each(self, nodes: Sequence[Any], taken: TakenRows) -> Any:
        """Rows that were taken from a tensor, as often as each position has experts; where every turn takes those of
        its own column, what stands in the column of the expert."""
        sources = [taken.gathers[x][0] for x in nodes]
        if any(taken.gathers[x][1] != taken.gathers[nodes[0]][1] for x in nodes) or 0 not in taken.gathers[nodes[0]][1]:
            raise NotAlikeError
        whole, val = sources[0], nodes[0].meta["val"]
        if any(x is not whole for x in sources):
            whole = _columns_of(sources)
            if whole is None or list(val.shape[1:]) not in ([], [1]):
                raise NotAlikeError
            table = self.emit(aten.reshape.default, (whole, [val.shape[0], len(nodes)]))
            column = self.emit(aten.reshape.default, (self.expert, [val.shape[0], self.each]))
            of_expert = self.emit(aten.gather.default, (table, 1, column))
            return self.emit(aten.reshape.default, (of_expert, [-1, *val.shape[1:]]))
        rows = self.emit(aten.unsqueeze.default, (nodes[0].args[0], 1))
        rows = self.emit(aten.expand.default, (rows, [val.shape[0], self.each, *val.shape[1:]]))
        return self.emit(aten.reshape.default, (rows, [val.shape[0] * self.each, *val.shape[1:]]))

    def _call(self, nodes: Sequence[Any]) -> Any:
        first = nodes[0]
        if first.target is aten.linear.default:
            product = self._product(nodes, 0, 1, turned=True)
            return self._with_bias(product, nodes, 2)
        if first.target in PRODUCTS:
            return self._product(nodes, 0, 1, turned=False)
        if first.target is aten.addmm.default and not first.kwargs:
            return self._with_bias(self._product(nodes, 1, 2, turned=False), nodes, 0)
        if first.target is aten.einsum.default and (product := self._einsum(nodes)) is not None:
            return product
        if first.target is aten.layer_norm.default:
            return self._normed(nodes, lambda rows, shape, rest: (rows, shape, None, None, *rest), parameters=2)
        if first.target is aten.rms_norm.default:
            return self._normed(nodes, lambda rows, shape, rest: (rows, shape, None, *rest), parameters=1)
        if first.target is aten.dropout.default:
            return self._dropout(nodes)
        if "dropout" in str(first.target):
            raise NotAlikeError  # of whole features: every turn draws for itself
        if first.target is aten.full_like.default and [x.args[1] for x in nodes] == list(range(len(nodes))):
            return self._number_of_expert(nodes)
        one = self._beside_rows if is_pointwise(first) else self.of
        args = [one([x.args[k] for x in nodes]) for k in range(len(first.args))]
        kwargs = {name: self.of([x.kwargs[name] for x in nodes]) for name in first.kwargs}
        if first.target is operator.getitem:
            return self.emit(operator.getitem, tuple(args))
        return self.emit(first.target, tuple(args), kwargs)

    def _product(self, nodes: Sequence[Any], left: int, right: int, turned: bool) -> Any:
        """Rows by the matrix of their expert, [k n], or ``turned`` [n k]."""
        if nodes[0].kwargs or nodes[0].args[right].meta["val"].dim() != 2:
            raise NotAlikeError
        rows = self.of([x.args[left] for x in nodes])
        if rows.meta["val"].dim() != 2:
            raise NotAlikeError
        return self._by_expert(rows, self._stacked([x.args[right] for x in nodes]), turned)

    def _by_expert(self, rows: Any, weight: Any, turned: bool) -> Any:
        weight = self.emit(aten.transpose.int, (weight, 1, 2)) if turned else weight
        return self.emit(torch.ops.autopar.expert_linear.default, (rows, weight, self.expert))

    def _with_bias(self, result: Any, nodes: Sequence[Any], place: int) -> Any:
        if len(nodes[0].args) <= place or nodes[0].args[place] is None:
            return result
        return self.emit(aten.add.Tensor, (result, self._looked_up([x.args[place] for x in nodes])))

    def _einsum(self, nodes: Sequence[Any]) -> Any:
        """A product of rows with a matrix; None for any other."""
        equation, operands = nodes[0].args[0].replace(" ", ""), nodes[0].args[1]
        letters: dict[str, str] = {}
        written = "".join(letters.setdefault(c, chr(97 + len(letters))) if c.isalpha() else c for c in equation)
        if written not in TURNED.values() or len(operands) != 2 or any(x.args[0] != nodes[0].args[0] for x in nodes):
            return None
        rows = self.of([x.args[1][0] for x in nodes])
        return self._by_expert(
            rows, self._stacked([x.args[1][1] for x in nodes]), turned=written == TURNED["column_major"]
        )

    def _normed(
        self, nodes: Sequence[Any], args_of: Callable[[Any, Any, Sequence[Any]], tuple[Any, ...]], parameters: int
    ) -> Any:
        """The norm of each row, with the weight and the bias of its expert behind."""
        first = nodes[0]
        rows, shape = self.of([x.args[0] for x in nodes]), self.of([x.args[1] for x in nodes])
        given = len(first.args)
        rest = [self.of([x.args[k] for x in nodes]) for k in range(2 + parameters, given)]
        if len(shape) != 1 or rows.meta["val"].dim() != 2 or first.kwargs:
            raise NotAlikeError
        normed = self.emit(first.target, args_of(rows, shape, rest))
        for k, combined in zip(range(2, min(given, 2 + parameters)), (aten.mul.Tensor, aten.add.Tensor), strict=False):
            if first.args[k] is not None:
                normed = self.emit(combined, (normed, self._looked_up([x.args[k] for x in nodes])))
        return normed

    def _dropout(self, nodes: Sequence[Any]) -> Any:
        rows = self.of([x.args[0] for x in nodes])
        p, training = (self.of([x.args[k] for x in nodes]) for k in (1, 2))
        if not training or not p:
            return rows
        val = rows.meta["val"]
        ones = self.emit(aten.full.default, (list(val.shape), 1.0), {"dtype": val.dtype, "device": val.device})
        return self.emit(aten.mul.Tensor, (rows, self.emit(aten.dropout.default, (ones, p, True))))

    def _number_of_expert(self, nodes: Sequence[Any]) -> Any:
        """Of rows that are filled with the number of the turn, that of the expert of each."""
        val = nodes[0].meta["val"]
        if self.taken is None or any(x.args[0] not in self.taken.positions for x in nodes):
            self.of([x.args[0] for x in nodes])
        if val.dim() != 1 or val.shape[0] * self.each != self.expert.meta["val"].shape[0]:
            raise NotAlikeError
        return self.emit(aten.to.dtype, (self.expert, val.dtype))

    def _beside_rows(self, nodes: Sequence[Any]) -> Any:
        """An argument of what works on each element: rows, or what each expert has of its own."""
        first = nodes[0]
        if not isinstance(first, Node) or all(x is first for x in nodes):
            return self.of(nodes)
        try:
            return self._looked_up(nodes)
        except NotAlikeError:
            return self.of(nodes)

    def _looked_up(self, tensors: Sequence[Any]) -> Any:
        """What the expert of each row has, a vector or a number: [rows n], or [rows 1]."""
        if tensors[0].meta["val"].dim() > 1:
            raise NotAlikeError
        table = self._stacked(tensors)
        if table.meta["val"].dim() == 1:
            table = self.emit(aten.reshape.default, (table, [-1, 1]))
        return self.emit(aten.embedding.default, (table, self.expert))

    def _stacked(self, tensors: Sequence[Any]) -> Any:
        """[experts ...] of what each expert has of its own: parameters, or parts of one."""
        first = tensors[0]
        if any(not isinstance(x, Node) or (x.op == "call_function" and x.target != first.target) for x in tensors):
            raise NotAlikeError
        if first not in self.tables:
            self.tables[first] = self._table(tensors)
        return self.tables[first]

    def _table(self, tensors: Sequence[Any]) -> Any:
        first = tensors[0]
        if all(x.op == "placeholder" for x in tensors):
            if len({tuple(x.meta["val"].shape) for x in tensors}) > 1 or len(set(tensors)) < len(tensors):
                raise NotAlikeError
            return self.emit(aten.stack.default, (list(tensors),))
        if first.op != "call_function" or any(x.op != "call_function" for x in tensors):
            raise NotAlikeError
        whole: Any = _parts_of(tensors)
        if whole is not None:
            return whole
        n = first.meta["val"].dim()
        if first.kwargs or any(x.args[1:] != first.args[1:] or x.kwargs for x in tensors):
            raise NotAlikeError
        if first.target is aten.transpose.int:
            return self._of_all(tensors, [int(d) % n + 1 for d in first.args[1:]])
        if first.target in (aten.t.default, aten.numpy_T.default, aten.mT.default) and n == 2:
            return self._of_all(tensors, [1, 2])
        if first.target is aten.permute.default:
            order = [0, *(int(d) % n + 1 for d in first.args[1])]
            return self.emit(aten.permute.default, (self._stacked([x.args[0] for x in tensors]), order))
        if first.target is aten.to.dtype:
            return self.emit(aten.to.dtype, (self._stacked([x.args[0] for x in tensors]), *first.args[1:]))
        raise NotAlikeError

    def _of_all(self, tensors: Sequence[Any], dims: Sequence[int]) -> Any:
        """The transposed matrices of all experts."""
        return self.emit(aten.transpose.int, (self._stacked([x.args[0] for x in tensors]), *dims))


def _parts_of(tensors: Sequence[Any]) -> Any:
    """The tensor of which these are all the parts along its first dim, in order (``w[0], w[1], ...``); or None."""
    first = tensors[0]
    if first.target is aten.select.int:
        whole = first.args[0]
        if all(x.args == (whole, 0, k) for k, x in enumerate(tensors)):
            return whole if whole.meta["val"].shape[0] == len(tensors) else None
    if first.target is operator.getitem and first.args[0].target is aten.unbind.int:
        taken = first.args[0]
        along = taken.args[1] if len(taken.args) > 1 else 0
        if along == 0 and all(x.args == (taken, k) for k, x in enumerate(tensors)):
            return taken.args[0] if taken.args[0].meta["val"].shape[0] == len(tensors) else None
    return None


def _columns_of(tensors: Sequence[Any]) -> Any:
    """The tensor of which these are all the columns, its last dim, in order, with or without a dim of size 1 for it;
    None of others."""
    found = [_column_of(x) for x in tensors]
    whole: Any = found[0][0] if found[0] is not None else None
    same = whole is not None and found == [(whole, k) for k in range(len(tensors))]
    return whole if same and whole.meta["val"].shape[-1] == len(tensors) else None


def _column_of(tensor: Any) -> tuple[Any, int] | None:
    """The tensor that one is a column of, and which."""
    last = tensor.meta["val"].dim() - 1
    if tensor.target is aten.slice.Tensor and tensor.args[1:] and int(tensor.args[1]) % (last + 1) == last:
        begin, end, *step = (*tensor.args[2:], None, None)[:3]
        return (tensor.args[0], begin) if end == begin + 1 and step in ([], [None], [1]) else None
    if tensor.target is aten.unsqueeze.default and int(tensor.args[1]) % (last + 1) == last:
        tensor, last = tensor.args[0], last - 1
    if tensor.target is not aten.select.int or int(tensor.args[1]) % (last + 2) != last + 1:
        return None
    return tensor.args[0], tensor.args[2]


__all__ = ["Emit", "NotAlikeError", "TakenRows", "TurnBody", "is_pointwise"]
