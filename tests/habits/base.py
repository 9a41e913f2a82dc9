"""What a habit is: a module with three batches, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, VOCAB, PAD = 4, 8, 16, 0
BATCHES = 3

HABITS: dict[str, type[Habit]] = {}


class Habit(nn.Module):
    """One habit. ``body(x)`` gives ``[4 8]``, and ``forward(x, y)`` the loss; a habit may write either.

    Attributes:
        refused: pattern of the error that is expected; None where training is to equal eager mode.
        takes: ``"xy"`` for two ``[4 8]`` floats, ``"ids"`` for tokens and labels with padding, ``[4 8]`` each.
        learns_inputs: ``x`` requires a gradient, which is compared. Not where ``x`` itself is written to.
        outside: ``forward`` gives an output, and the loss is mean squared error outside.
        random: numbers are drawn, in another way than eager mode does: two ranks are compared with one instead.
    """

    refused: ClassVar[str | None] = None
    takes: ClassVar[str] = "xy"
    learns_inputs: ClassVar[bool] = True
    outside: ClassVar[bool] = False
    random: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.body(x), y)


def habit(kind: type[Habit]) -> type[Habit]:
    """Register a class under its name."""
    assert kind.__name__ not in HABITS
    HABITS[kind.__name__] = kind
    return kind


class Tokens(Habit):
    """A habit of language models: tokens with padding in, logits ``[4 8 vocabulary]`` from ``body``."""

    takes = "ids"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.body(ids).flatten(0, 1), labels.flatten())


def batch(kind: type[Habit], number: int) -> tuple[Tensor, Tensor]:
    """Batch 0, 1 or 2: the same shapes, other values, padding and labels."""
    g = torch.Generator().manual_seed(number + 1)
    if kind.takes == "xy":
        x, y = (torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64) for _ in "xy")
        return x.requires_grad_(kind.learns_inputs), y
    lengths = torch.randint(3, WIDTH + 1, (ROWS, 1), generator=g)
    there = torch.arange(WIDTH) < lengths
    ids = torch.randint(1, VOCAB, (ROWS, WIDTH), generator=g).where(there, PAD)
    labels = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g)
    return ids, labels.where(there & (torch.rand(ROWS, WIDTH, generator=g) > 0.2), -100)


def made(kind: type[Habit]) -> nn.Module:
    """The module with its weights, in training mode and double precision."""
    torch.manual_seed(0)
    return kind().double().train()


LossOf = Callable[..., Tensor]


def loss_fn(kind: type[Habit]) -> LossOf | None:
    return F.mse_loss if kind.outside else None
