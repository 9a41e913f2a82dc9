"""Rows that a mask selects: their number depends on data, so all rows are computed, and those outside count as zero.

``t, k = torch.where(top == e); out.index_add_(0, t, expert(x[t]) * w[t, k, None])`` is how experts run in plain torch.
Export gives the selected rows a size that nobody knows (``u0``). Here every position of the mask becomes a row of its
own, in order, whether it is selected or not; ``x[t]`` are views of ``x`` that have a row for each position; what works
on each row by itself stays as it is; and where rows are added to or put in a tensor of all, those that are not selected
are left out by the mask. So sizes are fixed, values and gradients are the same, and nothing depends on data.

What looks across rows (a mean over them, a softmax along them, their number) is refused. Loops of which every turn does
the same with the rows of one expert are then made one (:mod:`.alike_turns`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.branches.taken import OF_ROWS, TAKEN
from autopar.capture.graph.alike_turns import Turn, as_one, root_of
from autopar.capture.graph.conditional_writes import write_where_there_are_rows
from autopar.capture.graph.entered import note_parts
from autopar.capture.graph.exported import at, flat, is_symbolic, module_of, name_of
from autopar.capture.graph.regions_inlined import regions_of_rows_inlined
from autopar.errors import CaptureError

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """What stands for a tensor of selected rows.

    Attributes:
        mask: bool, of any shape; one row for each of its elements.
        full: the tensor of all these rows; None for positions that nobody has computed with.
        dim: along which rows stand.
        coordinate: the tensor holds the position of each row along this dim of the mask; all of them where it is
            :data:`EVERY`, [rows dims of the mask].
        fresh: no view of another tensor, so that what is written to it is written to nothing else.
    """

    mask: Node
    full: Node | None
    dim: int = 0
    coordinate: int | None = None
    fresh: bool = False


EVERY = -1
ASSERTS = ("aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_constrain_range")
WITH_DIMS = {
    "aten.softmax.int": 1, "aten.log_softmax.int": 1, "aten.sum.dim_IntList": 1, "aten.mean.dim": 1,
    "aten.unsqueeze.default": None, "aten.squeeze.dim": 1, "aten.select.int": 1, "aten.slice.Tensor": 1,
    "aten.chunk.default": 2, "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.glu.default": 1,
    "aten.amax.default": 1, "aten.norm.ScalarOpt_dim": 2,
}  # fmt: skip
"""Operators that work along dims, which must not be that of the rows, and where they stand; None: any is right."""
DEFAULT_DIM = {"aten.slice.Tensor": 0, "aten.chunk.default": 0, "aten.split.Tensor": 0, "aten.glu.default": -1,
               "aten.split_with_sizes.default": 0}  # fmt: skip
VIEWS = ("reshape", "view", "unsqueeze", "squeeze", "select", "slice", "chunk", "split", "split_with_sizes", "expand",
         "permute", "transpose", "to")  # fmt: skip
BY_ELEMENT = {"aten.to.dtype", "aten.dropout.default", "aten.clone.default", "aten.contiguous.default",
              "aten.type_as.default", "aten.detach.default", "aten.silu.default", "aten.gelu.default"}  # fmt: skip
OF_ANY = ("aten.reshape.default", "aten.view.default", "aten.any.default", "aten.sum.default", "aten.gt.Scalar",
          "aten.ne.Scalar", "aten.eq.Scalar", "aten.detach.default", "aten.to.dtype")  # fmt: skip
"""What makes of a mask whether it selects any rows."""
SIZES = {operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne}


def with_masks(exported: Any) -> None:
    """Every tensor of selected rows of an exported program is one of all rows.

    Raises:
        CaptureError: what is done with them is not done for each row by itself.
    """
    graph: Graph = exported.graph
    regions_of_rows_inlined(exported.graph_module, _selects)
    if any(node.op == "call_function" and _selects(node) for node in graph.nodes):
        asked, by_name = exported.recording.asked_rows, {node.name: node for node in graph.nodes}
        of_rows = {
            node: next((by_name[name] for name in asked[str(size)] if name in by_name), node)
            for node in graph.nodes if node.op == "call_function" and _selects(node)
            for val in flat(node.meta["val"]) for size in val.shape if str(size) in asked
        }  # fmt: skip
        _Masked(graph, of_rows, set(exported.graph_signature.inputs_to_parameters)).rewrite()
        graph.lint()


def _selects(node: Node) -> bool:
    """Whether a node makes rows from a mask."""
    name = str(node.target)
    if not any(isinstance(v, torch.Tensor) and is_symbolic(tuple(v.shape)) for v in flat(node.meta.get("val"))):
        return False
    if name in ("aten.where.default", "aten.nonzero.default", "aten.nonzero_numpy.default"):
        return not is_symbolic(tuple(node.args[0].meta["val"].shape))  # type: ignore[union-attr]
    return name == "aten.index.Tensor" and any(_is_mask(i) for i in node.args[1])  # type: ignore[union-attr]


def _is_mask(x: Any) -> bool:
    val = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype == torch.bool and not is_symbolic(tuple(val.shape))


class _Masked:
    """
    Args:
        asked: nodes that select rows for which the model's code asks, by their number, whether there are any, and the
            last node that was made before it asked.
        parameters: names of the inputs that are parameters.
    """

    def __init__(self, graph: Graph, asked: Mapping[Node, Node], parameters: Collection[str]) -> None:
        self.graph, self.asked, self.parameters = graph, asked, parameters
        self.rows: dict[Node, Any] = {}
        """What stands for a node, or for each of its results."""
        self.counts: dict[Node, int] = {}
        """Numbers of rows that were asked for, which only shapes may use."""
        self.masks: dict[Node, Node] = {}
        """Where numbers that select are not 0."""
        self.turns: list[Turn] = []
        self.gathers: dict[Node, tuple[Node, dict[int, int]]] = {}
        """Rows that were taken from a tensor: of which, and where."""
        self.leaving: dict[Node, Node] = {}
        """Where selected rows become part of a tensor of all, and the mask that selects them."""
        self.written: set[Node] = set()
        """What writes rows to a tensor of all."""
        self.gone: list[Node] = []
        self.node: Node = next(iter(graph.nodes))

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            self.node = node
            if node.op == "output":
                if any(n in self.rows or n in self.counts for n in node.all_input_nodes):
                    raise self._refused("is returned")
            elif node.op == "call_function" and (
                _selects(node) or any(n in self.rows or n in self.counts for n in node.all_input_nodes)
            ):
                with self.graph.inserting_before(node):
                    self._take(node)
        asked = self._asked_masks()
        write_where_there_are_rows(
            self.graph, self._masks_of_rows(), asked, self.leaving, {*self.gone, *self.written}, self._emit,
            self._refused_at,
        )  # fmt: skip
        for node in reversed(self.gone):
            if not node.users:
                self.graph.erase_node(node)
        note_parts(self.graph, self.leaving, asked, self.parameters, self._emit)
        as_one(self.graph, self.turns, self._emit_as, self._finished)

    def _masks_of_rows(self) -> dict[Node, Node]:
        each = {node: rows[0] if isinstance(rows, list) else rows for node, rows in self.rows.items()}
        return {node: rows.mask for node, rows in each.items()}

    def _asked_masks(self) -> dict[Node, Node]:
        """The masks for which the model's code asks whether they select any rows, and the node that asks; where it was
        a number of rows, the last one that was made before.

        Such a branch is none where it does nothing but work on these rows: no rows count as nothing, and the way on
        which they are used was followed (:mod:`autopar.capture.branches.masks`). Its question goes.
        """
        mask_of = self._masks_of_rows()
        masks = set(mask_of.values())
        asked = {mask_of[node]: last for node, last in self.asked.items()}
        for node in list(self.graph.nodes):
            if node.op == "call_function" and name_of(node.target) == TAKEN and str(node.args[1]).endswith(OF_ROWS):
                condition: Any = node.args[0]
                while isinstance(condition, Node) and condition not in masks and str(condition.target) in OF_ANY:
                    condition = condition.args[0]
                if condition in masks:
                    asked.setdefault(condition, node)
                    self.gone.append(node)
        return asked

    # -- one node

    def _take(self, node: Node) -> None:
        name = str(node.target)
        if name in ("aten.where.default", "aten.nonzero_numpy.default") and _selects(node):
            mask = self._mask(node.args[0])
            self.rows[node] = [Rows(mask, None, 0, k) for k in range(self._val(mask).dim())]
        elif name == "aten.nonzero.default" and _selects(node):
            self.rows[node] = Rows(self._mask(node.args[0]), None, 0, EVERY)
        elif node.target is operator.getitem:
            self.rows[node] = self.rows[node.args[0]][node.args[1]]  # type: ignore[index]
        elif name in ("aten.sym_size.int", "aten.sym_numel.default"):
            rows = self.rows[node.args[0]]  # type: ignore[index]
            if name != "aten.sym_size.int" or node.args[1] != rows.dim:
                raise self._refused("asks for their number")
            self.counts[node] = prod(self._val(rows.mask).shape)
        elif node.target in SIZES or name.startswith(ASSERTS):
            self.counts[node] = 0
        elif name == "aten.index.Tensor":
            self.rows[node] = self._indexed(node)
        elif name == "aten.index_select.default" and self._coordinate(node.args[2]) is not None:
            before: list[Any] = [None] * (int(node.args[1]) % self._val(node.args[0]).dim())  # type: ignore[arg-type]
            self.rows[node] = self._gathered(node.args[0], [*before, node.args[2]])
        elif name in ("aten.index_add.default", "aten.index_add_.default"):
            self._added(node)
            return
        elif name in ("aten.index_put.default", "aten.index_put_.default"):
            self._put(node)
            return
        else:
            self._row_by_row(node)
        self.gone.append(node)

    def _mask(self, node: Any) -> Node:
        """bool, of numbers that are not 0."""
        if _is_mask(node):
            return node  # type: ignore[no-any-return]
        if node not in self.masks:
            self.masks[node] = self._emit(aten.ne.Scalar, (node, 0))
        return self.masks[node]

    def _row_by_row(self, node: Node) -> None:
        name = str(node.target)
        if "." not in name:  # a region, or what Python computes
            raise self._refused(f"'{name}' takes")
        args = [n for n in node.all_input_nodes if n in self.rows]
        taken = [self.rows[n] for n in args]
        if any(isinstance(r, list) for r in taken):
            raise self._refused(f"'{name}' takes")
        if len(args) == 1 and taken[0].full is None and self._takes_coordinate(node, taken[0]):
            return
        taken = [self._computed(n) for n in args]
        shaped = name in ("aten.reshape.default", "aten.view.default", "aten.expand.default")
        if not args or (not shaped and any(n in self.counts for n in node.all_input_nodes)):
            raise self._refused(f"'{name}' computes with the number of")
        if len({r.mask for r in taken}) > 1:
            raise self._refused(f"'{name}' mixes rows of two masks, of which it takes")
        outs = node.meta["val"]
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        size = self._val_of_rows(args[0]).shape[taken[0].dim]
        dims = [[d for d, n in enumerate(out.shape) if is_symbolic((n,))] for out in outs]
        if any(len(d) != 1 or str(out.shape[d[0]]) != str(size) for d, out in zip(dims, outs, strict=True)):
            raise self._refused(f"'{name}' looks across")
        self._check(node, name, args, taken, dims[0][0])
        target, in_place = node.target, name.split(".")[1].endswith("_")
        if in_place:
            written: Any = node.args[0]
            seen_elsewhere = any(str(n.target).split(".")[1:2] in [[v] for v in VIEWS] for n in written.users)
            if written not in self.rows or not self.rows[written].fresh or seen_elsewhere:
                raise self._refused(f"'{name}' writes through a view of")
            packet, overload = name.split(".")[1][:-1], name.split(".")[2]
            target = getattr(getattr(aten, packet), overload)
        made = self._emit(target, self._replaced(node.args), self._replaced(node.kwargs))
        mask = taken[0].mask
        fresh = name.split(".")[1] not in VIEWS
        if isinstance(node.meta["val"], (list, tuple)):
            self.rows[node] = [
                Rows(mask, self._emit(operator.getitem, (made, k)), d[0]) for k, d in enumerate(dims)
            ]
        else:
            self.rows[node] = Rows(mask, made, dims[0][0], None, fresh)
        if in_place:
            self.rows[node.args[0]] = self.rows[node]  # type: ignore[index]

    def _takes_coordinate(self, node: Node, rows: Rows) -> bool:
        """Positions of rows, taken from a tensor of them or in another shape."""
        name, out = str(node.target), node.meta["val"]
        n = self._val(rows.mask).dim()
        if rows.coordinate == EVERY:
            if name == "aten.select.int" and node.args[1] in (1, -1):
                self.rows[node] = replace(rows, coordinate=int(node.args[2]) % n)  # type: ignore[arg-type]
                return True
            if name == "aten.unbind.int" and node.args[1:] in ((1,), (-1,)):
                self.rows[node] = [replace(rows, coordinate=k) for k in range(n)]
                return True
            if n == 1 and out.dim() == 1 and name.split(".")[1] in ("squeeze", "reshape", "view", "flatten"):
                self.rows[node] = replace(rows, coordinate=0)
                return True
            raise self._refused(f"'{name}' takes the positions of")
        if name in ("aten.reshape.default", "aten.view.default", "aten.flatten.using_ints") and out.dim() == 1:
            self.rows[node] = rows
            return True
        return False

    def _check(self, node: Node, name: str, args: Sequence[Node], taken: Sequence[Rows], dim: int) -> None:
        """Refuse what looks across rows; ``dim``: along which they stand in the result."""
        first = node.args[0]
        if _is_pointwise(node):
            self._check_broadcast(node, args, taken, dim)
            return
        if name in ("aten.linear.default", "aten.matmul.default", "aten.mm.default"):
            if args == [first] and taken[0].dim < self._val_of_rows(args[0]).dim() - 1:
                return
        elif name in ("aten.layer_norm.default", "aten.rms_norm.default"):
            if args == [first] and taken[0].dim < self._val_of_rows(args[0]).dim() - len(node.args[1]):  # type: ignore[arg-type]
                return
        elif name in ("aten.reshape.default", "aten.view.default"):
            given, out = self._val_of_rows(args[0]).shape, node.meta["val"].shape
            if prod(given[: taken[0].dim]) == prod(out[:dim]):
                return
        elif name in ("aten.expand.default", "aten.permute.default", "aten.transpose.int"):
            return  # the dim of the rows is found by its size in the result
        elif name == "aten.cat.default":
            along = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
            if len(args) == len(set(node.args[0])) and along % node.meta["val"].dim() != dim:  # type: ignore[arg-type]
                return
        elif name == "aten.embedding.default":
            if args == [node.args[1]]:
                return
        elif name in WITH_DIMS and args == [first]:
            place = WITH_DIMS[name]
            if place is None:
                return
            n = self._val_of_rows(args[0]).dim()
            dims = node.args[place] if len(node.args) > place else node.kwargs.get("dim", DEFAULT_DIM.get(name))
            dims = [dims] if isinstance(dims, int) else dims
            if dims and all(d % n != taken[0].dim for d in dims):  # type: ignore[operator, union-attr]
                return
        raise self._refused(f"'{name}' may look across")

    def _check_broadcast(self, node: Node, args: Sequence[Node], taken: Sequence[Rows], dim: int) -> None:
        from_end = node.meta["val"].dim() - dim
        for n in node.all_input_nodes:
            val = self._val_of_rows(n)
            if n in args:
                if val.dim() - taken[args.index(n)].dim != from_end:
                    raise self._refused("different dims hold")
            elif isinstance(val, torch.Tensor) and val.dim() >= from_end and val.shape[-from_end] != 1:
                raise self._refused("a tensor of another size meets")

    # -- in and out

    def _indexed(self, node: Node) -> Rows:
        tensor, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        masks = [i for i in indices if _is_mask(i)]
        if masks:
            if tensor in self.rows or len([i for i in indices if i is not None]) > 1:
                raise self._refused("a mask selects from")
            place = indices.index(masks[0])
            n = self._val(masks[0]).dim()
            mask = masks[0]
            return self._of_positions(tensor, mask, {place + k: k for k in range(n)})
        if tensor in self.rows:
            raise self._refused("an index selects from")
        return self._gathered(tensor, indices)

    def _gathered(self, tensor: Any, indices: Sequence[Any]) -> Rows:
        """``tensor[:, t, k]`` for positions ``t`` and ``k`` of the same rows."""
        at_dims = {d: self._coordinate(i) for d, i in enumerate(indices) if i is not None}
        masks = {self.rows[i].mask for i in indices if i is not None and i in self.rows}
        if None in at_dims.values() or len(masks) != 1 or tensor in self.rows:
            raise self._refused("an index is computed from")
        if len(set(at_dims.values())) < len(at_dims):
            raise self._refused("the same position is an index twice for")
        return self._of_positions(tensor, masks.pop(), at_dims)  # type: ignore[arg-type]

    def _of_positions(self, tensor: Any, mask: Node, at_dims: dict[int, int]) -> Rows:
        """A tensor, indexed in these dims by these coordinates of the mask's positions."""
        shape, val = self._val(mask).shape, self._val(tensor)
        dims = sorted(at_dims)
        lead = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        others = [d for d in range(val.dim()) if d not in at_dims]
        order = [*[d for d in others if d < lead], *sorted(dims, key=lambda d: at_dims[d]),
                 *[d for d in others if d >= lead]]  # fmt: skip
        made = tensor if order == list(range(val.dim())) else self._emit(aten.permute.default, (tensor, order))
        before = [val.shape[d] for d in others if d < lead]
        after = [val.shape[d] for d in others if d >= lead]
        ones = [n if k in at_dims.values() else 1 for k, n in enumerate(shape)]
        for d, k in at_dims.items():
            if val.shape[d] != shape[k]:
                raise self._refused(f"a tensor of {val.shape[d]} for {shape[k]} positions of the mask is indexed by")
        if ones != list(shape):
            made = self._emit(aten.reshape.default, (made, [*before, *ones, *after]))
            made = self._emit(aten.expand.default, (made, [*before, *shape, *after]))
        made = self._emit(aten.reshape.default, (made, [*before, prod(shape), *after]))
        made = self._emit(aten.clone.default, (made,))  # what is written to the tensor later does not reach it
        self.gathers[made] = tensor, at_dims
        return Rows(mask, made, len(before), None, fresh=True)

    def _added(self, node: Node) -> None:
        args: Any = node.args
        tensor, dim, index, source = args[:4]
        alpha = node.kwargs.get("alpha", node.args[4] if len(node.args) > 4 else 1)
        coordinate = self._coordinate(index)
        if tensor in self.rows or coordinate is None or source not in self.rows:
            raise self._refused("is added to, or with,")
        made = self._sum_of(source, int(dim), {int(dim): coordinate}, self.rows[index].mask)  # type: ignore
        written = self._write(node, aten.add.Tensor, (tensor, made), {} if alpha == 1 else {"alpha": alpha})
        if alpha == 1:
            self._turn(source, index, tensor, written, {int(dim): coordinate}, True)  # type: ignore[arg-type]

    def _put(self, node: Node) -> None:
        args: Any = node.args
        tensor, indices, values = args[:3]
        accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
        given = {d: i for d, i in enumerate(indices) if i is not None}  # type: ignore[arg-type]
        if tensor in self.rows:
            raise self._refused("something is put in")
        mask = next((i if _is_mask(i) else self.rows[i].mask for i in given.values() if _is_mask(i) or i in self.rows),
                    None)  # fmt: skip
        if mask is None:
            raise self._refused("is put by a mask that is not known, of")
        n = self._val(mask).dim()
        if len(given) == 1 and _is_mask(next(iter(given.values()))):
            place = next(iter(given))
            at_dims: dict[int, int] = {place + k: k for k in range(n)}
        else:
            found = {d: self._coordinate(i) for d, i in given.items()}
            if None in found.values():
                raise self._refused("an index is computed from")
            at_dims = found  # type: ignore[assignment]
        dims = sorted(at_dims)
        if dims != list(range(dims[0], dims[0] + len(dims))) or [at_dims[d] for d in dims] != sorted(at_dims.values()):
            raise self._refused("dims that do not follow each other are indexed by")
        shape = self._val(tensor).shape
        if any(shape[d] != self._val(mask).shape[k] for d, k in at_dims.items()):
            raise self._refused("a tensor of another size than the mask takes")
        if values in self.rows:
            if not accumulate and len(at_dims) < n and not _once(mask, set(at_dims.values())):
                raise self._refused("one place may be given several of")
            made = self._sum_of(values, dims[0], at_dims, mask)
        elif not accumulate and self._val(values).numel() == 1:  # out[mask] = 0
            made = values
        else:
            raise self._refused("values of a fixed size are put in the places of")
        if accumulate:
            self._write(node, aten.add.Tensor, (tensor, made), {})
            return
        before = self._added_to(tensor, values, at_dims)
        whole = mask
        if len(at_dims) < n:
            for k in sorted(set(range(n)) - set(at_dims.values()), reverse=True):
                whole = self._emit(aten.any.dim, (whole, k))
        lead, rest = dims[0], len(shape) - dims[-1] - 1
        sizes = [*[1] * lead, *(shape[d] for d in dims), *[1] * rest]
        whole = self._emit(aten.reshape.default, (whole, sizes))
        written = self._write(node, aten.where.self, (whole, made, tensor), {})
        if values in self.rows and (before is not None or len(at_dims) == n):
            rows = before if before is not None else self.rows[values].full
            self.turns.append(Turn(mask, rows, tensor, written, tuple(sorted(at_dims.items())), before is not None))

    def _sum_of(self, source: Any, dim: int, at_dims: dict[int, int], mask: Node) -> Node:
        """The selected rows at their place along some dims of the mask, zero where there are none, several added up."""
        rows = self._computed(source)
        if rows.mask is not mask or rows.dim != dim:
            raise self._refused("another mask, or along another dim, selects")
        return self._sum_of_rows(rows, dim, at_dims)

    def _sum_of_rows(self, rows: Rows, dim: int, at_dims: dict[int, int]) -> Node:
        mask = rows.mask
        assert rows.full is not None
        shape, val = self._val(mask).shape, self._val(rows.full)
        before, after = list(val.shape[:dim]), list(val.shape[dim + 1 :])
        which = self._emit(aten.reshape.default, (mask, [prod(shape), *[1] * len(after)]))
        made = self._emit(aten.where.ScalarOther, (which, rows.full, 0))
        self.leaving[made] = mask
        made = self._emit(aten.reshape.default, (made, [*before, *shape, *after]))
        others = [dim + k for k in range(len(shape)) if k not in at_dims.values()]
        return self._emit(aten.sum.dim_IntList, (made, others)) if others else made

    def _turn(
        self, source: Any, index: Any, tensor: Node, written: Node, at_dims: dict[int, int], adds: bool
    ) -> None:
        rows, mask = self.rows[source].full, self.rows[index].mask
        self.turns.append(Turn(mask, rows, tensor, written, tuple(sorted(at_dims.items())), adds))

    def _added_to(self, tensor: Any, values: Any, at_dims: dict[int, int]) -> Any:
        """What ``out[rows] += values`` adds; None where values are put that are no such sum."""
        made: Any = self.rows[values].full if values in self.rows else None
        if made is None or made.target is not aten.add.Tensor or made.kwargs or not isinstance(made.args[1], Node):
            return None
        taken = self.gathers.get(made.args[0])
        same = taken is not None and root_of(taken[0]) is root_of(tensor) and taken[1] == at_dims
        return made.args[1] if same else None

    def _finished(self, turn: Turn, tensor: Node, rows: Node, mask: Node) -> Node:
        """The tensor that a turn makes of all these rows, where it writes."""
        at_dims = dict(turn.place)
        self.node = turn.write
        standing = Rows(mask, rows, min(at_dims))
        made = self._sum_of_rows(standing, min(at_dims), at_dims)
        if turn.adds:
            made = self._emit(aten.add.Tensor, (tensor, made))
        else:
            shape, dims = self._val(tensor).shape, sorted(at_dims)
            sizes = [*[1] * dims[0], *(shape[d] for d in dims), *[1] * (len(shape) - dims[-1] - 1)]
            made = self._emit(aten.where.self, (self._emit(aten.reshape.default, (mask, sizes)), made, tensor))
        return self._emit(aten.copy_.default, (tensor, made))

    def _write(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """A node becomes another one that makes the same; what wrote in place still does."""
        tensor = node.args[0]
        made = self._emit(target, args, kwargs)
        if str(node.target).split(".")[1].endswith("_"):
            made = self._emit(aten.copy_.default, (tensor, made))
        node.replace_all_uses_with(made)
        self.gone.append(node)
        self.written.add(made)
        return made

    # -- small things

    def _coordinate(self, x: Any) -> int | None:
        rows = self.rows.get(x) if isinstance(x, Node) else None
        return rows.coordinate if isinstance(rows, Rows) and rows.coordinate != EVERY else None

    def _computed(self, node: Node) -> Rows:
        """The rows, of positions too."""
        rows = self.rows[node]
        if not isinstance(rows, Rows):
            raise self._refused("several tensors at once are taken of")
        if rows.full is not None:
            return rows
        shape, val = self._val(rows.mask).shape, self._val(rows.mask)
        n = shape[rows.coordinate]
        made = self._emit(aten.arange.start_step, (0, n, 1), {"dtype": torch.int64, "device": val.device})
        made = self._emit(aten.reshape.default, (made, [n if k == rows.coordinate else 1 for k in range(len(shape))]))
        made = self._emit(aten.expand.default, (made, list(shape)))
        made = self._emit(aten.reshape.default, (made, [prod(shape)]))
        return replace(rows, full=made, coordinate=None)

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value in self.counts:
                return self.counts[value]
            return self._computed(value).full if value in self.rows else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._replaced, value))
        return {k: self._replaced(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _emit_as(self, node: Node) -> Callable[..., Node]:
        self.node = node
        return self._emit

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        made = self.graph.call_function(target, args, kwargs or {})
        made.meta = {k: v for k, v in self.node.meta.items() if k != "val"}

        def val(x: Any) -> Any:
            if isinstance(x, Node):
                return x.meta["val"]
            return type(x)(map(val, x)) if isinstance(x, (list, tuple)) else x

        values = val(args)
        mode = next(v.meta["val"].fake_mode for v in self.graph.nodes if hasattr(v.meta.get("val"), "fake_mode"))
        with mode, torch.no_grad():
            made.meta["val"] = values[0] if target is aten.copy_.default else target(*values, **(kwargs or {}))
        return made

    @staticmethod
    def _val(x: Any) -> Any:
        return x.meta["val"] if isinstance(x, Node) else x

    _val_of_rows = _val

    def _refused_at(self, node: Node, what: str) -> CaptureError:
        self.node = node
        return self._refused(what)

    def _refused(self, what: str) -> CaptureError:
        return CaptureError(
            f"{what} rows that a mask selects, in '{module_of(self.node) or '<model>'}'{at(self.node)}: how many there "
            "are depends on values\n  do with each row what does not depend on the others, and add or put it back by "
            "the same mask (out.index_add_(0, rows, y); out[mask] = y), or compute all rows and use torch.where"
        )


def _is_pointwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or str(node.target) in BY_ELEMENT


def _once(mask: Node, dims: set[int]) -> bool:
    """Whether a mask selects at most one position for each place along some of its dims: it says where one number is
    among the results of a top-k along the others."""
    if mask.target is not aten.eq.Scalar:
        return False
    where, rest = mask.args[0], set(range(mask.meta["val"].dim())) - dims
    if not (isinstance(where, Node) and where.target is operator.getitem and where.args[1] == 1):
        return False
    topk = where.args[0]
    if not (isinstance(topk, Node) and topk.target in (aten.topk.default, aten.sort.default)):
        return False
    along = topk.args[2] if len(topk.args) > 2 else -1
    return rest == {int(along) % mask.meta["val"].dim()}  # type: ignore[arg-type]


__all__ = ["with_masks"]
