"""A row is read or written at a place that only the call's values know: a lookup, on any batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar import capture
from autopar.comparison import compare_with_eager


def put(h: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 8)
    mask[:, x[:, 0].argmax()] = torch.arange(4.0)
    return h * mask.T


def added(h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[x[:, 0].argmax()] += 1
    return h


def dropped(h: Tensor, x: Tensor) -> Tensor:
    kept = torch.ones(8)
    kept[random.randrange(8)] = 0.0
    return h * kept[:, None]


PLACES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row": lambda h, x: h[x[:, 0].argmax()],
    "from the end": lambda h, x: h[-1 - x[:, 0].argmax()],
    "a column": lambda h, x: h[None][..., x[0].argmax(), :2],
    "behind a slice": lambda h, x: h[1:, x[0].argmax(), None],
    "an element": lambda h, x: h[x[:, 0].argmax(), x[0].argmax()],
    "put": put,
    "added": added,
    "at random": dropped,
}


class Model(nn.Module):
    def __init__(self, part: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.layer(x), x).square().sum()


@pytest.mark.filterwarnings("ignore:forward draws from random")
@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_values_say(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    model = Model(PLACES[name])
    captured = capture(model, (torch.randn(8, 4, generator=g),))
    for _ in range(2):
        assert compare_with_eager(captured, model, (torch.randn(8, 4, generator=g),), {}).same
