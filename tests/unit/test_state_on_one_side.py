"""State, checks and experts on one side of a branch on a random number: the other side leaves them as they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import Captured, capture
from autopar.comparison import compare_with_eager
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.lower.emit import lower


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.plain = torch.zeros(8)
        self.held = [torch.zeros(8), torch.zeros(8)]
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)


class Plain(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if random.random() < 0.5:
            self.plain.add_(x.detach().mean(0))
            x = self.b(x)
        return x.square().mean()


class ReadOnBoth(Base):
    """The side that does not write it reads it: as it is, and not as it was captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if torch.rand(()) < 0.5:
            self.plain.add_(1.0)
            x = self.b(x)
        return (x + self.plain).square().mean()


class InAList(Base):
    """torch counts such tensors in the order in which a trace meets them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if torch.rand(()) < 0.5:
            self.held[0].add_(x.detach().mean(0))
            x = self.b(x)
        if torch.rand(()) < 0.5:
            self.held[1].add_(x.detach().sum(0))
            x = self.b(x)
        return (x + self.held[1]).square().mean()


class Frozen(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                self.frozen.mul_(0.5).add_(x.mean(0))
        return x.square().mean()


class Checked(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if random.random() < 0.5:
            x = self.b(x)
            if (x > 100).any():
                x = x.clamp(-100, 100)
        return x.square().mean()


class CheckedInTurns(nn.Module):
    """All checks are at one line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i and random.random() < 0.5:
                continue
            x = layer(x)
            if (x > 100 + i).any():
                x = x.clamp(-100, 100)
        return x.square().mean()


class OfExperts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if random.random() < 0.5:
            p, chosen = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                rows = torch.where(chosen == e)[0]
                if len(rows) > 0:
                    out.index_add_(0, rows, expert(x[rows]) * p[rows, None])
            x = x + out
        return x.square().mean()


@pytest.mark.parametrize("kind", [Plain, ReadOnBoth, InAList, Frozen, Checked, CheckedInTurns, OfExperts])
def test_both_sides_are_kept(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(6, 8)
    assert compare_with_eager(capture(model, (x,)), model, (x,), {}).same


class Counting(Base):
    """Writes, at every call, what follows from no data: the tracer does so to the tensor itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plain.add_(1.0)
        self.held[0].mul_(2.0).add_(1.0)
        return (self.a(x) + self.plain + self.held[0]).square().mean()


def test_a_capture_leaves_plain_tensors_as_they_are() -> None:
    model, x = Counting(), torch.randn(6, 8)
    captured = capture(model, (x,))
    assert not model.plain.any() and not model.held[0].any()
    assert compare_with_eager(captured, model, (x,), {}).same
    assert not model.plain.any() and not model.held[0].any()


def _run(captured: Captured, model: nn.Module, x: torch.Tensor, seed: int) -> Any:
    graph, plan = captured.graph, one_device(captured.graph)
    weights, buffers = state_of(captured, model)
    return run_step(graph, plan, lower(graph, plan), weights, buffers, inputs_of(captured, (x,), {}), seed=seed)


def test_the_side_that_is_not_taken_leaves_a_tensor_as_it_is() -> None:
    model, x = ReadOnBoth(), torch.randn(6, 8)
    with torch.no_grad():
        model.plain.fill_(3.0)
    captured = capture(model, (x,))
    assert float(model.plain[0]) == 3.0
    (name,) = captured.graph.updates
    after = {float(_run(captured, model, x, seed).buffers[name][0]) for seed in range(8)}
    assert after == {3.0, 4.0}
    loss = {round(float(_run(captured, model, x, seed).outputs[0]), 4) for seed in range(8)}
    with torch.no_grad():
        one = (model.a(x) + 3).square().mean(), (model.b(model.a(x)) + 4).square().mean()
    assert loss == {round(float(value), 4) for value in one}
