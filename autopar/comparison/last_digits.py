"""The effect of rounding alone on a computation: the last digits of its numbers change at random."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.fx

from autopar.lower.program import Program
from autopar.words.trees import PyTree


def moved(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights of which each is, at random, itself or the next larger number of its precision."""
    named = enumerate(weights.items())
    return {name: _moved(w.detach(), k).requires_grad_(w.requires_grad) for k, (name, w) in named}


def shaken(program: Program) -> Program:
    """Return a program that rounds numbers up at random.

    It rounds each number that depends on a parameter, and each gradient of one.
    """
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


def _rounded(x: PyTree, number: int) -> PyTree:
    """Return a result with the last digits of its elements, and of their gradients, changed at random."""
    if not isinstance(x, torch.Tensor) or not x.requires_grad:
        return x
    value = x.detach()
    y = x + (_moved(value, number) - value)
    y.register_hook(lambda gradient: _moved(gradient, number + 1))
    return y


def _moved(x: torch.Tensor, number: int) -> torch.Tensor:
    """Return each element, or the next larger number of its precision, by a hash of ``number``.

    Zeros stay: next to zero the following number is far smaller than rounding errors.
    """
    if not x.is_floating_point() or x.layout is not torch.strided:
        return x
    at = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    up = ((at + 7919 * number) * 40503 >> 8) % 2 == 0
    return torch.where(up & (x != 0), torch.nextafter(x, torch.full_like(x, torch.inf)), x)
