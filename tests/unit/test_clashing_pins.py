"""Pins that leave no plan are named, as few as possible; see autopar.planner.intra_op.pins.clashing_pins."""

from __future__ import annotations

import ast
import itertools
import re

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.planner.intra_op.pins.clashing_pins import PinnedWish, smallest_clash


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
def test_clashing_pins_are_named(options: dict[str, object]) -> None:
    constraints = {"*": {"data": "b"}}
    with pytest.raises(InfeasibleError) as error:
        planned(constraints, **options)
    said = str(error.value)
    pinned = re.findall(r"(\w+) \(aten.*in '([^']*)'.*: pinned to 'b' on axis 'data' \(constraint '\*'\)", said)
    assert pinned == [("linear_1", "out"), ("log_softmax", "<model>")]
    assert "'before'" not in said
    hint = re.search(r"end constraints with ('.*'): (\{.*\}), with", said)
    assert hint is not None
    plan = planned({**constraints, ast.literal_eval(hint[1]): ast.literal_eval(hint[2])}, **options)
    assert plan.only().ops["linear_1"] == ("b",)


def test_the_smallest_clash_of_any_pins() -> None:
    """Of every pair and triple of seven pins that clash, just these are found."""
    pins = [PinnedWish("op", (name,)) for name in "abcdefg"]
    for size in (1, 2, 3):
        for clash in itertools.combinations(pins, size):
            assert smallest_clash(pins, lambda kept, clash=clash: set(clash) <= set(kept)) == list(clash)
