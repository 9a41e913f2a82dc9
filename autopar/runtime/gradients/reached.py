"""The tensors that the loss's gradient reaches, where random numbers choose between the sides of branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device
from autopar.plans.plan import reshard_key
from autopar.rules.families.branch import BRANCH
from autopar.words.graph import Graph, Node, Ref, part_for

Reached = frozenset[str]
"""Tensors by their names in plans, and parameters by their own."""
ReachedBy = Callable[[torch.Tensor], Reached]
"""Gives for the seed of a forward what the gradient of the loss reaches in it."""


def reached_by(graph: Graph, device: torch.device) -> ReachedBy | None:
    """Return a function from the seed of a training forward to what the gradient of the loss reaches in it.

    None if it is the same in all forwards, because the graph has no branches on random numbers.
    """
    conditions = tuple(dict.fromkeys(node.refs[0] for node in graph.nodes if is_open(node)))
    if not conditions or graph.loss is None:
        return None
    loss = graph.outputs[graph.loss]
    drawn = part_for(graph, conditions)
    program = lower(drawn, one_device(drawn), device)

    @torch.no_grad()
    def reached(seed: torch.Tensor) -> Reached:
        values = program.module(*(seed for _ in program.slots))
        answers = torch.stack([value.reshape(()) for value in values]).tolist()  # read once
        return _reached(graph, [loss], dict(zip(conditions, answers, strict=True)))

    return reached


def is_open(node: Node) -> bool:
    """Check whether a node is a branch that its number decides."""
    return node.target == BRANCH and len(node.args) == 3


def reached_whatever_is_drawn(graph: Graph) -> Reached:
    """Return what the gradient of the outputs reaches without passing a branch on a random number."""
    return _reached(graph, [out for out in graph.outputs if isinstance(out, Ref)], {})


def _reached(graph: Graph, outputs: Sequence[Ref], answers: Mapping[Ref, bool]) -> Reached:
    """Return what the gradient of the outputs reaches; nothing behind a branch whose answer is not given."""
    refs = set(outputs)
    nodes = {ref.node for ref in refs}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if i not in nodes or not node.needs_grad:
            continue
        read = node.refs
        if is_open(node):
            answer = answers.get(node.refs[0])
            read = () if answer is None else (node.refs[1 if answer else 2],)
        refs.update(read)
        nodes.update(ref.node for ref in read)
    params = {graph.nodes[i].target for i in nodes if graph.nodes[i].kind == "param"}
    return frozenset(params | {reshard_key(graph, ref) for ref in refs})
