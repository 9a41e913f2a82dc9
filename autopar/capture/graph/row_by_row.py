"""Which operators work on each selected row by itself (:mod:`.selected_rows`); others are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch.fx import Node

from autopar.capture.graph.rows_of_graph import Rows
from autopar.capture.graph.run_once import is_pointwise
from autopar.errors import CaptureError

Refused = Callable[[str], CaptureError]

WITH_DIMS = {
    "aten.softmax.int": 1, "aten.log_softmax.int": 1, "aten.sum.dim_IntList": 1, "aten.mean.dim": 1,
    "aten.unsqueeze.default": None, "aten.squeeze.dim": 1, "aten.select.int": 1, "aten.slice.Tensor": 1,
    "aten.chunk.default": 2, "aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.glu.default": 1,
    "aten.amax.default": 1, "aten.norm.ScalarOpt_dim": 2,
}  # fmt: skip
"""Operators that work along dims, which must not be that of the rows, and where they stand; None: any is right."""
DEFAULT_DIM = {"aten.slice.Tensor": 0, "aten.chunk.default": 0, "aten.split.Tensor": 0, "aten.glu.default": -1,
               "aten.split_with_sizes.default": 0}  # fmt: skip
FILLED = ("aten.full_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.empty_like.default")
VIEWS = ("reshape", "view", "unsqueeze", "squeeze", "select", "slice", "chunk", "split", "split_with_sizes", "expand",
         "expand_as", "permute", "transpose", "to")  # fmt: skip
BY_ELEMENT = {"aten.to.dtype", "aten.dropout.default", "aten.clone.default", "aten.contiguous.default",
              "aten.type_as.default", "aten.detach.default", "aten.silu.default", "aten.gelu.default",
              "aten.where.ScalarOther", "aten.where.ScalarSelf"}  # fmt: skip


def check(node: Node, args: Sequence[Node], taken: Sequence[Rows], dim: int, refused: Refused) -> None:
    """Refuse a node that looks across rows.

    Args:
        node: an operator that takes rows.
        args: its arguments that have rows.
        taken: their replacements.
        dim: the dim of rows in the result.
        refused: makes the error.
    """
    name = str(node.target)
    first = node.args[0]
    if is_by_element(node):
        _check_broadcast(node, args, taken, dim, refused)
        return
    if name in ("aten.linear.default", "aten.matmul.default", "aten.mm.default"):
        if args == [first] and taken[0].dim < args[0].meta["val"].dim() - 1:
            return
    elif name in ("aten.layer_norm.default", "aten.rms_norm.default"):
        if args == [first] and taken[0].dim < args[0].meta["val"].dim() - len(node.args[1]):  # type: ignore[arg-type]
            return
    elif name in ("aten.reshape.default", "aten.view.default"):
        given, out = args[0].meta["val"].shape, node.meta["val"].shape
        if prod(given[: taken[0].dim]) == prod(out[:dim]):
            return
    elif name in ("aten.expand.default", "aten.expand_as.default", "aten.permute.default", "aten.transpose.int"):
        return  # the dim of the rows is found by its size in the result
    elif name in FILLED and args == [first]:
        return
    elif name == "aten.gather.default":
        if set(args) == {first, node.args[2]} and node.args[1] % first.meta["val"].dim() != dim:  # type: ignore
            return
    elif name == "aten.cat.default":
        along = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        if len(args) == len(set(node.args[0])) and along % node.meta["val"].dim() != dim:  # type: ignore[arg-type]
            return
    elif name == "aten.embedding.default":
        if args == [node.args[1]]:
            return
    elif name == "aten.addmm.default":
        if args == [node.args[1]] and taken[0].dim == 0 and node.args[0].meta["val"].dim() == 1:  # type: ignore[union-attr]
            return
    elif name == "aten.einsum.default":
        if _by_rows_only(node, args, taken):
            return
    elif name in WITH_DIMS and args == [first]:
        place = WITH_DIMS[name]
        if place is None:
            return
        n = args[0].meta["val"].dim()
        dims = node.args[place] if len(node.args) > place else node.kwargs.get("dim", DEFAULT_DIM.get(name))
        dims = [dims] if isinstance(dims, int) else dims
        if dims and all(d % n != taken[0].dim for d in dims):  # type: ignore[operator, union-attr]
            return
    raise refused(f"'{name}' may look across")


def _check_broadcast(
    node: Node, args: Sequence[Node], taken: Sequence[Rows], dim: int, refused: Refused
) -> None:
    from_end = node.meta["val"].dim() - dim
    for n in node.all_input_nodes:
        val = n.meta["val"]
        if n in args:
            if val.dim() - taken[args.index(n)].dim != from_end:
                raise refused("different dims hold")
        elif isinstance(val, torch.Tensor) and val.dim() >= from_end and val.shape[-from_end] != 1:
            raise refused("a tensor of another size meets")


def is_by_element(node: Node) -> bool:
    """Check whether each element of the result follows from the same element of what is given."""
    return is_pointwise(node) or str(node.target) in BY_ELEMENT


def _by_rows_only(node: Node, args: Sequence[Node], taken: Sequence[Rows]) -> bool:
    """Check whether an einsum has the rows of one tensor as rows of the result."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    given, arrow, result = equation.partition("->")
    terms = given.split(",")
    if "." in equation or not arrow or len(args) != 1 or list(operands).count(args[0]) != 1:  # type: ignore[arg-type]
        return False
    place = list(operands).index(args[0])  # type: ignore[arg-type]
    letter = terms[place][taken[0].dim]
    return letter in result and given.count(letter) == 1


__all__ = ["VIEWS", "check", "is_by_element"]
