"""The same computation in float64, where rounding does not blur a check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.capture import Captured
from autopar.rules.experts.expert_block import BLOCK
from autopar.rules.experts.expert_program import in_double_precision
from autopar.words.graph import Graph, Node, Spec

LOW = (torch.float32, torch.bfloat16, torch.float16)
"""Precisions that a comparison in double precision replaces."""


def promoted(captured: Captured) -> Captured:
    """The same computation in float64 throughout, casts to less included, so that rounding does not blur a check."""
    low = {str(d).removeprefix("torch.") for d in LOW}

    def value(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(value(v) for v in x)
        return torch.float64 if x in LOW else x

    def spec(s: Spec | None) -> Spec | None:
        return s._replace(dtype="float64") if s is not None and s.dtype in low else s

    def node(n: Node) -> Node:
        args = (n.args[0], in_double_precision(n.args[1])) if n.target == BLOCK else n.args
        return replace(
            n, args=value(args), kwargs={k: value(v) for k, v in n.kwargs.items()}, outs=tuple(map(spec, n.outs))
        )

    graph = replace(captured.graph, nodes=tuple(map(node, captured.graph.nodes)), precision=None)
    return replace(captured, graph=graph)


@contextlib.contextmanager
def as_wide_as(graph: Graph) -> Iterator[None]:
    """In here integers alone become what they are in the graph: ``timesteps * 0.5`` is of torch's default precision,
    in a promoted graph float64."""
    dtypes = {spec.dtype for node in graph.nodes for spec in node.outs if spec is not None}
    before = torch.get_default_dtype()
    if "float64" in dtypes and not dtypes & {str(d).removeprefix("torch.") for d in LOW}:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def doubled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in float64 of what had less precision."""
    return {
        k: v.detach().to(torch.float64 if v.dtype in LOW else v.dtype).clone().requires_grad_(v.requires_grad)
        for k, v in tensors.items()
    }


__all__ = ["LOW", "as_wide_as", "doubled", "promoted"]
