"""Weights that are gathered in eight bits: what ranks send is the cast that products would make of them anyway.

A weight of products in eight bits is cast before every one of them. Cast before it is gathered, it is a quarter of the
bytes of float32 and half of those of bfloat16. Ranks first agree on the largest value of the whole weight, one number
for each, once a step. What arrives is turned back into the program's format, which is exact, since scales are powers
of two; and the product's own cast of it gives the same numbers again. So gradients, hooks and all else see the weight
in the format that they know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.rules.lowering_helpers.narrow_numbers import dtypes_of, largest, narrowed, scale_of
from autopar.torch_private import compiler_traces, functional_collectives
from autopar.words.graph import Graph, Node
from autopar.words.narrow_products import NarrowFormat
from autopar.words.placements import State


class NarrowWire:
    """The form in which one weight is sent.

    Args:
        groups: over which ranks its largest value is taken: those of the axes that cut the stored weight.

    Attributes:
        scale: float32 [], that of the whole weight; None until ranks have agreed on it in this step.
    """

    def __init__(self, numbers: NarrowFormat, groups: Sequence[dist.ProcessGroup]) -> None:
        self.dtype, _ = dtypes_of(numbers)
        self.groups = tuple(groups)
        self.scale: torch.Tensor | None = None

    def sent(self, piece: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as it is sent, bytes of the same shape."""
        assert self.scale is not None
        return narrowed(piece, self.scale, self.dtype).view(torch.uint8)

    def received(self, sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what was sent in ``dtype``."""
        assert self.scale is not None
        return sent.view(self.dtype).to(dtype) * self.scale.to(dtype)


def wire_of(
    graph: Graph, node: Node, stored: State, device_mesh: DeviceMesh
) -> NarrowWire | None:
    """Return the form in which ranks gather a parameter; None for its own."""
    policy = graph.policy_of(node)
    if policy is None or policy.narrow is None or not policy.narrow_gathers or not policy.narrow.runs:
        return None
    axes = [axis for axis, placement in enumerate(stored) if placement.is_shard and device_mesh.size(axis) > 1]
    return NarrowWire(policy.narrow, [device_mesh.get_group(axis) for axis in axes])


def agree(wires: Sequence[NarrowWire], pieces: Sequence[torch.Tensor]) -> None:
    """Agree with the other ranks on the scales of weights, in one exchange for all over the same ranks."""
    together: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, wire in enumerate(wires):
        together.setdefault(wire.groups, []).append(i)
    for groups, numbers in together.items():
        most = torch.stack([largest(pieces[i], None) for i in numbers])
        for group in groups:
            if compiler_traces():
                most = functional_collectives.all_reduce(most, "max", group)
            else:
                dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        for i, scale in zip(numbers, scale_of(most, wires[numbers[0]].dtype).unbind(0), strict=True):
            wires[i].scale = scale
