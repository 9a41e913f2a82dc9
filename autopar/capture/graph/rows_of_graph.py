"""Replacements of tensors of rows that a mask selects, while a graph is rewritten (:mod:`.selected_rows`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.expert_turns import Turn
from autopar.capture.graph.exported_nodes import at, flat, is_symbolic, module_of
from autopar.capture.graph.same_masks import SameMasks
from autopar.errors import CaptureError
from autopar.words.trees import PyTree

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Replacement of a tensor of selected rows.

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
"""The coordinate of a tensor that holds all of them."""


def is_mask(x: object) -> bool:
    """Check whether a node is a mask of a fixed size."""
    val = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype == torch.bool and not is_symbolic(tuple(val.shape))


def selects(node: Node) -> bool:
    """Check whether a node makes rows from a mask."""
    name = str(node.target)
    if not any(isinstance(v, torch.Tensor) and is_symbolic(tuple(v.shape)) for v in flat(node.meta.get("val"))):
        return False
    if name in ("aten.where.default", "aten.nonzero.default", "aten.nonzero_numpy.default"):
        return not is_symbolic(tuple(node.args[0].meta["val"].shape))  # type: ignore[union-attr]
    return name == "aten.index.Tensor" and any(is_mask(i) for i in node.args[1])  # type: ignore[union-attr]


class NodeMaker:
    """Maker of new nodes in an exported graph, each in the module and at the line of the node that it replaces.

    Attributes:
        node: the node that is rewritten now.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.node: Node = next(iter(graph.nodes))

    def emit(self, target: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree] | None = None) -> Node:
        """Make a node with its value, where the graph inserts now."""
        emitted = self.graph.call_function(target, args, kwargs or {})
        emitted.meta = {k: v for k, v in self.node.meta.items() if k != "val"}
        values = val_of(args)
        mode = next(v.meta["val"].fake_mode for v in self.graph.nodes if hasattr(v.meta.get("val"), "fake_mode"))
        with mode, torch.no_grad():
            emitted.meta["val"] = values[0] if target is aten.copy_.default else target(*values, **(kwargs or {}))
        return emitted

    def emit_as(self, node: Node) -> Callable[..., Node]:
        """Return :meth:`emit` for nodes in the place of another one."""
        self.node = node
        return self.emit

    def refused(self, what: str) -> CaptureError:
        """Make the error of a use of selected rows that has no form of fixed size."""
        return CaptureError(
            f"{what} rows that a mask selects, in '{module_of(self.node) or '<model>'}'{at(self.node)}: how many there "
            "are depends on values\n  compute each row independently of the others and write or add it back by "
            "the same mask (out.index_add_(0, rows, y); out[mask] = y), or compute all rows and use torch.where"
        )

    def refused_at(self, node: Node, what: str) -> CaptureError:
        """Make :meth:`refused` at another node."""
        self.node = node
        return self.refused(what)

    _emit = emit


def val_of(x: object) -> Any:
    """Return the traced values of nodes in nested tuples and lists."""
    if isinstance(x, Node):
        return x.meta["val"]
    return type(x)(map(val_of, x)) if isinstance(x, (list, tuple)) else x


class RowsOfGraph(NodeMaker):
    """Replacements of the nodes of a graph that hold selected rows."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.rows: dict[Node, Any] = {}
        """The replacement of a node, or a list of those of its results."""
        self.counts: dict[Node, Any] = {}
        """Numbers of rows that were asked for, which only shapes may use; of rows of several masks, one for each."""
        self.counted: dict[Node, Node] = {}
        """The mask whose rows a number is of."""
        self.positions: set[Node] = set()
        """Tensors of the places of rows."""
        self.same = SameMasks(graph)
        self.turns: list[Turn] = []
        """Writes of selected rows to a tensor, in order: loops over experts are found among these."""
        self.gathers: dict[Node, tuple[Node, dict[int, int]]] = {}
        """Rows that were taken from a tensor: the tensor, and the coordinate by which each of its dims is indexed."""
        self.leaving: dict[Node, Node] = {}
        """Nodes at which selected rows become part of a tensor of all rows, and the mask that selects them."""
        self.written: set[Node] = set()
        """New nodes that write rows to a tensor of all rows."""
        self.gone: list[Node] = []
        """Nodes that are replaced, and erased in the end."""
        self.asked: dict[Node, Node] = {}
        """The masks for which the model's code asks whether they select any rows, and the node that asks."""
        self.columns: dict[Node, Node] = {}
        """Indices that repeat the position of each row for all of its features, and the positions."""

    def coordinate(self, x: object) -> int | None:
        """Return the dim of the mask along which a node holds positions; None for other values."""
        rows = self.rows.get(x) if isinstance(x, Node) else None
        return rows.coordinate if isinstance(rows, Rows) and rows.coordinate != EVERY else None

    def computed(self, node: Node) -> Rows:
        """Return the rows of a node; positions are computed."""
        rows = self.rows[node]
        if not isinstance(rows, Rows):
            raise self.refused("an operator with several outputs reads")
        if rows.full is not None:
            return rows
        shape, val = val_of(rows.mask).shape, val_of(rows.mask)
        n = shape[rows.coordinate]
        positions = self.emit(aten.arange.start_step, (0, n, 1), {"dtype": torch.int64, "device": val.device})
        sizes = [n if k == rows.coordinate else 1 for k in range(len(shape))]
        positions = self.emit(aten.reshape.default, (positions, sizes))
        positions = self.emit(aten.expand.default, (positions, list(shape)))
        positions = self.emit(aten.reshape.default, (positions, [prod(shape)]))
        self.positions.add(positions)
        return replace(rows, full=positions, coordinate=None)

    def replaced(self, value: object) -> Any:
        """Return an argument with all rows in the place of selected ones."""
        if isinstance(value, Node):
            if value in self.counts:
                return self.counts[value]
            return self.computed(value).full if value in self.rows else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.replaced, value))
        return {k: self.replaced(v) for k, v in value.items()} if isinstance(value, dict) else value
