"""Passes that let the backward make again what would be kept for it: views, segments, gathered copies.

All are one thing in a step: a node of the forward that a node of the backward reads is copied in front of its first
reader there, with what it needs, down to what is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx

from autopar.lower.steps.adjoints import acts
from autopar.lower.steps.building import StepGraph
from autopar.torch_private import OpOverload

_aten = torch.ops.aten


def views_again(step: StepGraph) -> None:
    """Look at kept tensors again in the backward, instead of keeping views of them.

    A view that leaves a segment is kept: what it looks at would be computed again, where it is there already.
    """
    results = {x for x in step.results if isinstance(x, torch.fx.Node)}

    def leaves_segment(node: torch.fx.Node) -> bool:
        segment = node.meta["segment"]
        if segment is None or node in step.freed or node.args[0] in step.freed:
            return False
        return node in results or any(not x.meta["late"] and x.meta["segment"] != segment for x in node.users)

    _make_again(step, lambda node: _is_view(node) and not leaves_segment(node))


def run_again(step: StepGraph, calls: Collection[str]) -> None:
    """Compute again what the plan says: segments, their results and copies that are freed, and some calls.

    Args:
        calls: names of further calls, such as gathers of parameters for one use.
    """
    results = {x for x in step.results if isinstance(x, torch.fx.Node)}
    steps = {node: _between(node, source) for node, source in step.freed.items()}
    freed = {*step.freed, *(x for way in steps.values() for x in way)}

    def is_made_again(node: torch.fx.Node) -> bool:
        if node in freed or node.meta["call"] in calls:
            return node not in results
        segment = node.meta["segment"]
        if segment is None or node in results:
            return False
        return all(user.meta["late"] or user.meta["segment"] == segment for user in node.users)

    _make_again(step, is_made_again)


def _between(node: torch.fx.Node, source: torch.fx.Node | None) -> set[torch.fx.Node]:
    """Return the nodes on the way from a source to a copy that is gathered from it."""
    found: set[torch.fx.Node] = set()
    todo = [] if source is None else [node]
    while todo:
        at = todo.pop()
        if at is not source and at not in found and at.op == "call_function":
            found.add(at)
            todo.extend(at.all_input_nodes)
    return found


def _make_again(step: StepGraph, is_made_again: Callable[[torch.fx.Node], bool]) -> None:
    """Copy nodes of the forward to where the backward first reads them."""
    candidates = {n for n in step.graph.nodes if n.op == "call_function" and not n.meta["late"] and is_made_again(n)}
    of_call: dict[str, list[torch.fx.Node]] = {}  # of calls that act, which run as a whole
    for node in step.graph.nodes:
        if node in candidates:
            of_call.setdefault(node.meta["call"], []).append(node)
    of_call = {name: nodes for name, nodes in of_call.items() if any(map(acts, nodes))}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def emit(target: Any, args: Any, kwargs: Any, like: torch.fx.Node, reader: torch.fx.Node) -> torch.fx.Node:
        with step.graph.inserting_before(reader):
            new = step.graph.call_function(target, args, kwargs)
        new.meta.update(like.meta, late=True, guard=(), segment=None, acts=False)
        return new

    def copy(node: torch.fx.Node, reader: torch.fx.Node) -> torch.fx.Node:
        if node.meta.get("buffer") == "changing":  # it has changed once
            return emit(_aten.clone.default, (node,), {}, node, reader)
        if node not in candidates:
            return node
        if node not in copies:
            for each in of_call.get(node.meta["call"], (node,)):
                args, kwargs = torch.fx.map_arg((each.args, dict(each.kwargs)), lambda n: copy(n, reader))
                copies[each] = emit(each.target, args, kwargs, each, reader)
        return copies[node]

    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.meta["late"]:
            for x in node.all_input_nodes:
                if x in candidates:
                    node.replace_input_with(x, copy(x, node))
    if candidates & {*step.grads.values()}:
        end = step.graph.output(None)  # a gradient that is a tensor of the forward itself
        step.grads = {k: copy(x, end) for k, x in step.grads.items()}
        step.graph.erase_node(end)


def _is_view(node: torch.fx.Node) -> bool:
    """Check whether a node's result, or each of its results, is always in the memory of its argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    target = node.target
    first = node.args[0] if node.args else None
    if not isinstance(target, OpOverload) or target._schema.is_mutable or not isinstance(first, torch.fx.Node):
        return False
    if target is _aten.reshape.default:
        try:
            first.meta["val"].view(node.meta["val"].shape)
        except (RuntimeError, ValueError):
            return False
        return True
    returns = target._schema.returns
    return bool(returns) and all(each.alias_info is not None for each in returns)
