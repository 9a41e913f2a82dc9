"""Isomorphic bodies of experts, batched: each is walked in lockstep with the others, and written once.

The bodies are what the iterations of a loop over experts compute, on all rows (:class:`TurnBody`), or modules that are
called next to each other (:mod:`.experts_in_parallel`). They must agree in operators and literals; where they read
different tensors, such as parameters, one tensor of all experts takes their place.

In a loop, products with an expert's matrix become products by rows (:mod:`autopar.rules.experts.experts`), and a vector
or a number of an expert (a bias, the weight of a norm, a scale) is looked up by the expert of each row. A dropout draws
one mask for all rows, and what it keeps is a factor that is computed apart from the products: so the products and all
that is between them still work on each row by itself, wherever the row is.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import Target

from autopar.capture.graph.exported_nodes import FxNode, name_of
from autopar.words.trees import PyTree

aten = torch.ops.aten
PRODUCTS = {"aten.linear.default": (0, 1, 2), "aten.matmul.default": (0, 1, 2), "aten.mm.default": (0, 1, 2),
            "aten.addmm.default": (1, 2, 0)}  # fmt: skip
"""Positions of the rows, the matrix and the bias, if there is one."""
NORMS = {"aten.layer_norm.default": 2, "aten.rms_norm.default": 1}
"""Numbers of parameters."""
TURNED = {"ab,bc->ac": False, "ab,cb->ac": True}
"""Einsums of rows with a matrix, and whether its columns are contracted."""
TRANSPOSED = (aten.t.default, aten.numpy_T.default, aten.mT.default)
Emit = Callable[..., Node]
"""Creates a node of a target, args and kwargs."""


class NotIsomorphicError(Exception):
    """The bodies differ in more than the tensors of each expert."""



class Lockstep(ABC):
    """A walk through the bodies of all experts at once, from their results back to what they read.

    All methods take the corresponding values of the experts and raise :class:`NotIsomorphicError`. A node that one
    expert uses in two places may correspond to different nodes of another expert, so results are kept by all of them.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Node, ...], Node] = {}

    def of(self, values: Sequence[PyTree]) -> PyTree:
        """Return the value that takes the place of the corresponding values of all experts."""
        first = values[0]
        if isinstance(first, (list, tuple)):
            if any(not isinstance(x, (list, tuple)) or len(x) != len(first) for x in values):
                raise NotIsomorphicError
            return type(first)(self.of(each) for each in zip(*values, strict=True))
        if not isinstance(first, Node):
            if any(isinstance(x, Node) or type(x) is not type(first) or x != first for x in values):
                raise NotIsomorphicError
            return first
        if all(x is first for x in values):
            return first
        if any(not isinstance(x, Node) for x in values):
            raise NotIsomorphicError
        nodes = tuple(values)
        if nodes not in self.made:
            self.made[nodes] = self.batched(nodes)
        return self.made[nodes]

    @abstractmethod
    def batched(self, nodes: Sequence[Node]) -> Node:
        """Return the node that takes the place of different nodes."""


class IsomorphicBodies(Lockstep):
    """The body of all experts, written once; subclasses say how operators are batched."""

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self.emit = emit

    def batched(self, nodes: Sequence[Node]) -> Node:
        """Emit the batched operator in the place of one of each expert."""
        first, name = nodes[0], name_of(nodes[0].target)
        if name in PRODUCTS:
            left, right, bias = PRODUCTS[name]
            if first.kwargs:
                raise NotIsomorphicError
            product = self.product(nodes, left, right, turned=name == "aten.linear.default")
            return self.combined(aten.add.Tensor, product, nodes, bias)
        if name in NORMS:
            return self.norm(nodes, NORMS[name])
        return self.operator(nodes)

    def norm(self, nodes: Sequence[Node], parameters: int) -> Node:
        """Emit the norm without parameters, then the weight and the bias of each expert."""
        first = nodes[0]
        rows, shape = self.of(at(nodes, 0)), self.of(at(nodes, 1))
        rest = [self.of(at(nodes, k)) for k in range(2 + parameters, len(first.args))]
        if first.kwargs:
            raise NotIsomorphicError
        made = self.emit(first.target, (rows, shape, *[None] * parameters, *rest))
        for k, combine in zip(range(2, 2 + parameters), (aten.mul.Tensor, aten.add.Tensor), strict=False):
            made = self.combined(combine, made, nodes, k)
        return made

    def combined(self, combine: Target, made: Node, nodes: Sequence[Node], place: int) -> Node:
        """Combine a result with an argument of each expert, if the operators have one."""
        if len(nodes[0].args) <= place or nodes[0].args[place] is None:
            return made
        return self.emit(combine, (made, self.own(at(nodes, place), nodes[0].meta["val"].dim())))

    @abstractmethod
    def product(self, nodes: Sequence[Node], left: int, right: int, turned: bool) -> Node:
        """Emit the product of the rows at `left` with each expert's matrix at `right`, [k n] or, if `turned`, [n k]."""

    @abstractmethod
    def own(self, values: Sequence[FxNode], rank: int) -> Node:
        """Return a vector or number of each expert, to be combined with a tensor of this rank per expert."""

    @abstractmethod
    def operator(self, nodes: Sequence[Node]) -> Node:
        """Emit any other operator."""


