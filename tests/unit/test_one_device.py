"""On a mesh of one device a call is a part of the caller's autograd graph, and a ``train_step`` all or nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def pair() -> tuple[Any, Net]:
    model = Net().double()
    eager = copy.deepcopy(model)
    return autopar.parallelize(model, 1, (torch.randn(4, 4, dtype=torch.float64, requires_grad=True),)), eager


def same_gradients(module: Any, eager: nn.Module, times: float = 1.0) -> None:
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad, times * theirs.grad)


def test_a_step_that_breaks_leaves_gradients_as_they_were() -> None:
    module, eager = pair()
    x = torch.randn(4, 4, dtype=torch.float64)
    module(x).backward()
    eager(x).backward()
    bad = torch.cat([x, x]).requires_grad_()

    def trouble(_: torch.Tensor) -> None:
        raise ArithmeticError

    broken = bad * 1
    broken.register_hook(trouble)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            module.train_step(broken)
        same_gradients(module, eager)
    module.train_step(torch.cat([x, x]))
    same_gradients(module, eager, 2.0)


def test_hooks_get_the_gradient_of_all_microbatches() -> None:
    module, eager = pair()
    first, second = torch.randn(2, 4, 4, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    module.first.weight.register_hook(lambda g: seen.append(g.clone()))
    module.train_step(torch.cat([first, second]))
    ((eager(first) + eager(second)) / 2).backward()
    assert len(seen) == 1 and eager.first.weight.grad is not None
    torch.testing.assert_close(seen[0], eager.first.weight.grad)
    same_gradients(module, eager)


def test_second_derivatives() -> None:
    module, eager = pair()
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    for model in (module, eager):
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        slope.square().sum().backward()
    same_gradients(module, eager)
