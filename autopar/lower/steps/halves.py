"""The backward of a step in two halves: what some of its gradients need, and the rest, which may run later."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch.fx

from autopar.lower.steps.adjoints import VIEWS, writes_to_argument
from autopar.lower.steps.order import is_start, is_wait
from autopar.torch_private import OpOverload

Before = dict[torch.fx.Node, list[torch.fx.Node]]
"""By node, others that do not run later than it though it does not read them."""


def in_halves(
    late: Sequence[torch.fx.Node], wanted: Collection[torch.fx.Node]
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """Return the nodes of a backward that lead to some gradients, and all others, both in their order.

    Args:
        late: the nodes of the backward.
        wanted: the gradients that come first.
    """
    before = _in_turn(late)
    for node, others in _together(late).items():
        before[node].extend(others)
    first: set[torch.fx.Node] = set()
    todo = [*wanted]
    while todo:
        node = todo.pop()
        if node in before and node not in first:
            first.add(node)
            todo.extend([*node.all_input_nodes, *node.meta["guard"], *before[node]])
    # the other results of a call: else it would be kept with all of them
    first |= {n for n in late if n.target is operator.getitem and n.args[0] in first}
    return [n for n in late if n in first], [n for n in late if n not in first]


def _in_turn(nodes: Sequence[torch.fx.Node]) -> Before:
    """Return what runs before a node because one of both writes to memory that the other reads or writes."""
    before: Before = {}
    memories: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # by node, the nodes whose memory its result may be in
    written: dict[torch.fx.Node, torch.fx.Node] = {}  # by memory, the last node that wrote to it
    read: dict[torch.fx.Node, list[torch.fx.Node]] = {}  # and those that have read it since
    for node in nodes:
        touched, overwritten = (
            {m for x in arguments for m in memories.get(x, (x,))}
            for arguments in (node.all_input_nodes, _overwritten(node))
        )
        before[node] = [written[m] for m in touched if m in written]
        for memory in touched:
            if memory in overwritten:
                before[node].extend(read.pop(memory, ()))
                written[memory] = node
            else:
                read.setdefault(memory, []).append(node)
        memories[node] = (overwritten or touched or {node}) if _may_alias(node) else {node}
    return before


def _overwritten(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that a node writes to."""
    target = node.target
    if not isinstance(target, OpOverload) or not writes_to_argument(node):
        return []
    arguments = target._schema.arguments
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    found: list[torch.fx.Node] = []
    for argument in arguments:
        if argument.is_write or not target._schema.returns:
            torch.fx.map_arg(given.get(argument.name), found.append)
    return found


def _may_alias(node: torch.fx.Node) -> bool:
    """Check whether a node's result may be in the memory of an argument; nothing is known of Python functions."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return target in VIEWS or is_wait(node) or any(result.alias_info for result in target._schema.returns)


def _together(nodes: Sequence[torch.fx.Node]) -> Before:
    """Return the collectives of each call, which are in one half: what is read of them differs between ranks."""
    of_call: dict[str, list[torch.fx.Node]] = {}
    for node in nodes:
        if is_start(node) or is_wait(node):
            of_call.setdefault(node.meta["call"], []).append(node)
    return {node: others for others in of_call.values() for node in others}
