"""Sums of gradients in the memory of one of them, as autograd makes them."""

from __future__ import annotations

import torch
import torch.fx

from autopar.lower.steps.building import StepGraph

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_INTO = {_c10d.all_reduce.default: _c10d.all_reduce_.default, _aten.add.Tensor: _aten.add_.Tensor}
_OWN = {
    _aten.mm.default, _aten.bmm.default, _aten.add.Tensor, _aten.add_.Tensor, _aten.mul.Tensor, _aten.clone.default,
    _aten.cat.default, _aten.embedding_dense_backward.default, _aten.sum.dim_IntList,
}  # fmt: skip
"""Operators whose result is memory of its own, contiguous where the record says so."""


def add_in_place(step: StepGraph) -> None:
    """Add gradients up, and sum them over ranks, in memory that nobody else reads."""
    ends = {*step.grads.values(), *(x for x in step.results if isinstance(x, torch.fx.Node))}
    for node in step.graph.nodes:
        into = _INTO.get(node.target)  # type: ignore[arg-type]
        if into is None or not node.meta["late"] or node.meta["guard"]:
            continue
        first = node.args[0]
        if not isinstance(first, torch.fx.Node) or first.target not in _OWN or first in ends or first.meta["guard"]:
            continue
        if not first.meta["late"] or len(first.users) != 1:
            continue
        if node.target is _aten.add.Tensor and not ("sum" in node.meta and _alike(first, node)):
            continue
        node.target = into


def _alike(first: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Check that a sum has the memory layout of its first term, and another second one."""
    second, a, b = node.args[1], first.meta["val"], node.meta["val"]
    return second is not first and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
