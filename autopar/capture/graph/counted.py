"""Numbers of rows for each expert: of what a tensor holds the counts, in the ways in which people count."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.graph.exported import name_of
from autopar.capture.graph.same_masks import SHAPED, behind

aten = torch.ops.aten
CASTS = (*SHAPED, "aten.to.dtype", "aten.detach.default", "aten._to_copy.default")
ZEROS, ONES = ("aten.zeros", "aten.new_zeros"), ("aten.ones", "aten.new_ones")


def counted_numbers(counts: Any) -> Any:
    """The integers of which a tensor says how often each occurs, in any shape and dtype; None where it is not known."""
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
        hot, dims = behind(counts.args[0], CASTS), counts.args[1]
        if isinstance(hot, Node) and hot.target is aten.one_hot.default:
            last = hot.meta["val"].dim() - 1
            summed = {int(d) % (last + 1) for d in dims}  # type: ignore[arg-type, union-attr]
            return behind(hot.args[0], CASTS) if summed == set(range(last)) else None
    return None


def element_of(number: Any) -> tuple[Node, int] | None:
    """The tensor of one dim of which a tensor without dims is an element, and which one; None of any other."""
    element = behind(number, CASTS)
    if not isinstance(element, Node) or element.target not in (operator.getitem, aten.select.int):
        return None
    whole: Any = element.args[0]
    if element.target is operator.getitem:
        if whole.target is not aten.unbind.int:
            return None
        whole = whole.args[0]
    if whole.meta["val"].dim() != 1 or not isinstance(element.args[-1], int):
        return None
    return whole, element.args[-1]


__all__ = ["CASTS", "counted_numbers", "element_of"]
