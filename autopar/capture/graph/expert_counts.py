"""Numbers of rows of each expert: recognizes tensors of counts in the forms in which people count."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from autopar.capture.graph.exported_nodes import FxNode, name_of
from autopar.capture.graph.same_masks import SHAPED, behind

aten = torch.ops.aten
CASTS = (*SHAPED, "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.detach.default",
         "aten._to_copy.default")  # fmt: skip
ZEROS, ONES = ("aten.zeros", "aten.new_zeros"), ("aten.ones", "aten.new_ones")


def counted_numbers(counts: object) -> FxNode:
    """Return the integers whose occurrences a tensor counts, in any shape and dtype; None if not known."""
    counts = behind(counts, CASTS)
    if not isinstance(counts, Node):
        return None
    if counts.target is aten.stack.default:
        parts = [element_of(x) for x in counts.args[0]]  # type: ignore[union-attr]
        whole = parts[0][0] if parts[0] is not None else None
        if whole is None or parts != [(whole, k) for k in range(len(parts))]:
            return None
        return counted_numbers(whole) if whole.meta["val"].shape[0] == len(parts) else None
    if counts.target is aten.histc.default:
        given = dict(zip(("bins", "min", "max"), counts.args[1:], strict=False)) | dict(counts.kwargs)
        bins, low, high = (given.get(name, default) for name, default in (("bins", 100), ("min", 0), ("max", 0)))
        return behind(counts.args[0], CASTS) if low == 0 and high in (bins, bins - 1) else None  # type: ignore[operator]
    if counts.target is aten.scatter_add.default:
        zeros, _, index, ones = counts.args[:4]
        filled = name_of(zeros.target).startswith(ZEROS) and name_of(ones.target).startswith(ONES)  # type: ignore
        return behind(index, CASTS) if filled else None
    if counts.target is aten.sum.dim_IntList:
        if (marked := _marked(counts)) is not None:
            return marked
        hot, order = hot_by_dim(counts.args[0])
        summed = {order[int(d)] for d in counts.args[1]}  # type: ignore[union-attr, arg-type]
        return behind(hot.args[0], CASTS) if hot is not None and summed == set(range(len(order) - 1)) else None
    return None


def hot_by_dim(value: FxNode) -> tuple[FxNode, list[int]]:
    """Return the ``one_hot`` that a tensor is, in any order of dims, and the order; None for other tensors."""
    hot = behind(value, CASTS)
    order = list(range(value.meta["val"].dim()))
    if isinstance(hot, Node) and hot.target is aten.permute.default:
        order = [int(d) % len(order) for d in hot.args[1]]  # type: ignore[union-attr, arg-type]
        hot = behind(hot.args[0], CASTS)
    same = isinstance(hot, Node) and hot.target is aten.one_hot.default and hot.meta["val"].dim() == len(order)
    return (hot if same else None), order


def _marked(total: FxNode) -> FxNode:
    """Return ``picked`` of ``zeros.scatter_(1, picked, 1).sum(0)``, where a top-k picked; None for others."""
    marks = behind(total.args[0], CASTS)
    if not isinstance(marks, Node) or total.args[1] not in ([0], (0,), [-2], (-2,)):
        return None
    if name_of(marks.target).startswith(ZEROS):  # written in place, once, before it was summed
        others = [user for user in marks.users if user is not total]
        if len(others) != 1 or others[0].target is not aten.scatter_.value or others[0].users or others[0] > total:
            return None
        marks = others[0]
    if marks.target not in (aten.scatter_.value, aten.scatter.value) or len(marks.args) != 4 or marks.kwargs:
        return None
    zeros, dim, index, value = marks.args
    if not name_of(zeros.target).startswith(ZEROS) or zeros.meta["val"].dim() != 2 or dim not in (1, -1):  # type: ignore
        return None
    picked = behind(index, CASTS)
    of_topk = picked.target is operator.getitem and picked.args[0].target is aten.topk.default and picked.args[1] == 1
    return picked if of_topk and value == 1 and _along_last(picked.args[0]) else None


def picking(picked: FxNode, several: Sequence[str], one: Sequence[str]) -> tuple[FxNode, int | None] | None:
    """Return the operator that picked numbers along a dim, and that dim: None if it picked of all elements.

    The numbers may be the second result of an operator named in ``several``, or the result of one in ``one``.
    """
    is_second = picked.target is operator.getitem and picked.args[1] == 1
    source = picked.args[0] if is_second else picked
    name = name_of(source.target)
    if name not in (several if is_second else one):
        return None
    given = source.args[2:] if name == "aten.topk.default" else source.args[1:]
    otherwise = source.kwargs.get("dim", None if name.startswith(("aten.argmax", "aten.argmin")) else -1)
    return source, next((d for d in given if isinstance(d, int) and not isinstance(d, bool)), otherwise)


def number_of_choices(picked: object) -> int | None:
    """Return how many numbers there are of which some, or the best one, were picked; None if not picked."""
    picked = behind(picked, (*CASTS, *PARTS))
    found = picking(picked, PICKS_SEVERAL, PICKS_ONE) if isinstance(picked, Node) else None
    if found is None or found[1] is None:
        return None
    size = found[0].args[0].meta["val"].shape[found[1]]
    return size if isinstance(size, int) else None


PARTS = ("aten.select.int", "aten.slice.Tensor", "aten.permute.default", "aten.transpose.int", "aten.t.default",
         "aten.unsqueeze.default", "aten.squeeze.dim", "aten.expand.default", "aten.alias.default")  # fmt: skip
PICKS_SEVERAL = ("aten.topk.default", "aten.sort.default", "aten.max.dim", "aten.min.dim")
PICKS_ONE = ("aten.argmax.default", "aten.argmin.default", "aten.argsort.default")


def _along_last(topk: FxNode) -> bool:
    """Return whether a top-k of a matrix is one of each row, which picks no number twice."""
    along = topk.args[2] if len(topk.args) > 2 else topk.kwargs.get("dim", -1)
    return topk.args[0].meta["val"].dim() == 2 and along in (1, -1)


def element_of(number: object) -> tuple[Node, int] | None:
    """Return the one-dimensional tensor that a scalar is an element of, and the position; None for others."""
    element = behind(number, CASTS)
    if not isinstance(element, Node) or element.target not in (operator.getitem, aten.select.int):
        return None
    whole: FxNode = element.args[0]
    if element.target is operator.getitem:
        if whole.target is not aten.unbind.int:
            return None
        whole = whole.args[0]
    if whole.meta["val"].dim() != 1 or not isinstance(element.args[-1], int):
        return None
    return whole, element.args[-1]
