"""Which operators work on each selected row by itself (:mod:`.selected_rows`); others are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.graph.exported_nodes import name_of
from autopar.capture.graph.rows_of_graph import Rows
from autopar.capture.graph.run_once import is_pointwise
from autopar.errors import CaptureError

Refused = Callable[[str], CaptureError]
_Judge = Callable[[Node, Sequence[Node], Sequence[Rows], int], bool]

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
    if is_by_element(node):
        _check_broadcast(node, args, taken, dim, refused)
        return
    name = name_of(node.target)
    judge = _JUDGES.get(name)
    if judge is None and name in WITH_DIMS:
        judge = _is_along_others
    if judge is None or not judge(node, args, taken, dim):
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


def _is_along_others(node: Node, args: Sequence[Node], taken: Sequence[Rows], _dim: int) -> bool:
    """Check whether an operator works along dims that are not that of the rows."""
    name = name_of(node.target)
    place = WITH_DIMS[name]
    if args != [node.args[0]] or place is None:
        return args == [node.args[0]]
    n = _dims(args[0])
    dims: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", DEFAULT_DIM.get(name))
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and all(d % n != taken[0].dim for d in dims)


def _is_of_leading_rows(features: int) -> _Judge:
    """Make a check that the last `features` dims of an operator's first input are not the rows."""
    return lambda node, args, taken, _dim: args == [node.args[0]] and taken[0].dim < _dims(args[0]) - features


def _is_normed_behind_rows(node: Node, args: Sequence[Node], taken: Sequence[Rows], _dim: int) -> bool:
    shape: Any = node.args[1]
    return args == [node.args[0]] and taken[0].dim < _dims(args[0]) - len(shape)


def _is_reshaped_around_rows(node: Node, args: Sequence[Node], taken: Sequence[Rows], dim: int) -> bool:
    return prod(args[0].meta["val"].shape[: taken[0].dim]) == prod(node.meta["val"].shape[:dim])


def _is_gathered_along_others(node: Node, args: Sequence[Node], _taken: Sequence[Rows], dim: int) -> bool:
    given: Any = node.args
    return set(args) == {given[0], given[2]} and given[1] % _dims(given[0]) != dim


def _is_joined_along_others(node: Node, args: Sequence[Node], _taken: Sequence[Rows], dim: int) -> bool:
    given: Any = node.args
    along = int(given[1]) if len(given) > 1 else 0
    return len(args) == len(set(given[0])) and along % _dims(node) != dim


def _is_row_of_addmm(node: Node, args: Sequence[Node], taken: Sequence[Rows], _dim: int) -> bool:
    return args == [node.args[1]] and taken[0].dim == 0 and _dims(node.args[0]) == 1


def _is_einsum_of_rows(node: Node, args: Sequence[Node], taken: Sequence[Rows], _dim: int) -> bool:
    """Check whether an einsum has the rows of one tensor as rows of the result."""
    given: Any = node.args
    equation, operands = str(given[0]).replace(" ", ""), list(given[1])
    terms, arrow, result = equation.partition("->")
    if "." in equation or not arrow or len(args) != 1 or operands.count(args[0]) != 1:
        return False
    letter = terms.split(",")[operands.index(args[0])][taken[0].dim]
    return letter in result and terms.count(letter) == 1


def _dims(node: Any) -> int:
    return int(node.meta["val"].dim())


_JUDGES: dict[str, _Judge] = {
    **dict.fromkeys(("aten.linear.default", "aten.matmul.default", "aten.mm.default"), _is_of_leading_rows(1)),
    **dict.fromkeys(("aten.layer_norm.default", "aten.rms_norm.default"), _is_normed_behind_rows),
    **dict.fromkeys(("aten.reshape.default", "aten.view.default"), _is_reshaped_around_rows),
    # the dim of the rows is found by its size in the result
    **dict.fromkeys(("aten.expand.default", "aten.expand_as.default", "aten.permute.default", "aten.transpose.int"),
                    lambda *_: True),
    **dict.fromkeys(FILLED, lambda node, args, *_: args == [node.args[0]]),
    "aten.gather.default": _is_gathered_along_others, "aten.cat.default": _is_joined_along_others,
    "aten.embedding.default": lambda node, args, *_: args == [node.args[1]],
    "aten.addmm.default": _is_row_of_addmm, "aten.einsum.default": _is_einsum_of_rows,
}  # fmt: skip
"""Operators that may work on each row by itself, and whether a call does."""
