"""How far rounding alone moves a computation: the same with the last digits of its numbers changed by chance."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from autopar.lower.program import Program


def moved(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of which each is, by chance, the next larger number of its precision, or itself."""
    named = enumerate(weights.items())
    return {name: _moved(w.detach(), k).requires_grad_(w.requires_grad) for k, (name, w) in named}


def shaken(program: Program) -> Program:
    """A program that rounds each number that depends on a parameter, and each gradient of one, by chance to the next
    larger one."""
    graph = torch.fx.Graph()
    into: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(program.module.graph, into))
    outputs = next(iter(reversed(graph.nodes)))
    for k, node in enumerate([copy for copy in into.values() if copy.op == "call_function"]):
        if all(user.target is operator.getitem for user in node.users):  # of several results each is moved
            continue
        with graph.inserting_after(node):
            rounded = graph.call_function(_rounded, (node, k))
        for user in [user for user in node.users if user not in (rounded, outputs)]:
            user.replace_input_with(node, rounded)
    return replace(program, module=torch.fx.GraphModule(program.module, graph))


def _rounded(x: Any, number: int) -> Any:
    """A result with the last digits of its elements, and of their gradients, changed by chance."""
    if not isinstance(x, torch.Tensor) or not x.requires_grad:
        return x
    value = x.detach()
    y = x + (_moved(value, number) - value)
    y.register_hook(lambda gradient: _moved(gradient, number + 1))
    return y


def _moved(x: torch.Tensor, number: int) -> torch.Tensor:
    """Each element, or the next larger number of its precision, by a chance that ``number`` decides.

    Zeros stay: beside a zero the next number is far smaller than what rounding leaves there.
    """
    if not x.is_floating_point() or x.layout is not torch.strided:
        return x
    at = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    up = ((at + 7919 * number) * 40503 >> 8) % 2 == 0
    return torch.where(up & (x != 0), torch.nextafter(x, torch.full_like(x, torch.inf)), x)


__all__ = ["moved", "shaken"]
