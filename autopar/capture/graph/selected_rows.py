"""Rows that a mask selects: their number depends on data, so all rows are computed, and those outside count as zero.

``t, k = torch.where(top == e); out.index_add_(0, t, expert(x[t]) * w[t, k, None])`` is how experts run in plain torch.
Export gives the selected rows a size that nobody knows (``u0``). Here every position of the mask becomes a row of its
own, in order, whether it is selected or not; ``x[t]`` are views of ``x`` that have a row for each position; what works
on each row by itself stays as it is; and where rows are added to or put in a tensor of all, those that are not selected
are left out by the mask (:mod:`.rows_put_back`). So sizes are fixed, values and gradients are the same, and nothing
depends on data.

What looks across rows (a mean over them, a softmax along them, their number) is refused (:mod:`.row_by_row`). Loops
of which every turn does the same with the rows of one expert are then made one (:mod:`.expert_turns`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.branches.data_branches import OF_ROWS, TAKEN
from autopar.capture.graph.conditional_writes import write_where_there_are_rows
from autopar.capture.graph.drafts import TracedProgram
from autopar.capture.graph.expert_counts import CASTS, counted_numbers, element_of, hot_by_dim
from autopar.capture.graph.expert_turns import as_one, routing
from autopar.capture.graph.exported_nodes import flat, is_symbolic, name_of
from autopar.capture.graph.joined_rows import Joined, JoinedRows
from autopar.capture.graph.row_by_row import VIEWS, check
from autopar.capture.graph.rows_of_graph import EVERY, Rows, RowsOfGraph, is_mask, selects, val_of
from autopar.capture.graph.rows_put_back import RowsPutBack, writes_rows
from autopar.capture.graph.run_once import TakenRows
from autopar.capture.graph.same_masks import behind

aten = torch.ops.aten


ASSERTS = ("aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_constrain_range")
OF_ANY = ("aten.reshape.default", "aten.view.default", "aten.any.default", "aten.sum.default", "aten.gt.Scalar",
          "aten.ne.Scalar", "aten.eq.Scalar", "aten.detach.default", "aten.to.dtype")  # fmt: skip
"""What makes of a mask whether it selects any rows."""
COMPARED = {aten.eq.Scalar: 0, aten.ne.Scalar: 0, aten.gt.Scalar: 0, aten.le.Scalar: 0, aten.ge.Scalar: 1,
            aten.lt.Scalar: 1}  # fmt: skip
"""How a number of rows is compared, and with what, where that says whether there are any."""
SIZES = {operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne}


def compute_all_rows(program: TracedProgram) -> None:
    """Replace every tensor of selected rows of a program by one of all rows.

    Raises:
        CaptureError: an operator does not work on each row by itself.
    """
    graph, recording = program.graph, program.exported.recording  # type: ignore[attr-defined]
    selecting = [node for node in graph.nodes if node.op == "call_function" and selects(node)]
    if not selecting:
        return
    asked, by_name = recording.asked_rows, {node.name: node for node in graph.nodes}
    of_rows = {
        node: next((by_name[name] for name in asked[str(size)] if name in by_name), node)
        for node in selecting for val in flat(node.meta["val"]) for size in val.shape if str(size) in asked
    }  # fmt: skip
    program.rows = RowsOfGraph(graph)
    SelectedRows(program.rows, of_rows).rewrite()


def fuse_expert_loops(program: TracedProgram) -> None:
    """Make loops whose iterations do the same with the rows of one expert one iteration over all experts."""
    if (rows := program.rows) is not None:
        taken = TakenRows(rows.gathers, rows.positions)
        as_one(program.graph, rows.turns, rows.emit_as, RowsPutBack(rows).write_turn, taken)


def _asks_for_rows(node: Node) -> bool:
    """Check whether a node is the question of a branch that does nothing but work on rows."""
    return node.op == "call_function" and name_of(node.target) == TAKEN and str(node.args[1]).endswith(OF_ROWS)


def _compared_by(mask: Node) -> Any:
    """Return the numbers that a mask compares with one: ``picked == e``, or an element of their ``one_hot``."""
    if mask.target is aten.eq.Scalar:
        return behind(mask.args[0], CASTS)
    hot, _ = hot_by_dim(mask.args[0].args[0])  # type: ignore[union-attr]
    return None if hot is None else behind(hot.args[0], CASTS)


def _are_counts_of(counts: object, numbers: object) -> bool:
    """Check whether `counts` say how often each of `numbers` occurs.

    They were counted, or the numbers are the groups of places by the counts' running sums.
    """
    if not isinstance(numbers, Node):
        return False
    if counted_numbers(counts) is numbers:
        return True
    if numbers.target is not aten.searchsorted.Tensor or not numbers.kwargs.get("right"):
        return False
    total, places = behind(numbers.args[0], CASTS), numbers.args[1]
    if total.target is not aten.cumsum.default or not name_of(places.target).startswith("aten.arange"):  # type: ignore
        return False
    return behind(total.args[0], CASTS) is behind(counts, CASTS)


class SelectedRows:
    """The rewrite of selected rows of a graph.

    Attributes:
        asked: nodes that select rows for which the model's code asks, by their number, whether there are any, and the
            last node that was made before it asked.
        finders: nodes that find rows by a mask.
        masks: the masks of numbers that select where they are not 0.
    """

    def __init__(self, state: RowsOfGraph, asked: Mapping[Node, Node]) -> None:
        self.state = state
        self.put_back = RowsPutBack(self.state)
        self.joined = JoinedRows(self.state, self.put_back, self._take)
        self.asked = asked
        self.finders: set[Node] = set()
        self.masks: dict[Node, Node] = {}

    def rewrite(self) -> None:
        """Replace all nodes of selected rows, and make writes in branches on them conditional."""
        for node in list(self.state.graph.nodes):
            self.state.node = node
            if node.op == "output":
                if any(n in self.state.rows or n in self.state.counts for n in node.all_input_nodes):
                    raise self.state.refused("is returned")
            elif node.op == "call_function" and (
                selects(node) or any(n in self.state.rows or n in self.state.counts for n in node.all_input_nodes)
            ):
                with self.state.graph.inserting_before(node):
                    self._take(node)
        asked = self.state.asked = self._asked_masks()
        write_where_there_are_rows(
            self.state.graph, self._masks_of_rows(), asked, self.state.leaving, {*self.state.gone, *self.state.written},
            self.state.emit, self.state.refused_at,
        )  # fmt: skip
        for node in reversed(self.state.gone):
            if not node.users:
                self.state.graph.erase_node(node)

    def _masks_of_rows(self) -> dict[Node, Node]:
        each = {node: rows[0] if isinstance(rows, list) else rows for node, rows in self.state.rows.items()}
        return {node: self.state.same.root(rows.mask) for node, rows in each.items() if not isinstance(rows, Joined)}

    def _asked_masks(self) -> dict[Node, Node]:
        """Return the masks for which the model's code asks whether they select any rows, and the nodes that ask.

        Where it asks for a number of rows, that is the last node that was made before. Such a branch is none where it
        does nothing but work on these rows: no rows count as nothing, and the branch that uses them was traced
        (:mod:`autopar.capture.branches.masks`). Its question goes.
        """
        mask_of = self._masks_of_rows()
        masks = set(mask_of.values())
        asked = {mask_of[node]: last for node, last in self.asked.items()}
        nodes = list(self.state.graph.nodes)
        for k, node in enumerate(nodes):
            if not _asks_for_rows(node):
                continue
            condition: Any = node.args[0]
            while isinstance(condition, Node) and self.state.same.root(condition) not in masks:
                condition = condition.args[0] if str(condition.target) in OF_ANY else None
            if condition is not None:
                asked.setdefault(self.state.same.root(condition), node)
                self.state.gone.append(node)
                continue
            following = itertools.takewhile(lambda n: not _asks_for_rows(n), nodes[k + 1 :])
            selected = {mask_of[n] for n in following if n in mask_of and n in self.finders}
            if len(selected) == 1:
                [mask] = selected
                self._asked_by_count(node, mask)
                asked.setdefault(mask, node)
        return asked

    def _asked_by_count(self, question: Node, mask: Node) -> None:
        """Drop the question of a branch that is entered where a count of rows says so.

        Where the count is not known to be the number of rows that the mask selects, it is checked at every call that
        both agree.
        """
        compared: Any = behind(question.args[0], CASTS)
        self.state.gone.append(question)
        if compared.target not in COMPARED:
            number = element_of(compared)
        else:
            number = element_of(compared.args[0]) if compared.args[1] == COMPARED[compared.target] else None
        of_mask = routing(mask)
        if number is not None and of_mask is not None and number[1] == of_mask[1]:
            counts = number[0]
            if compared.target not in COMPARED and counts.target is aten.gt.Scalar and counts.args[1] == 0:
                counts = counts.args[0]  # type: ignore[assignment]
            if _are_counts_of(counts, _compared_by(mask)):
                return
        self.state.node, agree = question, aten.eq.Tensor if question.args[2] else aten.ne.Tensor
        with self.state.graph.inserting_before(mask.next):
            same = self.state.emit(agree, (compared, self.state.emit(aten.any.default, (mask,))))
            self.state.emit(question.target, (same, question.args[1], True))

    # -- one node

    def _take(self, node: Node) -> None:
        name = str(node.target)
        if selects(node):
            self.finders.add(node)
        elif self.joined.takes_joined(node):
            return
        if name in ("aten.where.default", "aten.nonzero_numpy.default") and selects(node):
            mask = self._mask(node.args[0])
            self.state.rows[node] = [Rows(mask, None, 0, k) for k in range(val_of(mask).dim())]
        elif name == "aten.nonzero.default" and selects(node):
            self.state.rows[node] = Rows(self._mask(node.args[0]), None, 0, EVERY)
        elif node.target is operator.getitem:
            self.state.rows[node] = self.state.rows[node.args[0]][node.args[1]]  # type: ignore[index]
        elif name in ("aten.sym_size.int", "aten.sym_numel.default"):
            rows = self.state.rows[node.args[0]]  # type: ignore[index]
            if name != "aten.sym_size.int" or node.args[1] != rows.dim:
                raise self.state.refused("asks for their number")
            self.state.counts[node] = prod(val_of(rows.mask).shape)
            self.state.counted[node] = rows.mask
        elif self.joined.joins(node):
            pass
        elif node.target in SIZES or name.startswith(ASSERTS):
            self.state.counts[node] = 0
        elif name == "aten.index.Tensor":
            self.state.rows[node] = self._indexed(node)
        elif name == "aten.index_select.default" and self.state.coordinate(node.args[2]) is not None:
            before: list[Any] = [None] * (int(node.args[1]) % val_of(node.args[0]).dim())  # type: ignore[arg-type]
            self.state.rows[node] = self._gathered(node.args[0], [*before, node.args[2]])
        elif writes_rows(name):
            self.put_back.rewrite(node)
            return
        else:
            self._row_by_row(node)
            self.put_back.note_columns(node)
        self.state.gone.append(node)

    def _mask(self, node: Any) -> Node:
        """Return the mask of numbers that are not 0."""
        if is_mask(node):
            return node  # type: ignore[no-any-return]
        if node not in self.masks:
            self.masks[node] = self.state.emit(aten.ne.Scalar, (node, 0))
        return self.masks[node]

    def _row_by_row(self, node: Node) -> None:
        name = str(node.target)
        if "." not in name:  # a region, or what Python computes
            raise self.state.refused(f"'{name}' takes")
        args = [n for n in node.all_input_nodes if n in self.state.rows]
        taken = [self.state.rows[n] for n in args]
        if any(isinstance(r, list) for r in taken):
            raise self.state.refused(f"'{name}' takes")
        if len(args) == 1 and taken[0].full is None and self._takes_coordinate(node, taken[0]):
            return
        taken = [self.state.computed(n) for n in args]
        shaped = name in ("aten.reshape.default", "aten.view.default", "aten.expand.default")
        if not args or (not shaped and any(n in self.state.counts for n in node.all_input_nodes)):
            raise self.state.refused(f"'{name}' computes with the number of")
        if len({self.state.same.root(r.mask) for r in taken}) > 1:
            raise self.state.refused(f"'{name}' mixes rows of two masks, of which it takes")
        outs = node.meta["val"]
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        size = val_of(args[0]).shape[taken[0].dim]
        dims = [[d for d, n in enumerate(out.shape) if is_symbolic((n,))] for out in outs]
        if any(len(d) != 1 or str(out.shape[d[0]]) != str(size) for d, out in zip(dims, outs, strict=True)):
            raise self.state.refused(f"'{name}' looks across")
        check(node, args, taken, dims[0][0], self.state.refused)
        target, in_place = node.target, name.split(".")[1].endswith("_")
        if in_place:
            written: Any = node.args[0]
            seen_elsewhere = any(str(n.target).split(".")[1:2] in [[v] for v in VIEWS] for n in written.users)
            if written not in self.state.rows or not self.state.rows[written].fresh or seen_elsewhere:
                raise self.state.refused(f"'{name}' writes through a view of")
            packet, overload = name.split(".")[1][:-1], name.split(".")[2]
            target = getattr(getattr(aten, packet), overload)
        computed = self.state.emit(target, self.state.replaced(node.args), self.state.replaced(node.kwargs))
        mask = taken[0].mask
        fresh = name.split(".")[1] not in VIEWS
        if isinstance(node.meta["val"], (list, tuple)):
            self.state.rows[node] = [
                Rows(mask, self.state.emit(operator.getitem, (computed, k)), d[0]) for k, d in enumerate(dims)
            ]
        else:
            self.state.rows[node] = Rows(mask, computed, dims[0][0], None, fresh)
        if in_place:
            self.state.rows[node.args[0]] = self.state.rows[node]  # type: ignore[index]

    def _takes_coordinate(self, node: Node, rows: Rows) -> bool:
        """Handle a node that reshapes positions of rows or takes a coordinate of them; return whether it is one."""
        name, out = str(node.target), node.meta["val"]
        n = val_of(rows.mask).dim()
        if rows.coordinate == EVERY:
            if name == "aten.select.int" and node.args[1] in (1, -1):
                self.state.rows[node] = replace(rows, coordinate=int(node.args[2]) % n)  # type: ignore[arg-type]
                return True
            if name == "aten.unbind.int" and node.args[1:] in ((1,), (-1,)):
                self.state.rows[node] = [replace(rows, coordinate=k) for k in range(n)]
                return True
            if n == 1 and out.dim() == 1 and name.split(".")[1] in ("squeeze", "reshape", "view", "flatten"):
                self.state.rows[node] = replace(rows, coordinate=0)
                return True
            raise self.state.refused(f"'{name}' takes the positions of")
        if name in ("aten.reshape.default", "aten.view.default", "aten.flatten.using_ints") and out.dim() == 1:
            self.state.rows[node] = rows
            return True
        return False

    # -- rows of a tensor

    def _indexed(self, node: Node) -> Rows:
        tensor, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        masks = [i for i in indices if is_mask(i)]
        if masks:
            if tensor in self.state.rows or len([i for i in indices if i is not None]) > 1:
                raise self.state.refused("a mask selects from")
            place = indices.index(masks[0])
            n = val_of(masks[0]).dim()
            mask = masks[0]
            return self._of_positions(tensor, mask, {place + k: k for k in range(n)})
        if tensor in self.state.rows:
            raise self.state.refused("an index selects from")
        return self._gathered(tensor, indices)

    def _gathered(self, tensor: object, indices: Sequence[object]) -> Rows:
        """Rewrite ``tensor[:, t, k]`` for positions ``t`` and ``k`` of the same rows."""
        at_dims = {d: self.state.coordinate(i) for d, i in enumerate(indices) if i is not None}
        masks = {self.state.rows[i].mask for i in indices if i is not None and i in self.state.rows}
        if None in at_dims.values() or len(masks) != 1 or tensor in self.state.rows:
            raise self.state.refused("an index is computed from")
        if len(set(at_dims.values())) < len(at_dims):
            raise self.state.refused("the same position is an index twice for")
        return self._of_positions(tensor, masks.pop(), at_dims)  # type: ignore[arg-type]

    def _of_positions(self, tensor: Any, mask: Node, at_dims: dict[int, int]) -> Rows:
        """Return a tensor, indexed in each dim of `at_dims` by its coordinate of the mask's positions."""
        shape, val = val_of(mask).shape, val_of(tensor)
        dims = sorted(at_dims)
        lead = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        others = [d for d in range(val.dim()) if d not in at_dims]
        order = [*[d for d in others if d < lead], *sorted(dims, key=lambda d: at_dims[d]),
                 *[d for d in others if d >= lead]]  # fmt: skip
        rows = tensor if order == list(range(val.dim())) else self.state.emit(aten.permute.default, (tensor, order))
        before = [val.shape[d] for d in others if d < lead]
        after = [val.shape[d] for d in others if d >= lead]
        ones = [n if k in at_dims.values() else 1 for k, n in enumerate(shape)]
        for d, k in at_dims.items():
            if val.shape[d] != shape[k]:
                what = f"a tensor of {val.shape[d]} for {shape[k]} positions of the mask is indexed by"
                raise self.state.refused(what)
        if ones != list(shape):
            rows = self.state.emit(aten.reshape.default, (rows, [*before, *ones, *after]))
            rows = self.state.emit(aten.expand.default, (rows, [*before, *shape, *after]))
        rows = self.state.emit(aten.reshape.default, (rows, [*before, prod(shape), *after]))
        rows = self.state.emit(aten.clone.default, (rows,))  # what is written to the tensor later does not reach it
        self.state.gathers[rows] = tensor, at_dims
        return Rows(mask, rows, len(before), None, fresh=True)
