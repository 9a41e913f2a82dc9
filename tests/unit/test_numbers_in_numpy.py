"""Lengths that a model reads as lists or arrays of numpy: those of the example, checked at every call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from autopar import parallelize
from autopar.errors import RunError

STEPS = 6


def mask_of_list(lengths: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.arange(STEPS)[None, :] < np.array(lengths.tolist())[:, None])


def mask_of_array(lengths: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.arange(STEPS)[None, :] < lengths.cpu().numpy()[:, None])


def mask_row_by_row(lengths: torch.Tensor) -> torch.Tensor:
    mask, numbers = torch.zeros(len(lengths), STEPS), lengths.detach().cpu().numpy()
    for row in range(len(numbers)):
        mask[row, : numbers[row]] = 1
    return mask


def mask_up_to_the_longest(lengths: torch.Tensor) -> torch.Tensor:
    mask, longest = torch.zeros(len(lengths), STEPS), int(np.max(lengths.tolist()))
    mask[:, :longest] = 1
    return mask


class Masked(nn.Module):
    def __init__(self, mask_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.mask_of = nn.Linear(4, 4), mask_of

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.mask_of(lengths)[:, :, None]).square().sum()


@pytest.mark.parametrize("mask_of", [mask_of_list, mask_of_array, mask_row_by_row, mask_up_to_the_longest])
def test_lengths_in_numpy_are_those_of_the_call_or_refused(mask_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, first = Masked(mask_of), torch.tensor([5, 3, 2, 4])
    module = parallelize(copy.deepcopy(model), 1, (torch.randn(4, STEPS, 4), first))
    x = torch.randn(4, STEPS, 4)
    torch.testing.assert_close(module(x, first), model(x, first))
    with pytest.raises(RunError, match=r"test_numbers_in_numpy.py:\d+ reads numbers or a mask (.|\n)* they are others"):
        module(x, torch.tensor([6, 1, 2, 4]))
    torch.testing.assert_close(module(x, first), model(x, first))
