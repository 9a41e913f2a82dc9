"""Tensors that arrive at a stage, whose gradients are wanted and which nobody holds for them.

A leaf of autograd lives as long as the graph that leads to it, whether or not anything in there needs its values. What
arrives is therefore no leaf: a function that computes nothing passes it on, and its gradient ends there. So an arrived
tensor lives for as long as operators read it or autograd saved it, as any other activation does.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from autopar.words.trees import Context


class Arrived:
    """The rest of a tensor that arrived, after the stage's forward has read it.

    Attributes:
        edge: where its gradient arrives in the graph of autograd.
    """

    def __init__(self, read: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        """Initialize the object.

        Args:
            read: the tensor as the stage reads it; it is not held.
            gradients: where the function that passed it on puts what arrives.
        """
        self.shape, self.dtype, self.device = read.shape, read.dtype, read.device
        self.edge = get_gradient_edge(read)
        self._gradients = gradients  # the function must not hold what holds the edge: nothing would ever free the two

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of this rank's piece; None as long as no backward came to it."""
        return self._gradients[-1] if self._gradients else None

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        self._gradients[:] = [] if gradient is None else [gradient]

    def gradient_or_zeros(self) -> torch.Tensor:
        """Return the gradient; zeros if no backward came."""
        gradient = self.gradient
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if gradient is None else gradient


def arriving(piece: torch.Tensor) -> tuple[torch.Tensor, Arrived]:
    """Return a tensor as a stage reads it, and the place where its gradient will be.

    Args:
        piece: this rank's, in no graph of autograd.
    """
    gradients: list[torch.Tensor] = []
    with torch.enable_grad():
        anchor = torch.empty(0, device=piece.device, requires_grad=True)
        read = _PassedOn.apply(gradients, piece, anchor)
    return read, Arrived(read, gradients)


class _PassedOn(torch.autograd.Function):
    """The identity; its result wants a gradient because the anchor does."""

    @staticmethod
    def forward(ctx: Context, gradients: list[torch.Tensor], piece: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.gradients[:] = [gradient]
        return None, None, None
