"""Gradients of a pipeline's inputs: every rank gets them whole, as the caller's tensors want them.

A pipeline runs its backward itself, so its inputs are no part of the caller's autograd graph. Each stage that reads an
input has a gradient of its own for every microbatch. One rank of each such stage adds it to the rows of its microbatch,
the ranks' sums are added up, and then the caller's tensors are called ``backward`` on: a leaf accumulates in ``grad``,
and what made another tensor (a layer in front) gets its gradients.

Whether there is a gradient is decided when the model is captured, by the example inputs, and so alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.plans.stage_graphs import StageGraph


class InputGradients:
    """The input gradients of one pipeline.

    Args:
        parts: the stages, of one microbatch; the model's inputs that want a gradient there are meant.
        everyone: the group of all ranks.
    """

    def __init__(self, parts: Sequence[StageGraph], device: torch.device, everyone: Any = None) -> None:
        inputs = [node for part in parts for _, node in part.graph.of_kind("input") if node.target in part.inputs]
        self.shapes = {node.target: node.out.shape for node in inputs if node.needs_grad}
        self.device, self.everyone = device, everyone
        self.callers: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def begin(self, callers: Mapping[str, torch.Tensor]) -> None:
        """Begin a step, with the caller's tensors for the whole batch, by input name."""
        self.callers = {name: callers[name] for name in self.shapes}
        self.sums = {name: torch.zeros(x.shape, dtype=x.dtype, device=self.device) for name, x in self.callers.items()}

    def add(self, name: str, microbatch: int, grad: torch.Tensor) -> None:
        """Add a stage's whole gradient for an input of a microbatch; one rank of the stage calls it.

        An input of the captured shape went into every microbatch, so its gradients add up.
        """
        rows = self.sums[name]
        if tuple(rows.shape) != self.shapes[name]:
            length = self.shapes[name][0]
            rows = rows.narrow(0, microbatch * length, length)
        rows.add_(grad)

    def taken(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the caller's tensors that want a gradient, each with the sum over ranks. All ranks call it."""
        callers, sums, self.callers, self.sums = self.callers, self.sums, {}, {}
        for grad in sums.values():
            dist.all_reduce(grad, group=self.everyone)
        return [(x, sums[name]) for name, x in callers.items() if x.requires_grad]
