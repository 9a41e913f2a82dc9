"""Values in a graph that depend on no input and no parameter, such as masks: they are computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.rules.local_calls import resolve
from autopar.words.graph import Graph, Ref, map_refs


class _Unknown(Exception):
    """The value depends on what has no value here."""


def value_of(graph: Graph, ref: Ref, constants: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the value of a tensor that follows from constants alone; None if it does not, or has no value here."""
    known: dict[int, object] = {}

    def compute(number: int) -> object:
        if number in known:
            return known[number]
        node = graph.nodes[number]
        if node.kind == "buffer" and node.target in constants:
            known[number] = constants[node.target]
            return known[number]
        if node.kind != "op":
            raise _Unknown

        def taken(r: Ref) -> object:
            value = compute(r.node)
            return value[r.out] if isinstance(value, (tuple, list)) else value

        args, kwargs = map_refs(node.args, taken), map_refs(node.kwargs, taken)
        known[number] = resolve(node.target)(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        return known[number]

    try:
        with torch.no_grad():
            value = compute(ref.node)
    except (_Unknown, RuntimeError, TypeError, NotImplementedError):
        return None
    value = value[ref.out] if isinstance(value, (tuple, list)) else value
    return value if isinstance(value, torch.Tensor) else None
