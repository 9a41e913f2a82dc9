"""Tensors that forward keeps in attributes: after a capture the model holds what it held, and none of the trace's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.torch_private import FakeTensor, pytree


class _Scaled(nn.Module):
    """Frequencies of positions, others for long inputs, as rotary embeddings scale them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("short", torch.linspace(0.1, 1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * torch.sin(torch.arange(x.shape[1])[:, None] * self.frequencies(x))).square().mean()

    def frequencies(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class MadeOnce(_Scaled):
    def frequencies(self, x: torch.Tensor) -> torch.Tensor:
        long = getattr(self, "long", None)
        if long is None:
            long = torch.linspace(0.3, 2.0, 4, dtype=x.dtype)
        self.long = long.to(x.device)
        return torch.where(torch.arange(x.shape[1]).max() + 1 > 6, self.long, self.short)


class InATuple(_Scaled):
    def frequencies(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "both"):
            self.both = (torch.linspace(0.3, 2.0, 4, dtype=x.dtype), torch.ones(4, dtype=x.dtype))
        return self.both[0] * self.both[1]


class OverOneThatWasThere(_Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4)

    def frequencies(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.short * x.shape[1]
        return self.last


@pytest.mark.parametrize("kind", [MadeOnce, InATuple, OverOneThatWasThere])
def test_a_call_of_another_length_is_captured_again(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind().double()
    eager, before = copy.deepcopy(model), dict(vars(model))
    pm = autopar.parallelize(model, 1, torch.randn(2, 4, 4, dtype=torch.float64))
    for length in (4, 9, 4):
        x = torch.randn(2, length, 4, dtype=torch.float64)
        torch.testing.assert_close(pm(x), eager(x), rtol=1e-12, atol=1e-12)
    assert not any(isinstance(leaf, FakeTensor) for v in vars(model).values() for leaf in pytree.tree_leaves(v))
    assert {name for name in vars(model) if not name.startswith("_autopar")} <= before.keys()  # "last" cannot be read
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
