"""Products of each row with a matrix that is gathered for it, ``einsum("ti,taoi->tao", x, w[picked])``.

A matrix for each row is as much memory as there are rows times what one matrix has. As products by rows
(:mod:`autopar.rules.experts.experts`) no matrix is copied, experts can be cut, and what follows from each other becomes
one operator (:mod:`.expert_blocks`). So what is computed element by element between two of them is computed of rows,
too.

The index has to be one that a top-k, a sort or a maximum has found: others may count from the end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.drafts import TracedProgram
from autopar.capture.graph.expert_counts import CASTS
from autopar.capture.graph.exported_nodes import name_of
from autopar.capture.graph.row_by_row import is_by_element
from autopar.capture.graph.rows_of_graph import NodeMaker
from autopar.capture.graph.same_masks import behind
from autopar.capture.passes import PROGRAM, Pass, register
from autopar.words.trees import PyTree

aten = torch.ops.aten
FOUND = ("aten.topk.default", "aten.sort.default", "aten.sort.stable", "aten.max.dim", "aten.min.dim")
FOUND_ALONE = ("aten.argmax.default", "aten.argsort.default", "aten.argsort.stable")


def multiply_gathered_matrices_by_rows(program: TracedProgram) -> None:
    """Make products with gathered matrices products by rows."""
    graph = program.graph
    if any(_gathered(node) is not None for node in graph.nodes):
        _Products(graph).rewrite()


@dataclass(frozen=True)
class _Gathered:
    """Matrices that are gathered.

    Attributes:
        whole: [experts a b].
        index: the numbers of the matrices, int [...].
        turned: the gathered ones are [... b a].
    """

    whole: Node
    index: Node
    turned: bool


def _gathered(node: object) -> _Gathered | None:
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is aten.transpose.int:
        inside, n = _gathered(node.args[0]), node.meta["val"].dim()
        if inside is None or {int(d) % n for d in node.args[1:]} != {n - 1, n - 2}:  # type: ignore[arg-type]
            return None
        return _Gathered(inside.whole, inside.index, not inside.turned)
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    whole: Any = node.args[0]
    index: Any = node.args[1][0]  # type: ignore[index]
    if whole.meta["val"].dim() != 3 or not whole.meta["val"].is_floating_point() or index.meta["val"].dim() == 0:
        return None
    picked = behind(index, CASTS)
    of_several = picked.target is operator.getitem and picked.args[1] == 1 and name_of(picked.args[0].target) in FOUND
    return _Gathered(whole, index, False) if of_several or name_of(picked.target) in FOUND_ALONE else None


@dataclass(frozen=True)
class _Product:
    """A product, with letters for the dims of rows, matrices, index and result; None for a repeated dim of size 1."""

    rows: Node
    of_rows: Sequence[str | None]
    matrices: _Gathered
    of_matrix: Sequence[str]
    of_index: Sequence[str]
    of_result: Sequence[str]


class _Products(NodeMaker):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.flat: dict[Node, Node] = {}
        """Tensors [... n] of which each row is a product: the same as rows, [rows n]."""
        self.indices: dict[object, Node] = {}

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            self.node = node
            if node.op != "call_function":
                continue
            with self.graph.inserting_before(node):
                product = self._einsum(node) if node.target is aten.einsum.default else self._matmul(node)
                by_rows = self._made(product) if product is not None else self._by_element(node)
            if by_rows is not None:
                node.replace_all_uses_with(by_rows)
                self.graph.erase_node(node)
        for result in reversed(self.flat):  # what else reads rows keeps them from being one operator
            if not result.users:
                self.graph.erase_node(result)

    def _einsum(self, node: Node) -> _Product | None:
        equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
        given, arrow, result = equation.partition("->")
        terms = given.split(",")
        if "." in equation or not arrow or len(operands) != 2 or any(len(set(t)) < len(t) for t in terms):
            return None
        for k in (1, 0):
            matrices = _gathered(operands[k])
            if matrices is not None:
                return _Product(operands[1 - k], terms[1 - k], matrices, terms[k][-2:], terms[k][:-2], result)
        return None

    def _matmul(self, node: Node) -> _Product | None:
        if node.target not in (aten.matmul.default, aten.bmm.default):
            return None
        for k in (1, 0):
            matrices, rows = _gathered(node.args[k]), node.args[1 - k]
            if matrices is None or not isinstance(rows, Node):
                continue
            batch = [f"b{d}" for d in range(matrices.index.meta["val"].dim())]
            shape, whole = rows.meta["val"].shape, node.meta["val"].shape
            lead = len(shape) - 2
            if lead < 0 or lead > len(batch):
                return None
            at = batch[len(batch) - lead :]
            of_rows: list[str | None] = [
                letter if n == whole[batch.index(letter)] else None for letter, n in zip(at, shape[:lead], strict=True)
            ]
            if k == 1:
                return _Product(rows, [*of_rows, "m", "k"], matrices, ["k", "n"], batch, [*batch, "m", "n"])
            return _Product(rows, [*of_rows, "k", "m"], matrices, ["n", "k"], batch, [*batch, "n", "m"])
        return None

    def _made(self, product: _Product) -> Node | None:
        """Make the product by rows, in the shape of the result."""
        of_rows = {letter for letter in product.of_rows if letter is not None}
        summed = [c for c in product.of_matrix if c in of_rows and c not in product.of_result]
        kept = [c for c in product.of_matrix if c in product.of_result and c not in of_rows]
        if len(summed) != 1 or len(kept) != 1:
            return None
        lead = [c for c in product.of_result if c != kept[0]]
        if not {*product.of_index, *of_rows - {*summed}} <= {*lead} or not {*lead} <= {*product.of_index, *of_rows}:
            return None
        index, whole = product.matrices.index, product.matrices.whole
        sizes = dict(zip(product.of_index, index.meta["val"].shape, strict=True))
        sizes |= {c: n for c, n in zip(product.of_rows, product.rows.meta["val"].shape, strict=True) if c is not None}
        rows = self.flat.get(product.rows)
        if rows is None or list(product.of_rows) != [*lead, *summed]:
            rows = self._as_rows(product.rows, product.of_rows, lead, summed, sizes)
        key = index, tuple(product.of_index), tuple(lead), tuple(sizes[c] for c in lead)
        if key not in self.indices:
            self.indices[key] = self._as_rows(index, product.of_index, lead, [], sizes)
        first_is_summed = product.of_matrix[0] == summed[0]
        if first_is_summed == product.matrices.turned:
            whole = self.emit(aten.transpose.int, (whole, 1, 2))
        product_rows = self.emit(torch.ops.autopar.expert_linear.default, (rows, whole, self.indices[key]))
        n = product_rows.meta["val"].shape[1]
        result = self.emit(aten.reshape.default, (product_rows, [*(sizes[c] for c in lead), n]))
        order = [[*lead, *kept].index(c) for c in product.of_result]
        if order == list(range(len(order))):
            self.flat[result] = product_rows
            return result
        return self.emit(aten.permute.default, (result, order))

    def _as_rows(
        self, x: Node, letters: Sequence[str | None], lead: Sequence[str], rest: Sequence[str], sizes: dict[str, int]
    ) -> Node:
        """Return `x` as rows [rows ...]: the dims of `lead` in front, repeated where `x` has none of them."""
        shape = x.meta["val"].shape
        named = [c for c in letters if c is not None]
        if len(named) < len(letters):
            x = self.emit(aten.reshape.default, (x, [n for c, n in zip(letters, shape, strict=True) if c is not None]))
        wanted = [c for c in (*lead, *rest) if c in named]
        if wanted != named:
            x = self.emit(aten.permute.default, (x, [named.index(c) for c in wanted]))
        full = [sizes[c] for c in (*lead, *rest)]
        spread = [n if c in named else 1 for c, n in zip((*lead, *rest), full, strict=True)]
        if spread != full:
            x = self.emit(aten.expand.default, (self.emit(aten.reshape.default, (x, spread)), full))
        return self.emit(aten.reshape.default, (x, [prod(full[: len(lead)]), *full[len(lead) :]]))

    def _by_element(self, node: Node) -> Node | None:
        """Compute rows in place of an operator that works element by element on gathered tensors."""
        given = [n for n in node.all_input_nodes if n in self.flat]
        schema = getattr(node.target, "_schema", None)
        if not given or not is_by_element(node) or schema is None or schema.is_mutable:
            return None
        shape = node.meta["val"].shape
        if any(isinstance(value, Node) for value in node.kwargs.values()) or "dropout" in str(node.target):
            return None
        if any(n not in self.flat or n.meta["val"].shape != shape for n in node.all_input_nodes):
            return None
        args: PyTree = torch.fx.node.map_arg(node.args, lambda n: self.flat[n])
        rows = self.emit(node.target, args, dict(node.kwargs))
        result = self.emit(aten.reshape.default, (rows, list(shape)))
        self.flat[result] = rows
        return result


register(
    Pass("gathered_matrices", PROGRAM, multiply_gathered_matrices_by_rows,
         "a matrix that is gathered for each row costs memory, and its experts cannot be cut"),
    before="experts_at_once",
)  # fmt: skip
