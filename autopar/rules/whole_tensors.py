"""A graph run as it stands, on whole tensors: what is done beside the programs, such as writes before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.rules.local_calls import is_told_device, resolve
from autopar.rules.operator_call import call_of
from autopar.words.graph import Graph, Node, Ref, map_refs
from autopar.words.trees import PyTree


@torch.no_grad()
def updates_of(graph: Graph, value_of: Callable[[Node], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the new values that a graph gives, by name, without gradients.

    Args:
        value_of: gives the whole value of a parameter or buffer.
    """
    values: list[PyTree] = []

    def value(ref: Ref) -> Any:
        of_node = values[ref.node]
        return of_node[ref.out] if isinstance(of_node, (tuple, list)) else of_node

    device = None
    for node in graph.nodes:
        if node.kind != "op":
            values.append(value_of(node).detach())
            device = values[-1].device
            continue
        kwargs = map_refs(node.kwargs, value)
        if is_told_device(call_of(node, graph.spec)):
            kwargs = {**kwargs, "device": device}
        values.append(resolve(node.target)(*map_refs(node.args, value), **kwargs))
    return {name: value(ref) for name, ref in graph.updates.items()}
