"""Gradients of parameters that are handed over while the backward goes on, so that their reduction overlaps it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from autopar.lower.steps.adjoints import VIEWS
from autopar.lower.steps.building import StepGraph
from autopar.torch_private import OpOverload

Take = Callable[[torch.Tensor], None]
"""Takes the whole gradient of a parameter."""


@dataclass(frozen=True)
class Taker:
    """A taker of a parameter's gradient, with the bytes of the whole parameter, which are the same on all ranks."""

    take: Take
    n_bytes: int
    __name__ = "take_gradient"  # in the text of a step

    def __call__(self, grad: torch.Tensor) -> None:
        """Take the gradient."""
        self.take(grad)


def hand_over(step: StepGraph, takers: Mapping[int, Taker], together: int) -> None:
    """Call the taker of an input with its gradient as soon as that is there; the step does not return it then.

    Args:
        takers: by number of the input.
        together: bytes of parameters whose gradients are handed over at a time: a compiler gets the operators in
            between as one graph.
    """
    of_node: dict[torch.fx.Node, list[int]] = {}
    for slot, grad in step.grads.items():
        if slot in takers:
            of_node.setdefault(grad, []).append(slot)
    ends = list(step.grads.values())
    due: list[tuple[int, torch.fx.Node]] = []
    n_bytes = 0
    late = [n for n in step.graph.nodes if n.meta["late"]]
    for node, following in zip(late, [*late[1:], None], strict=False):
        for slot in of_node.get(node, ()):
            due.append((slot, node))
            n_bytes += takers[slot].n_bytes
        if due and (n_bytes >= together or following is None) and not _in_block(node, following):
            for slot, grad in due:
                _give(step, takers[slot], grad, following, alone=_is_alone(grad, ends))
                del step.grads[slot]
            due, n_bytes = [], 0


def _in_block(node: torch.fx.Node, following: torch.fx.Node | None) -> bool:
    """Check whether a place is inside of a block that may not run."""
    return bool(node.meta["guard"]) and following is not None and node.meta["guard"] == following.meta["guard"]


def _is_alone(grad: torch.fx.Node, ends: list[torch.fx.Node]) -> bool:
    """Check that a gradient is memory of its own, which nobody else reads: it may be summed over ranks in place."""
    target: Any = grad.target
    if target is operator.getitem:  # results of an operator do not share memory, unless they are views
        source: Any = grad.args[0]
        target = source.target
    own = isinstance(target, OpOverload) and target not in VIEWS and not any(
        result.alias_info for result in target._schema.returns
    )  # fmt: skip
    return own and not grad.users and ends.count(grad) == 1


def _give(step: StepGraph, take: Taker, grad: torch.fx.Node, before: torch.fx.Node | None, alone: bool) -> None:
    def emit(target: Callable[..., object], args: tuple[torch.fx.Node, ...], val: object) -> torch.fx.Node:
        new = step.graph.call_function(target, args)
        new.meta.update(val=val, late=True, call=grad.meta["call"], segment=None, guard=guard)
        if before is not None:
            before.prepend(new)
        return new

    guard = (grad,) if grad in step.may_lack else ()
    if not alone:
        grad = emit(torch.ops.aten.clone.default, (grad,), grad.meta["val"])
    emit(take, (grad,), None).meta["acts"] = True
