"""What stands for tensors of rows that a mask selects, while a graph is rewritten (:mod:`.selected_rows`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.exported_nodes import at, is_symbolic, module_of
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
"""The coordinate of a tensor that holds all of them."""


def is_mask(x: Any) -> bool:
    """Whether a node is a mask of a fixed size."""
    val = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(val, torch.Tensor) and val.dtype == torch.bool and not is_symbolic(tuple(val.shape))


class RowsOfGraph:
    """What stands for the nodes of a graph that are of selected rows, and new nodes in their place."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rows: dict[Node, Any] = {}
        """What stands for a node, or for each of its results."""
        self.counts: dict[Node, Any] = {}
        """Numbers of rows that were asked for, which only shapes may use; of rows of several masks, one for each."""
        self.counted: dict[Node, Node] = {}
        """The mask whose rows a number is of."""
        self.positions: set[Node] = set()
        """Tensors of the places of rows."""
        self.node: Node = next(iter(graph.nodes))
        """What is rewritten now: what is made instead has its place in the model."""

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
        positions = self._emit(aten.arange.start_step, (0, n, 1), {"dtype": torch.int64, "device": val.device})
        sizes = [n if k == rows.coordinate else 1 for k in range(len(shape))]
        positions = self._emit(aten.reshape.default, (positions, sizes))
        positions = self._emit(aten.expand.default, (positions, list(shape)))
        positions = self._emit(aten.reshape.default, (positions, [prod(shape)]))
        self.positions.add(positions)
        return replace(rows, full=positions, coordinate=None)

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
        emitted = self.graph.call_function(target, args, kwargs or {})
        emitted.meta = {k: v for k, v in self.node.meta.items() if k != "val"}

        def val(x: Any) -> Any:
            if isinstance(x, Node):
                return x.meta["val"]
            return type(x)(map(val, x)) if isinstance(x, (list, tuple)) else x

        values = val(args)
        mode = next(v.meta["val"].fake_mode for v in self.graph.nodes if hasattr(v.meta.get("val"), "fake_mode"))
        with mode, torch.no_grad():
            emitted.meta["val"] = values[0] if target is aten.copy_.default else target(*values, **(kwargs or {}))
        return emitted

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


__all__ = ["EVERY", "Rows", "RowsOfGraph", "is_mask"]
