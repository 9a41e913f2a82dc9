"""Masks that select the same rows, however often a model writes them down: ``out[e == k] = f(x[e == k])``.

Two masks are the same if they are equal expressions of the same tensors, and where one is the other in another
shape: ``mask.view(-1)`` selects the same elements in the same order as ``mask``. Nothing may write to what they are
made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.conditional_writes import writes
from autopar.capture.graph.exported_nodes import name_of

SHAPED = ("aten.reshape.default", "aten.view.default", "aten.flatten.using_ints", "aten.alias.default")
"""The same elements in the same order."""
VIEWS = (*SHAPED, "aten.select.int", "aten.slice.Tensor", "aten.permute.default", "aten.transpose.int",
         "aten.unsqueeze.default", "aten.squeeze.dim", "aten.expand.default", "aten.detach.default")  # fmt: skip
COMPARED = (*VIEWS, "aten.eq.Scalar", "aten.ne.Scalar", "aten.gt.Scalar", "aten.any.dim", "aten.logical_not.default")
"""Operators of which equal calls are taken for one."""


class SameMasks:
    """Which masks of a graph are the same."""

    def __init__(self, graph: Graph) -> None:
        self._written = {behind(node.args[0], VIEWS) for node in graph.nodes if writes(node) and node.args}
        self._first: dict[object, Node] = {}

    def root(self, mask: Node) -> Node:
        """Return the first mask of all that are equal, in the shape in which it was made."""
        unshaped = behind(mask, SHAPED)
        return self._first.setdefault(self._written_down(unshaped), unshaped)

    def _written_down(self, value: object) -> object:
        """Return a key that is equal for equal values."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._written_down, value))
        if not isinstance(value, Node):
            return type(value), value
        if name_of(value.target) not in COMPARED or value.kwargs or behind(value, VIEWS) in self._written:
            return value
        return name_of(value.target), self._written_down(value.args)


def behind(value: object, views: tuple[str, ...]) -> Any:
    """Return the tensor behind views or casts: operators named in `views` are passed over."""
    while isinstance(value, Node) and value.op == "call_function" and name_of(value.target) in views:
        value = value.args[0]
    return value


def picked_once(mask: Node, dims: set[int]) -> bool:
    """Check whether a mask selects at most one position for each place along some of its dims.

    It does where it says where one number is among the results of a top-k along the other dims.
    """
    if mask.target is not torch.ops.aten.eq.Scalar:
        return False
    where, n = mask.args[0], mask.meta["val"].dim()
    rest = set(range(n)) - dims
    while isinstance(where, Node) and name_of(where.target) in SHAPED and rest == {n - 1}:
        before = where.args[0].meta["val"]  # type: ignore[union-attr]
        if before.dim() == 0 or before.shape[-1] != where.meta["val"].shape[-1]:
            return False
        where, n, rest = where.args[0], before.dim(), {before.dim() - 1}
    if not (isinstance(where, Node) and where.args and where.args[1:] == (1,) and isinstance(where.args[0], Node)):
        return False
    topk = where.args[0]
    if topk.target not in (torch.ops.aten.topk.default, torch.ops.aten.sort.default):
        return False
    along = topk.args[2] if len(topk.args) > 2 else -1
    return rest == {int(along) % n}  # type: ignore[arg-type]
