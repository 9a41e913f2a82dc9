"""A comparison with eager mode draws the same for the same elements, in whatever order they are in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.python.restoring import same_draws
from autopar.comparison import compare_with_eager


class Subsampling(nn.Module):
    """As speech models begin: a convolution, whose output is turned and copied, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 8, 3, stride=2), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()
        return self.norm(nn.functional.dropout(h * 2, 0.3)).square().mean(-1).sum()


class Noisy(Subsampling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x.transpose(1, 2)).transpose(1, 2).contiguous()
        return (self.norm(h + torch.randn_like(h)) * torch.bernoulli(torch.sigmoid(h))).square().sum()


class AlphaDropout(Subsampling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.alpha_dropout(self.conv(x.mT).mT.contiguous(), 0.3, training=True)
        return self.norm(h).square().sum()


@pytest.mark.parametrize("kind", [Subsampling, Noisy, AlphaDropout])
def test_a_copy_in_another_layout_draws_the_same(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 9, 6)
    assert compare_with_eager(capture(model, (x,)), model, (x,), {}).same


def test_draws_of_a_transposed_tensor() -> None:
    with same_draws():
        whole, turned = torch.rand_like(torch.empty(4, 6)), torch.rand_like(torch.empty(6, 4).t())
        written = torch.empty(6, 4).t().bernoulli_(0.5)
        assert torch.equal(whole, turned) and turned.stride() == (1, 4)
        assert torch.equal(written, torch.empty(4, 6).bernoulli_(0.5)) and written.stride() == (1, 4)


class Jittered(nn.Module):
    """A loop over experts that drops elements of the rows of each, behind a router with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x * torch.empty_like(x).uniform_(0.99, 1.01)).argmax(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = torch.where(chosen == e)[0]
            if len(rows):
                out[rows] = nn.functional.dropout(expert(x[rows]), 0.2)
        return out.square().mean()


def test_dropout_of_experts_and_noise_of_the_router() -> None:
    model, x = Jittered(), torch.randn(12, 8)
    assert compare_with_eager(capture(model, (x,)), model, (x,), {}).same
