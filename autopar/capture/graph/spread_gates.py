"""Gates: weights of a token for all experts, of which those that a top-k picked are not zero.

``gates[:, e] > 0`` asks for the tokens of an expert as ``(picked == e).any(-1)`` does.
``gates = zeros.scatter(1, picked, weights)`` spreads the weights of each row of a top-k over the columns of its
numbers; so does a softmax of what was spread over minus infinity. Scaled, or multiplied by anything, zeros stay zeros.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.graph.conditional_writes import writes
from autopar.capture.graph.expert_counts import CASTS, picking
from autopar.capture.graph.exported_nodes import name_of
from autopar.capture.graph.same_masks import VIEWS, behind

aten = torch.ops.aten
SPREADS = ("aten.scatter.src", "aten.scatter.value", "aten.scatter_.src", "aten.scatter_.value")
ZEROS = ("aten.zeros", "aten.new_zeros", "aten.zeros_like")
FILLED = ("aten.full.default", "aten.full_like.default", "aten.new_full.default")
PICKS = ("aten.topk.default", "aten.sort.default", "aten.sort.stable")
PICKED_ALONE = ("aten.argsort.default", "aten.argsort.stable", "aten.argmax.default")
NONZERO = (aten.ne.Scalar, aten.gt.Scalar)


def column_of(mask: Any) -> tuple[Node, Any, int] | None:
    """Return the gates of which a mask says where a column is not zero, the operator that compares, and the column."""
    select: Any = mask
    compared: Any = None
    if select.target in NONZERO:
        compared, select = mask, mask.args[0]
    if not isinstance(select, Node) or select.target is not aten.select.int:
        return None
    gates: Any = select.args[0]
    if compared is None:
        compared, gates = gates, gates.args[0] if gates.args else None
    of_matrix = isinstance(gates, Node) and gates.meta["val"].dim() == 2 and select.args[1] in (1, -1)
    if not of_matrix or compared.target not in NONZERO or compared.args[1] != 0:
        return None
    return None if numbers_spread(gates) is None else (gates, compared.target, int(select.args[2]))  # type: ignore


def numbers_spread(gates: object, others: float = 0.0) -> Any:
    """Return the columns of ``gates`` [rows n] that may hold something else than ``others``, int [rows k].

    They are all different in a row; None if they are not known.
    """
    gates = behind(gates, CASTS)
    if not isinstance(gates, Node) or gates.meta["val"].dim() != 2:
        return None
    name = name_of(gates.target)
    if others == 0 and name in ("aten.mul.Tensor", "aten.div.Tensor"):
        terms = gates.args[:2] if name == "aten.mul.Tensor" else gates.args[:1]
        same = [t for t in terms if isinstance(t, Node) and t.meta["val"].shape == gates.meta["val"].shape]
        return next((spread for t in same if (spread := numbers_spread(t)) is not None), None)
    if others == 0 and name == "aten.softmax.int" and gates.args[1] in (1, -1):
        return numbers_spread(gates.args[0], -inf)
    if name not in SPREADS and _is_filled(gates, others):  # written in place
        writers = _writers(gates)
        return _picked(writers[0]) if len(writers) == 1 and name_of(writers[0].target) in SPREADS else None
    if name not in SPREADS or not _is_filled(gates.args[0], others):
        return None
    written = _writers(gates) + (_writers(gates.args[0]) if writes(gates) else [gates])
    return _picked(gates) if written == [gates] else None


def _is_filled(node: Any, number: float) -> bool:
    """Check whether a tensor is full of a number."""
    if number == 0 and name_of(node.target).startswith(ZEROS):
        return True
    return name_of(node.target) in FILLED and node.args[-1] == number


def _writers(tensor: Any) -> list[Node]:
    """Return the nodes that write to a tensor, through views too."""
    found: list[Node] = []
    todo, seen = [tensor], set[Node]()
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            if writes(user):
                found.append(user)
            elif name_of(user.target) in VIEWS:
                todo.append(user)
    return found


def _picked(spread: Any) -> Any:
    """Return the numbers by which weights are spread over columns, where a top-k of each row has picked them."""
    _, dim, index = spread.args[:3]
    picked: Any = behind(index, CASTS)
    while isinstance(picked, Node) and picked.target in (aten.slice.Tensor, aten.unsqueeze.default):
        picked = behind(picked.args[0], CASTS)
    found = picking(picked, PICKS, PICKED_ALONE)
    if dim not in (1, -1) or found is None:
        return None
    source: Any = found[0]
    of_matrix = source.args[0].meta["val"].dim() == 2 == index.meta["val"].dim()
    return index if of_matrix and found[1] in (1, -1) else None
