"""Pins that leave no plan are named, as few as possible; see autopar.planner.intra_op.pins.clashing_pins."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import autopar
from autopar.planner.intra_op.pins.clashing_pins import PinnedOption, smallest_clash


class Words(nn.Module):
    """Log probabilities [13 * 4, 20] of words, from features [13, 4, 12]: 13 does not divide evenly, 52 does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.out = nn.Linear(12, 12), nn.Linear(12, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.out(torch.tanh(self.before(x))).view(-1, 20)
        return nn.functional.nll_loss(torch.log_softmax(scores, 1), y)


def planned(constraints: dict[str, dict[str, str]], **options: object) -> autopar.Plan:
    x, y = torch.randn(13, 4, 12), torch.zeros(52, dtype=torch.int64)
    return autopar.plan(Words(), "dgx-h100", (x, y), mesh={"data": 2}, constraints=constraints, **options)


@pytest.mark.parametrize("options", [{}, {"memory_limit": "1GB"}, {"params": {"*": "replicate"}}])
def test_pins_on_both_sides_of_a_view_that_cannot_have_them(options: dict[str, object]) -> None:
    """13 and 52 rows are cut into other pieces: both pins are kept, and what stands between them is whole."""
    plan = planned({"*": {"data": "b"}}, **options).only()
    names = ("linear", "linear_1", "view", "log_softmax")
    assert [plan.ops[name] for name in names] == [("b",), ("b",), ("I",), ("b",)]


def test_the_smallest_clash_of_any_pins() -> None:
    """Of every pair and triple of seven pins that clash, just these are found."""
    pins = [PinnedOption("op", (name,)) for name in "abcdefg"]
    for size in (1, 2, 3):
        for clash in itertools.combinations(pins, size):
            assert smallest_clash(pins, lambda kept, clash=clash: set(clash) <= set(kept)) == list(clash)
