"""A model's own activation checkpointing is a region; what does anything more stays one operator of its own.

That both train as in eager mode, on one rank and on two, is for ``tests/world/test_habits.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from habits.gradients import _OwnCheckpoint as Checkpoint
from habits.gradients import _OwnCheckpointThatScales as Scales
from torch import Tensor, nn

from autopar.capture import Captured, capture


class ScalesValue(Checkpoint):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return Checkpoint.forward(ctx, *args) * 2


class Swaps(Checkpoint):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, _, first, second, *rest = Checkpoint.backward(ctx, *grads)
        return None, None, second, first, *rest


class Drops(Checkpoint):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = Checkpoint.backward(ctx, *grads)
        return *given[:4], *(None for _ in given[4:])


class Restores(Checkpoint):
    """Draws the same numbers again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.random_state = torch.get_rng_state()
        return Checkpoint.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.random.fork_rng([]):
            torch.set_rng_state(ctx.random_state)
            return Checkpoint.backward(ctx, *grads)


class Net(nn.Module):
    def __init__(self, function: type[Checkpoint], told: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.function, self.told, self.dropout = function, told, nn.Dropout(dropout)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def inside(self, h: Tensor, scale: Tensor) -> Tensor:
        return self.dropout(self.b(torch.tanh(h))) * scale + h

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        weights = list(self.b.parameters())[: self.told]
        return self.function.apply(self.inside, 2, h, torch.sigmoid(h), *weights).square().mean()


def captured(*args: Any, **options: Any) -> tuple[Captured, list[str]]:
    """The capture, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return capture(Net(*args, **options), (torch.randn(8, 4),)), [str(w.message) for w in caught]


def is_region(found: Captured) -> bool:
    return not any(node.target.startswith("function.") for node in found.graph.nodes)


def test_it_is_traced_through_and_marked_to_be_computed_again() -> None:
    found, said = captured(Checkpoint)
    assert is_region(found) and not said
    again = {node.target for node in found.graph.nodes if node.again >= 0}
    assert {"aten.tanh.default", "aten.linear.default"} <= again


@pytest.mark.parametrize("function", [Scales, ScalesValue, Swaps, Drops])
def test_what_does_more_stays_whole(function: type[Checkpoint]) -> None:
    found, _ = captured(function)
    assert not is_region(found)


def test_a_parameter_that_it_is_not_told_of_has_no_gradient() -> None:
    found, _ = captured(Checkpoint, told=1)
    assert not is_region(found)


def test_other_random_numbers_in_the_backward_are_said() -> None:
    found, said = captured(Checkpoint, dropout=0.5)
    assert is_region(found)
    assert any("Checkpoint in '<model>'" in text and "draws random numbers in its backward" in text for text in said)
    found, said = captured(Restores, dropout=0.5)
    assert is_region(found) and not said


def test_a_backward_without_the_autocast_of_the_forward_is_said() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, said = captured(Checkpoint)
    assert is_region(found)
    assert any("computes its forward under autocast, and in its backward again without" in text for text in said)
