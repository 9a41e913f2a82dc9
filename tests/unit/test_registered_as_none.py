"""What a model registers as None is a value of the program like other attributes: ``register_buffer("mask", None)``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, RunError

X = torch.arange(8.0).reshape(2, 4) / 7


class Masked(nn.Module):
    """Multiplies by a mask if it has one.

    Args:
        fills: forward makes one where there is none.
    """

    def __init__(self, registered: bool, fills: bool = False) -> None:
        super().__init__()
        self.linear, self.fills = nn.Linear(4, 4), fills
        if registered:
            self.register_buffer("mask", None, persistent=False)
        else:
            self.mask: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fills and self.mask is None:
            self.mask = torch.ones(4)
        x = self.linear(x)
        return x if self.mask is None else x * self.mask


@pytest.mark.parametrize("registered", (True, False))
def test_a_buffer_that_is_set_later_is_a_change(registered: bool) -> None:
    model = Masked(registered)
    eager = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, X)
    torch.testing.assert_close(pm(X), eager(X))
    if registered:
        with pytest.raises(RunError, match="'mask' of a parallel module was set, which is None in the model"):
            model.mask = torch.zeros(4)
    else:
        model.mask = torch.zeros(4)
        with pytest.raises(RunError, match=r"'mask' is a tensor of shape \(4,\), and was None when .*\(read at test_r"):
            pm(X)
    model.mask = None
    assert "mask" in (model._buffers if registered else vars(model))
    torch.testing.assert_close(pm(X), eager(X))


def test_what_the_models_own_call_fills_is_no_change() -> None:
    model = Masked(True, fills=True)
    eager = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, X)
    for _ in range(2):
        torch.testing.assert_close(pm(X), eager(X))


class Cached(nn.Module):
    """Leaves what its layer gives in an attribute."""

    def __init__(self, registered: torch.Tensor | None, is_read: bool = False) -> None:
        super().__init__()
        self.linear, self.is_read = nn.Linear(4, 4), is_read
        self.register_buffer("cache", registered)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.is_read and self.cache is not None:
            y = y + self.cache
        self.cache = y.detach()
        return y


def test_a_buffer_that_forward_makes_is_refused_with_what_to_do() -> None:
    model = nn.Sequential(Cached(None))
    with pytest.raises(CaptureError, match=r"sets a buffer that is registered as None .*\n  '0\.cache' at test_r.*:\d"):
        autopar.capture(model, X)
    assert model[0]._buffers == {"cache": None} and "cache" not in vars(model[0])
    with pytest.raises(CaptureError, match=r"which the next call reads:\n  'cache' at test_registered_as_none.py:\d"):
        autopar.capture(Cached(None, is_read=True), X)
    sized = Cached(torch.zeros(2, 4))  # as the error says
    pm = autopar.parallelize(sized, 1, X)
    given = pm(X)
    torch.testing.assert_close(pm.get_buffer("cache"), given.detach())
