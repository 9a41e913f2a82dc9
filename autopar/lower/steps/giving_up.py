"""Tensors that are given up until the backward, such as those that wait in the memory of the host."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.fx

from autopar.lower.steps.building import StepGraph
from autopar.lower.steps.nodes import be_done, begin_backward, come_back


def bring_back(step: StepGraph) -> None:
    """Let the backward read tensors that were given up from where they wait."""
    late = [n for n in step.graph.nodes if n.op == "call_function" and n.meta["late"]]
    place = {node: k for k, node in enumerate(late)}
    ends = {x for x in (*step.grads.values(), *step.results) if isinstance(x, torch.fx.Node)}
    for whole, left in list(step.given_up.items()):
        readers = sorted((n for n in whole.users if n in place), key=place.__getitem__)
        if not readers or whole in ends:
            _forget(step, left)
            del step.given_up[whole]
            continue
        back = _before(step, readers[0], come_back, (left,), whole.meta["val"])
        for reader in readers:
            reader.replace_input_with(whole, back)
        last = readers[-1]
        after = late[place[last] + 1] if place[last] + 1 < len(late) else None
        _before(step, after, be_done, (left,), None)
    away = {*step.given_up.values()}
    leaving = [x for x in step.leaving if x in away]
    if late and leaving:
        _before(step, late[0], begin_backward, tuple(leaving), None)


def _before(step: StepGraph, node: torch.fx.Node | None, target: Any, args: tuple[Any, ...], val: Any) -> torch.fx.Node:
    """Emit a call in front of a node of the backward, or at the end."""
    with contextlib.nullcontext() if node is None else step.graph.inserting_before(node):
        new = step.graph.call_function(target, args)
    acts = target is not come_back  # which somebody reads
    new.meta.update(val=val, late=True, call=target.__name__, segment=None, guard=(), acts=acts)
    return new


def _forget(step: StepGraph, left: torch.fx.Node) -> None:
    """Keep a tensor that the backward does not read."""
    before = left.args[2:]
    for user in list(left.users):
        user.args = tuple(x for arg in user.args for x in (before if arg is left else (arg,)))
    step.graph.erase_node(left)
