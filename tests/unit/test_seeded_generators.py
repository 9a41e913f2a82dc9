"""Generators of Python's and numpy's that a forward makes: seeded by torch, they give the numbers of eager mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError
from autopar.rules.families.seeded_number import number_drawn


def fresh() -> Any:
    """A seed that torch draws at every call."""
    return torch.randint(0, 10_000, ()).item()


class Quantizing(nn.Module):
    """Uses as many layers as a generator says, and a factor, as quantizers with dropout do."""

    def __init__(self, draw: Callable[[torch.Tensor], tuple[Any, Any]]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last, factor = self.draw(x)
        for i, layer in enumerate(self.layers):
            if i <= last:
                x = layer(x)
        return (x * factor).square().mean()


def twice_one_seed(x: torch.Tensor) -> tuple[Any, Any]:
    seed = fresh()
    return random.Random(seed).randrange(0, 3), Random(seed).randrange(0, 3) + 1.5


def one_after_the_other(x: torch.Tensor) -> tuple[Any, Any]:
    rng = Random(fresh())
    return rng.randint(0, 2), rng.uniform(1, 2) + rng.gauss(0, 1)


def of_choices(x: torch.Tensor) -> tuple[Any, Any]:
    rng = random.Random(fresh() + 1)
    return rng.choice([0, 1, 2]), rng.random()


def of_numpy(x: torch.Tensor) -> tuple[Any, Any]:
    rng = np.random.default_rng(fresh())
    return rng.integers(0, 3), rng.normal(1, 2)


def of_an_old_numpy(x: torch.Tensor) -> tuple[Any, Any]:
    rng = np.random.RandomState(fresh())
    return rng.randint(3), rng.rand()


def seeded_by_data(x: torch.Tensor) -> tuple[Any, Any]:
    rng = random.Random((x.sum() * 100).int().item())
    return rng.randrange(3), rng.random()


def without_a_seed(x: torch.Tensor) -> tuple[Any, Any]:
    rng, other = random.Random(), np.random.default_rng()
    return rng.randrange(3), other.random() + 1


def with_a_seed_that_stays(x: torch.Tensor) -> tuple[Any, Any]:
    rng = random.Random(42)
    assert isinstance(rng, random.Random)
    return rng.randrange(3), rng.random()


@pytest.mark.parametrize(
    "draw",
    [twice_one_seed, one_after_the_other, of_choices, of_numpy, of_an_old_numpy, seeded_by_data, without_a_seed,
     with_a_seed_that_stays],
)  # fmt: skip
def test_as_eager_mode(draw: Callable[[torch.Tensor], tuple[Any, Any]]) -> None:
    model, x = Quantizing(draw), torch.randn(4, 8)
    assert compare_with_eager(capture(model, (x,)), model, (x,), {}).same


def shuffled(x: torch.Tensor) -> tuple[Any, Any]:
    order = [0, 1, 2]
    Random(fresh()).shuffle(order)
    return order[0], 1.0


def chosen_without_a_seed(x: torch.Tensor) -> tuple[Any, Any]:
    return Random().choice([0, 1, 2]), 1.0


@pytest.mark.parametrize("draw, method", [(shuffled, "shuffle"), (chosen_without_a_seed, "choice")])
def test_what_is_no_single_number_is_refused(draw: Callable[[torch.Tensor], tuple[Any, Any]], method: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s){method}\(\) of a random\.Random .*test_seeded_generators\.py:\d+"):
        capture(Quantizing(draw), (torch.randn(4, 8),))


def test_the_operator_draws_what_python_draws() -> None:
    draws = [("random", (), {}), ("randrange", (0, 100), {})]
    python = random.Random(7)
    expected = [python.random(), python.randrange(0, 100)]
    assert number_drawn(7, "random.Random", draws[:1]) == expected[0]
    drawn = torch.ops.autopar.seeded_number(torch.tensor(7), "random.Random", repr(draws))
    assert drawn.dtype == torch.int64 and int(drawn) == expected[1]