def at(nodes: Sequence[Node], k: int) -> list[FxNode]:
    """Return an argument of each node."""
    return [x.args[k] for x in nodes]


def is_pointwise(node: Node) -> bool:
    """Return whether each element of the result follows from the same element of the arguments."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def are_parameters(nodes: Sequence[Node]) -> bool:
    """Return whether all are inputs of the graph, each another one."""
    return all(x.op == "placeholder" for x in nodes) and len(set(nodes)) == len(nodes)


def parts_of(nodes: Sequence[FxNode]) -> tuple[Node, int, bool] | None:
    """Return the tensor whose equal parts along a dim, in order, are the nodes; the dim; whether parts keep the dim."""
    first, n = nodes[0], len(nodes)
    if first.op != "call_function" or any(x.target is not first.target for x in nodes):
        return None
    if first.target is aten.select.int:
        whole, dim = first.args[0], int(first.args[1]) % first.args[0].meta["val"].dim()
        same = [x.args for x in nodes] == [(whole, first.args[1], k) for k in range(n)]
        return (whole, dim, False) if same and whole.meta["val"].shape[dim] == n else None
    if first.target is aten.slice.Tensor and len(first.args) >= 4:
        whole, dim, start, end = first.args[:4]
        if not (isinstance(start, int) and isinstance(end, int)):
            return None
        width = end - start
        same = [x.args[:4] for x in nodes] == [(whole, dim, k * width, (k + 1) * width) for k in range(n)]
        dim = int(dim) % whole.meta["val"].dim()
        every_one = same and all(x.args[4:] in ((), (1,)) for x in nodes)
        return (whole, dim, True) if every_one and whole.meta["val"].shape[dim] == n * width else None
    if first.target is not operator.getitem:
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


@dataclass(frozen=True)
class TakenRows:
    """The rows that iterations work on.

    Attributes:
        gathers: tensors of rows: of which tensor they were taken, and where.
        positions: tensors of the places of rows.
    """

    gathers: Mapping[Node, tuple[Node, dict[int, int]]]
    positions: Collection[Node]


class TurnBody(IsomorphicBodies):
    """The body of all iterations, on all rows.

    Args:
        expert: int [rows].
        taken: the rows that each iteration takes, where they become ``each`` rows of which every one has an expert of
            its own: an iteration computes a position once if any of its experts is that of the iteration.
    """

    def __init__(self, emit: Emit, expert: Node, taken: TakenRows | None = None, each: int = 1) -> None:
        super().__init__(emit)
        self.expert, self.taken, self.each = expert, taken, each
        self.tables: dict[tuple[Node, ...], Node] = {}

    def of(self, values: Sequence[PyTree]) -> PyTree:
        """Return the value that takes the place of the corresponding values of all iterations."""
        if self.taken is not None and isinstance(values[0], Node) and values[0] in self.taken.positions:
            raise NotIsomorphicError
        return super().of(values)

    def batched(self, nodes: Sequence[Node]) -> Node:
        """Emit the operator on all rows in the place of one of each iteration."""
        first = nodes[0]
        if self.taken is not None and all(x in self.taken.gathers for x in nodes):
            return self._of_each(nodes, self.taken)
        if any(x.op != "call_function" or x.target != first.target for x in nodes):
            raise NotIsomorphicError
        if first.kwargs.keys() != nodes[-1].kwargs.keys() or len({len(x.args) for x in nodes}) > 1:
            raise NotIsomorphicError
        return super().batched(nodes)

    def _of_each(self, nodes: Sequence[Node], taken: TakenRows) -> Node:
        """Repeat each taken row once per expert of its position.

        Where every expert reads a column of its own, take that column.
        """
        sources = [taken.gathers[x][0] for x in nodes]
        if any(taken.gathers[x][1] != taken.gathers[nodes[0]][1] for x in nodes) or 0 not in taken.gathers[nodes[0]][1]:
            raise NotIsomorphicError
        val = nodes[0].meta["val"]
        if any(x is not sources[0] for x in sources):
            whole = _columns_of(sources)
            if whole is None or list(val.shape[1:]) not in ([], [1]):
                raise NotIsomorphicError
            table = self.emit(aten.reshape.default, (whole, [val.shape[0], len(nodes)]))
            column = self.emit(aten.reshape.default, (self.expert, [val.shape[0], self.each]))
            of_expert = self.emit(aten.gather.default, (table, 1, column))
            return self.emit(aten.reshape.default, (of_expert, [-1, *val.shape[1:]]))
        rows = self.emit(aten.unsqueeze.default, (nodes[0].args[0], 1))
        rows = self.emit(aten.expand.default, (rows, [val.shape[0], self.each, *val.shape[1:]]))
        return self.emit(aten.reshape.default, (rows, [val.shape[0] * self.each, *val.shape[1:]]))

    def operator(self, nodes: Sequence[Node]) -> Node:
        """Emit an operator that is neither a product nor a norm."""
        first: FxNode = nodes[0]
        if first.target is aten.einsum.default and (product := self._einsum(nodes)) is not None:
            return product
        if first.target is aten.dropout.default:
            return self._dropout(nodes)
        if "dropout" in str(first.target):
            raise NotIsomorphicError  # of whole features: every iteration draws for itself
        if first.target is aten.full_like.default and at(nodes, 1) == list(range(len(nodes))):
            return self._number_of_expert(nodes)
        argument = self._rows_or_own if is_pointwise(first) else self.of
        args = tuple(argument(at(nodes, k)) for k in range(len(first.args)))
        kwargs = {name: self.of([x.kwargs[name] for x in nodes]) for name in first.kwargs}
        return self.emit(first.target, args, kwargs)

    def product(self, nodes: Sequence[Node], left: int, right: int, turned: bool) -> Node:
        """Emit the product of rows with the matrix of their expert, [k n], or ``turned`` [n k]."""
        matrices = at(nodes, right)
        if matrices[0].meta["val"].dim() != 2:
            raise NotIsomorphicError
        rows = self.of(at(nodes, left))
        if rows.meta["val"].dim() != 2:
            raise NotIsomorphicError
        return self._by_expert(rows, matrices, turned)

    def _by_expert(self, rows: Node, matrices: Sequence[FxNode], turned: bool) -> Node:
        weight = self._stacked(matrices)
        weight = self.emit(aten.transpose.int, (weight, 1, 2)) if turned else weight
        return self.emit(torch.ops.autopar.expert_linear.default, (rows, weight, self.expert))

    def _einsum(self, nodes: Sequence[Node]) -> Node | None:
        """Emit a product of rows with a matrix; None for any other."""
        first: FxNode = nodes[0]
        equation, operands = first.args[0].replace(" ", ""), first.args[1]
        letters: dict[str, str] = {}
        written = "".join(letters.setdefault(c, chr(97 + len(letters))) if c.isalpha() else c for c in equation)
        if written not in TURNED or len(operands) != 2 or any(e != first.args[0] for e in at(nodes, 0)):
            return None
        rows, matrices = zip(*at(nodes, 1), strict=True)
        return self._by_expert(self.of(rows), matrices, TURNED[written])

    def norm(self, nodes: Sequence[Node], parameters: int) -> Node:
        """Emit the norm of each row, with the weight and the bias of its expert."""
        if len(nodes[0].args[1]) != 1 or nodes[0].meta["val"].dim() != 2:  # type: ignore[arg-type]
            raise NotIsomorphicError
        return super().norm(nodes, parameters)

    def _dropout(self, nodes: Sequence[Node]) -> Node:
        rows: Node = self.of(at(nodes, 0))
        p, training = self.of(at(nodes, 1)), self.of(at(nodes, 2))
        if not training or not p:
            return rows
        val = rows.meta["val"]
        ones = self.emit(aten.full.default, (list(val.shape), 1.0), {"dtype": val.dtype, "device": val.device})
        return self.emit(aten.mul.Tensor, (rows, self.emit(aten.dropout.default, (ones, p, True))))

    def _number_of_expert(self, nodes: Sequence[Node]) -> Node:
        """Emit the number of each row's expert, where rows are filled with the number of the iteration."""
        val = nodes[0].meta["val"]
        if self.taken is None or any(x not in self.taken.positions for x in at(nodes, 0)):
            self.of(at(nodes, 0))
        if val.dim() != 1 or val.shape[0] * self.each != self.expert.meta["val"].shape[0]:
            raise NotIsomorphicError
        return self.emit(aten.to.dtype, (self.expert, val.dtype))

    def _rows_or_own(self, values: Sequence[PyTree]) -> PyTree:
        """Return an argument of a pointwise operator: rows, or a vector of each row's expert."""
        if not isinstance(values[0], Node) or all(x is values[0] for x in values):
            return self.of(values)
        try:
            return self.own(values)
        except NotIsomorphicError:
            return self.of(values)

    def own(self, values: Sequence[FxNode], _rank: int = 2) -> Node:
        """Look up the vector or number of each row's expert: [rows n], or [rows 1]."""
        if values[0].meta["val"].dim() > 1:
            raise NotIsomorphicError
        table = self._stacked(values)
        if table.meta["val"].dim() == 1:
            table = self.emit(aten.reshape.default, (table, [-1, 1]))
        return self.emit(aten.embedding.default, (table, self.expert))

    def _stacked(self, tensors: Sequence[FxNode]) -> Node:
        """Return [experts ...] of what each expert has of its own: parameters, or parts of one."""
        if any(not isinstance(x, Node) for x in tensors):
            raise NotIsomorphicError
        key = tuple(tensors)
        if key not in self.tables:
            self.tables[key] = self._table(key)
        return self.tables[key]

    def _table(self, tensors: Sequence[Node]) -> Node:
        first: FxNode = tensors[0]
        if are_parameters(tensors) and len({tuple(x.meta["val"].shape) for x in tensors}) == 1:
            return self.emit(aten.stack.default, (list(tensors),))
        if any(x.op != "call_function" or x.target != first.target for x in tensors):
            raise NotIsomorphicError
        parts = parts_of(tensors)
        if parts is not None and parts[1:] == (0, False):
            return parts[0]
        if any(x.args[1:] != first.args[1:] or x.kwargs for x in tensors):
            raise NotIsomorphicError
        n = first.meta["val"].dim()
        if first.target is aten.transpose.int:
            args: tuple[PyTree, ...] = tuple(int(d) % n + 1 for d in first.args[1:])
        elif first.target in TRANSPOSED and n == 2:
            return self.emit(aten.transpose.int, (self._stacked(at(tensors, 0)), 1, 2))
        elif first.target is aten.permute.default:
            args = ([0, *(int(d) % n + 1 for d in first.args[1])],)
        elif first.target is aten.to.dtype:
            args = first.args[1:]
        else:
            raise NotIsomorphicError
        return self.emit(first.target, (self._stacked(at(tensors, 0)), *args))


def _columns_of(tensors: Sequence[FxNode]) -> Node | None:
    """Return the tensor whose columns (last dim) are `tensors`, in order; they may keep that dim."""
    last = tensors[0].meta["val"].dim() - 1
    if all(x.target is aten.unsqueeze.default and int(x.args[1]) % (last + 1) == last for x in tensors):
        tensors = at(tensors, 0)
    parts = parts_of(tensors)
    if parts is None or parts[1] != parts[0].meta["val"].dim() - 1:
        return None
    return parts[0] if parts[0].meta["val"].shape[-1] == len(tensors) else None
