"""Writes of selected rows to a tensor of all rows: those that are not selected are masked (:mod:`.selected_rows`)."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.graph.expert_turns import Turn, root_of
from autopar.capture.graph.exported_nodes import name_of
from autopar.capture.graph.rows_of_graph import Rows, RowsOfGraph, is_mask, val_of
from autopar.capture.graph.same_masks import picked_once
from autopar.words.trees import PyTree

aten = torch.ops.aten
COLUMNED = ("unsqueeze", "expand", "expand_as", "repeat", "reshape", "view")
"""Operators by which the positions of rows become an index with a column for each feature."""
WRITES = ("index_add", "scatter_add", "scatter_reduce", "index_put", "index_copy", "masked_scatter")
"""Operators that write rows to a tensor; in place with a ``_`` behind."""


def writes_rows(name: str) -> bool:
    """Check whether an operator of this name writes rows to a tensor of all rows."""
    return any(part.removesuffix("_") in WRITES for part in name.split(".")[1:2])


class RowsPutBack:
    """Rewriter of the nodes that write selected rows to a tensor of all rows."""

    def __init__(self, state: RowsOfGraph) -> None:
        self.state = state

    def rewrite(self, node: Node) -> Node:
        """Write all rows to a tensor, masked, in place of selected ones; return the tensor afterwards."""
        args: PyTree = node.args
        name = name_of(node.target).split(".")[1].removesuffix("_")
        if name == "index_add":
            return self._added(node, args[2])
        if name in ("scatter_add", "scatter_reduce"):
            return self._scattered(node, name)
        if name == "index_copy":
            return self._put(node, {int(args[1]): args[2]}, args[3], False)
        if name == "masked_scatter":
            return self._put(node, {0: self._of_whole_rows(args[1], args[0])}, args[2], False)
        accumulate: Any = args[3] if len(args) > 3 else node.kwargs.get("accumulate", False)
        return self._put(node, {d: i for d, i in enumerate(args[1]) if i is not None}, args[2], accumulate)

    def _added(self, node: Node, index: Any) -> Node:
        args: PyTree = node.args
        tensor, dim, _, source = args[:4]
        alpha = node.kwargs.get("alpha", 1)
        coordinate = self.state.coordinate(index)
        if tensor in self.state.rows or coordinate is None or source not in self.state.rows:
            raise self.state.refused("is added to, or with,")
        added = self._sum_of(source, int(dim), {int(dim): coordinate}, self.state.rows[index].mask)
        written = self._write(node, aten.add.Tensor, (tensor, added), {} if alpha == 1 else {"alpha": alpha})
        if alpha == 1:
            rows, mask = self.state.rows[source].full, self.state.rows[index].mask
            self.state.turns.append(Turn(mask, rows, tensor, written, ((int(dim), coordinate),), True, _in_place(node)))
        return written

    def _scattered(self, node: Node, name: str) -> Node:
        """Add rows by an index that has the same place for all elements of a row."""
        args: PyTree = node.args
        tensor, dim, index, source = args[:4]
        if name == "scatter_reduce" and (args[4] != "sum" or not {**node.kwargs}.get("include_self", True)):
            raise self.state.refused("'scatter_reduce' of more than a sum takes")
        val, shape = val_of(tensor), list(val_of(source).shape)
        of_features = [n for d, n in enumerate(shape) if d != int(dim) % val.dim()]
        whole = [n for d, n in enumerate(val.shape) if d != int(dim) % val.dim()] == of_features
        if index not in self.state.columns or not whole or list(val_of(index).shape) != shape:
            raise self.state.refused("an index that is not the place of whole rows adds up")
        return self._added(node, self.state.columns[index])

    def note_columns(self, node: Node) -> None:
        """Note an index that has the position of each row in every column."""
        if name_of(node.target).split(".")[1:2] not in [[name] for name in COLUMNED]:
            return
        source = self.state.columns.get(node.args[0], node.args[0])  # type: ignore[arg-type]
        rows, val = self.state.rows[node], node.meta["val"]
        same = rows.dim == 0 and str(val.shape[0]) == str(val_of(source).shape[0])
        if same and self.state.coordinate(source) is not None:
            self.state.columns[node] = source  # type: ignore[assignment]

    def _of_whole_rows(self, mask: object, tensor: object) -> Any:
        """Return the mask of rows that a mask of their elements repeats for each element."""
        while isinstance(mask, Node) and name_of(mask.target).startswith(("aten.expand", "aten.unsqueeze")):
            source: Any = mask.args[0]
            n = source.meta["val"].dim()
            added: Any = mask.args[1]
            if "unsqueeze" in name_of(mask.target) and added % (n + 1) != n:
                break
            mask = source
        if not is_mask(mask) or list(val_of(mask).shape) != list(val_of(tensor).shape[: val_of(mask).dim()]):
            raise self.state.refused("'masked_scatter' puts in the places of elements, and not of")
        return mask

    def _put(self, node: Node, given: dict[int, Any], values: object, accumulate: bool) -> Node:
        tensor: Any = node.args[0]
        if tensor in self.state.rows:
            raise self.state.refused("something is put in")
        masks = (i if is_mask(i) else self.state.rows[i].mask for i in given.values()
                 if is_mask(i) or i in self.state.rows)  # fmt: skip
        mask = next(masks, None)
        if mask is None:
            raise self.state.refused("is put by a mask that is not known, of")
        n = val_of(mask).dim()
        if len(given) == 1 and is_mask(next(iter(given.values()))):
            place = next(iter(given))
            at_dims: dict[int, int] = {place + k: k for k in range(n)}
        else:
            coordinates = {d: self.state.coordinate(i) for d, i in given.items()}
            if None in coordinates.values():
                raise self.state.refused("an index is computed from")
            at_dims = coordinates  # type: ignore[assignment]
        dims = sorted(at_dims)
        if dims != list(range(dims[0], dims[0] + len(dims))) or [at_dims[d] for d in dims] != sorted(at_dims.values()):
            raise self.state.refused("dims that do not follow each other are indexed by")
        shape = val_of(tensor).shape
        if any(shape[d] != val_of(mask).shape[k] for d, k in at_dims.items()):
            raise self.state.refused("a tensor of another size than the mask takes")
        if values in self.state.rows:
            if not accumulate and len(at_dims) < n and not picked_once(mask, set(at_dims.values())):
                raise self.state.refused("one place may be given several of")
            put = self._sum_of(values, dims[0], at_dims, mask)
        elif not accumulate and val_of(values).numel() == 1:  # out[mask] = 0
            put = values
        else:
            raise self.state.refused("a tensor of fixed size is written to")
        if accumulate:
            return self._write(node, aten.add.Tensor, (tensor, put), {})
        before = self._added_to(tensor, values, at_dims)
        whole = mask
        if len(at_dims) < n:
            for k in sorted(set(range(n)) - set(at_dims.values()), reverse=True):
                whole = self.state.emit(aten.any.dim, (whole, k))
        lead, rest = dims[0], len(shape) - dims[-1] - 1
        sizes = [*[1] * lead, *(shape[d] for d in dims), *[1] * rest]
        whole = self.state.emit(aten.reshape.default, (whole, sizes))
        written = self._write(node, aten.where.self, (whole, put, tensor), {})
        if values in self.state.rows and (before is not None or len(at_dims) == n):
            rows = before if before is not None else self.state.rows[values].full
            place, in_place = tuple(sorted(at_dims.items())), _in_place(node)
            self.state.turns.append(Turn(mask, rows, tensor, written, place, before is not None, in_place))
        return written

    def _sum_of(self, source: Any, dim: int, at_dims: dict[int, int], mask: Node) -> Node:
        """Sum the selected rows at their places along some dims of the mask; places without rows are zero."""
        rows = self.state.computed(source)
        if self.state.same.root(rows.mask) is not self.state.same.root(mask) or rows.dim != dim:
            raise self.state.refused("another mask, or along another dim, selects")
        return self._sum_of_rows(replace(rows, mask=mask), dim, at_dims)

    def _sum_of_rows(self, rows: Rows, dim: int, at_dims: dict[int, int]) -> Node:
        mask = rows.mask
        assert rows.full is not None
        shape, val = val_of(mask).shape, val_of(rows.full)
        before, after = list(val.shape[:dim]), list(val.shape[dim + 1 :])
        which = self.state.emit(aten.reshape.default, (mask, [prod(shape), *[1] * len(after)]))
        spread = self.state.emit(aten.where.ScalarOther, (which, rows.full, 0))
        self.state.leaving[spread] = self.state.same.root(mask)
        spread = self.state.emit(aten.reshape.default, (spread, [*before, *shape, *after]))
        others = [dim + k for k in range(len(shape)) if k not in at_dims.values()]
        return self.state.emit(aten.sum.dim_IntList, (spread, others)) if others else spread

    def _added_to(self, tensor: object, values: object, at_dims: dict[int, int]) -> Any:
        """Return the values that ``out[rows] += values`` adds; None where other values are put."""
        added: Any = self.state.rows[values].full if values in self.state.rows else None
        if added is None or added.target is not aten.add.Tensor or added.kwargs or not isinstance(added.args[1], Node):
            return None
        taken = self.state.gathers.get(added.args[0])
        same = taken is not None and root_of(taken[0]) is root_of(tensor) and taken[1] == at_dims
        return added.args[1] if same else None

    def write_turn(self, turn: Turn, tensor: Node, rows: Node, mask: Node) -> Node:
        """Write all rows by their mask to the tensor of an iteration, and return the tensor afterwards."""
        at_dims = dict(turn.place)
        self.state.node = turn.write
        standing = Rows(mask, rows, min(at_dims))
        of_turn = self._sum_of_rows(standing, min(at_dims), at_dims)
        if turn.adds:
            of_turn = self.state.emit(aten.add.Tensor, (tensor, of_turn))
        else:
            shape, dims = val_of(tensor).shape, sorted(at_dims)
            sizes = [*[1] * dims[0], *(shape[d] for d in dims), *[1] * (len(shape) - dims[-1] - 1)]
            for k in sorted(set(range(val_of(mask).dim())) - set(at_dims.values()), reverse=True):
                mask = self.state.emit(aten.any.dim, (mask, k))
            which = self.state.emit(aten.reshape.default, (mask, sizes))
            of_turn = self.state.emit(aten.where.self, (which, of_turn, tensor))
        return self.state.emit(aten.copy_.default, (tensor, of_turn)) if turn.in_place else of_turn

    def _write(self, node: Node, target: object, args: tuple[object, ...], kwargs: dict[str, PyTree]) -> Node:
        """Replace a node by one with the same result, which writes in place where the node did."""
        tensor = node.args[0]
        result = self.state.emit(target, args, kwargs)
        if _in_place(node):
            result = self.state.emit(aten.copy_.default, (tensor, result))
        node.replace_all_uses_with(result)
        self.state.gone.append(node)
        self.state.written.add(result)
        return result


def _in_place(node: Node) -> bool:
    return name_of(node.target).split(".")[1].endswith("_")
