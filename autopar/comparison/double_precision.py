"""Conversion of a computation to float64, where rounding does not blur a check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from autopar.capture import Captured
from autopar.rules.experts.expert_block import BLOCK
from autopar.rules.experts.expert_program import in_double_precision
from autopar.words.graph import Graph, Node, Spec
from autopar.words.trees import PyTree

LOW = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
"""Precisions that a comparison in double precision replaces, each with what stands for it."""
_NAMES = {str(low).removeprefix("torch."): str(high).removeprefix("torch.") for low, high in LOW.items()}


def promoted(captured: Captured) -> Captured:
    """Return the same computation in float64 throughout, casts to less included."""
    def value(x: PyTree) -> PyTree:
        if isinstance(x, (tuple, list)):
            return type(x)(value(v) for v in x)
        return LOW.get(x, x) if isinstance(x, torch.dtype) else x

    def spec(s: Spec | None) -> Spec | None:
        return s._replace(dtype=_NAMES[s.dtype]) if s is not None and s.dtype in _NAMES else s

    def node(n: Node) -> Node:
        args = (n.args[0], in_double_precision(n.args[1])) if n.target == BLOCK else n.args
        return replace(
            n, args=value(args), kwargs={k: value(v) for k, v in n.kwargs.items()}, outs=tuple(map(spec, n.outs))
        )

    def promoted_graph(graph: Graph) -> Graph:
        before = promoted_graph(graph.before) if graph.before is not None else None
        return replace(graph, nodes=tuple(map(node, graph.nodes)), precision=None, before=before)

    return replace(captured, graph=promoted_graph(captured.graph))


@contextlib.contextmanager
def as_wide_as(graph: Graph) -> Iterator[None]:
    """Set torch's default dtype to float64 if the graph is in float64, so that integers are promoted alike.

    ``timesteps * 0.5`` has torch's default precision, in a promoted graph float64.
    """
    dtypes = {spec.dtype for node in graph.nodes for spec in node.outs if spec is not None}
    before = torch.get_default_dtype()
    if "float64" in dtypes and not dtypes & _NAMES.keys():
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def doubled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in double precision of tensors that had less."""
    return {k: wide(v.detach()).clone().requires_grad_(v.requires_grad) for k, v in tensors.items()}


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision, if it was in less."""
    return x.to(LOW.get(x.dtype, x.dtype))


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Convert ``model`` itself to double precision.

    Complex parameters and buffers too, which ``model.double()`` does not.
    """
    model.double()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = wide(tensor.data)
    return model
