"""The order of a step: collectives begin as soon as what they send is there, and are waited for where it is read.

What stands between a start and its wait overlaps with it: the gradient of a weight with the sum of that of the input,
the layers before with the gather of a parameter. At most :data:`AHEAD` collectives are under way ahead of the one whose
result is needed next, so that what is gathered has memory when it is needed and not from the beginning.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx

from autopar.lower.steps.adjoints import VIEWS, communicates, writes_to_argument
from autopar.torch_private import OpOverload

AHEAD = 2
"""Collectives under way ahead of the one whose result is needed next."""
_aten = torch.ops.aten
_LIGHT = {
    *VIEWS, operator.getitem, _aten.clone.default, _aten._to_copy.default, _aten.constant_pad_nd.default,
    _aten.cat.default,
}  # fmt: skip
"""Operators that bring what is sent into the form in which it is sent: they begin with the collective."""


def is_start(node: torch.fx.Node) -> bool:
    """Check whether a node begins a collective."""
    return communicates(node) and not is_wait(node)


def is_wait(node: torch.fx.Node) -> bool:
    """Check whether a node waits for the result of a collective."""
    return isinstance(node.target, OpOverload) and node.target.name() == "_c10d_functional::wait_tensor"


def overlapped(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return nodes in an order in which collectives overlap what need not wait for them."""
    order = _with_results_at_once(nodes)
    return _with_early_starts(_with_late_waits(order)) if any(map(is_start, order)) else order


def _with_results_at_once(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Take the results of an operator apart behind it, so that each is freed after its own last use."""
    present = set(nodes)
    parts: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in present:
            parts.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    taken = {part for of_node in parts.values() for part in of_node}
    order: list[torch.fx.Node] = []
    for node in nodes:
        if node not in taken:
            todo = [node]
            while todo:
                order.append(todo.pop())
                todo.extend(reversed(parts.get(order[-1], ())))
    for part in taken:
        part.meta["guard"] = part.args[0].meta["guard"]  # type: ignore[union-attr]
    return order


def _with_late_waits(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Put every wait in front of the first node that reads its result."""
    waiting: dict[torch.fx.Node, None] = {}
    order: list[torch.fx.Node] = []

    def put(node: torch.fx.Node) -> None:
        for x in (*node.all_input_nodes, *node.meta["guard"]):
            if x in waiting:
                del waiting[x]
                order.append(x)
        order.append(node)

    for node in nodes:
        if is_wait(node) and not node.meta["guard"]:
            waiting[node] = None
        else:
            put(node)
    return [*order, *waiting]


def _with_early_starts(nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Put every start, with what brings it into form, as far ahead as it may be."""
    order = list(nodes)
    begun: list[torch.fx.Node] = []
    for start in [n for n in nodes if is_start(n) and not n.meta["guard"]]:
        place = {node: k for k, node in enumerate(order)}
        moved = _brought_into_form(start, place)
        inside = set(moved)
        earliest = 1 + max((place.get(x, -1) for n in moved for x in n.all_input_nodes if x not in inside), default=-1)
        if begun:
            earliest = max(earliest, place[begun[-1]] + 1)
        if len(begun) >= AHEAD:
            earliest = max(earliest, _needed_at(begun[-AHEAD], place))
        for k in range(place[start] - 1, earliest - 1, -1):  # not over what writes to memory, or may not run
            if order[k] not in inside and (writes_to_argument(order[k]) or order[k].meta["guard"]):
                earliest = k + 1
                break
        if earliest < min(place[n] for n in moved):
            rest = [n for n in order if n not in inside]
            at = sum(1 for n in order[:earliest] if n not in inside)
            order = [*rest[:at], *moved, *rest[at:]]
        begun.append(start)
    return order


def _brought_into_form(start: torch.fx.Node, place: dict[torch.fx.Node, int]) -> list[torch.fx.Node]:
    """Return a start with the light operators that it alone needs, in order."""
    moved = {start}
    todo = [start]
    while todo:
        for x in todo.pop().all_input_nodes:
            is_light = x in place and x.target in _LIGHT and not x.meta["guard"]
            if is_light and x not in moved and moved.issuperset(x.users):
                moved.add(x)
                todo.append(x)
    return sorted(moved, key=place.__getitem__)


def _needed_at(start: torch.fx.Node, place: dict[torch.fx.Node, int]) -> int:
    """Return the place of the first wait for a collective."""
    return min((place[user] for user in start.users if user in place), default=place[start])
