"""Operators whose kernels on GPUs add in no fixed order: ranks that compute the same may differ in the last bits.

From "Reproducibility" in torch's documentation: what ``torch.use_deterministic_algorithms(True)`` replaces by another
kernel, or refuses (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.words.graph import Graph, Node

_ATOMIC = "atomic additions"
_FORWARD = {
    "aten.index_add": _ATOMIC, "aten.scatter_add": _ATOMIC, "aten.scatter_reduce": _ATOMIC,
    "aten.index_reduce": _ATOMIC, "aten.bincount": _ATOMIC, "aten.histc": _ATOMIC, "aten.cumsum": "a scan in parallel",
    "aten.nll_loss2d": _ATOMIC, "aten.nll_loss_nd": _ATOMIC,
}  # fmt: skip
"""By the operator's name without its overload."""
_BACKWARD = {
    "aten.index_select": _ATOMIC, "aten.gather": _ATOMIC, "aten.take": _ATOMIC, "aten.index": _ATOMIC,
    "aten.repeat_interleave": _ATOMIC, "aten.grid_sampler": _ATOMIC, "aten.grid_sampler_2d": _ATOMIC,
    "aten.grid_sampler_3d": _ATOMIC, "aten.adaptive_avg_pool2d": _ATOMIC, "aten.adaptive_avg_pool3d": _ATOMIC,
    "aten.adaptive_max_pool2d": _ATOMIC, "aten.max_pool3d": _ATOMIC, "aten.avg_pool3d": _ATOMIC,
    "aten.upsample_linear1d": _ATOMIC, "aten.upsample_bilinear2d": _ATOMIC, "aten.upsample_bicubic2d": _ATOMIC,
    "aten.upsample_trilinear3d": _ATOMIC, "aten._upsample_bilinear2d_aa": _ATOMIC,
    "aten._upsample_bicubic2d_aa": _ATOMIC, "aten.reflection_pad1d": _ATOMIC, "aten.reflection_pad2d": _ATOMIC,
    "aten.reflection_pad3d": _ATOMIC, "aten.replication_pad1d": _ATOMIC, "aten.replication_pad2d": _ATOMIC,
    "aten.replication_pad3d": _ATOMIC, "aten.ctc_loss": _ATOMIC,
    "aten.scaled_dot_product_attention": "fused attention, which adds up the queries' gradient in any order",
}  # fmt: skip
_CONV = "cuDNN may choose another algorithm on each rank (torch.backends.cudnn.benchmark), and some add in any order"


class NoFixedOrder(NamedTuple):
    """An operator of a graph, and when and why its results may differ from run to run on a GPU."""

    node: Node
    when: str
    why: str


def without_fixed_order(graph: Graph) -> Iterator[NoFixedOrder]:
    """Yield the operators of a graph that add in no fixed order, in the order of the graph."""
    for node in graph.nodes:
        if node.kind != "op":
            continue
        name = node.target.rsplit(".", 1)[0]
        if name in _FORWARD:
            yield NoFixedOrder(node, "forward", _FORWARD[name])
        elif name == "aten.index_put" and (node.args[3:4] == (True,) or node.kwargs.get("accumulate")):
            yield NoFixedOrder(node, "forward", _ATOMIC)
        elif name in _BACKWARD and node.needs_grad:
            yield NoFixedOrder(node, "backward", _BACKWARD[name])
        elif name.startswith("aten.conv") and not name.startswith("aten.constant"):
            yield NoFixedOrder(node, "forward and backward" if node.needs_grad else "forward", _CONV)
