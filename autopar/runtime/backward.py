"""A backward in two halves: gradients of the inputs first, those of the weights whenever there is time.

torch's own pipelining splits an autograd graph where the paths of inputs and weights meet, and keeps the gradients that
arrive there (``torch.distributed.pipelining._backward``). That works for weights whose paths meet those of the inputs;
the gradients of the others are computed with the first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    stage_backward_input,
    stage_backward_weight,
)


class Handle(torch.autograd.Function):
    """The same values as a tensor of its own: the first half detaches outputs in place, which a view or a tensor that
    the graph has saved does not allow."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Halves:
    """The first halves of microbatches whose second half is still to come."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[list[dict[str, Any]], list[torch.Tensor], Any]] = {}
        self.alone: set[int] | None = None

    def inputs(
        self, microbatch: int, roots: list[torch.Tensor], grads: list[torch.Tensor], wanted: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Add the gradients of ``wanted`` to their ``grad``; remember the rest."""
        if not wanted:  # the first stage: there is no first half
            self.waiting[microbatch] = [], [], (roots, grads)
            return
        if self.alone is None:
            self.alone = _alone(roots, wanted, leaves)
        apart = [leaf for i, leaf in enumerate(leaves) if i in self.alone]
        rest = [leaf for i, leaf in enumerate(leaves) if i not in self.alone]
        if apart:
            found = torch.autograd.grad(roots, apart, grads, retain_graph=True, allow_unused=True)
            _accumulate(apart, found)
        _, groups = stage_backward_input(roots, grads, list(wanted), iter(rest))  # type: ignore[arg-type]
        self.waiting[microbatch] = groups, rest, None

    def weights(self, microbatch: int, leaves: Sequence[torch.Tensor]) -> None:
        """Add the gradients of the weights."""
        groups, rest, whole = self.waiting.pop(microbatch)
        if whole is not None:
            roots, grads = whole
            _accumulate(leaves, torch.autograd.grad(roots, list(leaves), grads, allow_unused=True))
            return
        stage_backward_weight(iter(rest), groups)  # type: ignore[arg-type]


def _accumulate(leaves: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> None:
    for leaf, grad in zip(leaves, found, strict=True):
        if grad is not None:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad


def _alone(roots: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> set[int]:
    """Numbers of the leaves whose paths do not meet those of the inputs."""
    ends = [n for n in map(_get_grad_fn_or_grad_acc, roots) if n is not None]
    starts = [n for n in map(_get_grad_fn_or_grad_acc, wanted) if n is not None]
    own = [_get_grad_fn_or_grad_acc(leaf) for leaf in leaves]
    groups = get_param_groups(starts, [n for n in own if n is not None], construct_reverse_graph(ends))
    met = {id(n) for group in groups for n in group["params"]}
    return {i for i, n in enumerate(own) if id(n) not in met}


__all__ = ["Halves", "Handle"]
