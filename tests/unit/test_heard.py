"""Whoever waits for a search hears what is tried, and the best so far."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import autopar
from autopar import progress
from autopar.capture import capture
from autopar.capture.trace import trace_progress
from autopar.progress import heard, tell


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_a_search_tells_what_it_tries_and_the_best_so_far() -> None:
    said: list[str] = []
    with heard(said.append):
        plan = autopar.plan(Net(), "local-x2", torch.zeros(8, 32), stages="auto", microbatches=[2, 4])
    assert any("microbatch" in text and "best so far" not in text for text in said), "the first has none before it"
    later = [text for text in said if "best so far" in text]
    assert later and all(" a step, " in text for text in later)
    assert plan.seconds > 0


def test_what_comes_often_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.1)
    said: list[str] = []
    tell(lambda: "nobody")
    with heard(said.append):
        end = time.monotonic() + 0.35
        while time.monotonic() < end:
            tell(lambda: "often")
        tell(lambda: "at once", often=False)
    assert said[-1] == "at once" and 2 <= said.count("often") <= 5 and "nobody" not in said


class MadeInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.GELU()(self.a(x))


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.activations = [nn.GELU(), nn.Sequential(nn.Tanh(), nn.ReLU())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for activation in self.activations:
            x = activation(self.a(x))
        return x


class AroundASubmodule(nn.Module):
    """A module made in forward whose submodule is one of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(self.a, nn.Tanh())(x)


class WithALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.again = nn.Linear(8, 8)  # two names: torch calls it by proxies then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.CrossEntropyLoss(reduction="none")(self.again(self.a(x)), x.argmax(-1))


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize("inner", [MadeInForward, InAList, AroundASubmodule, WithALoss])
def test_who_listens_to_a_capture_does_not_change_it(inner: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Inside(inner()), torch.randn(4, 8)
    said: list[str] = []
    with heard(said.append):
        told = capture(model, (x,)).graph.fingerprint
    assert "inner" in said and "inner.a" in said
    monkeypatch.setattr(trace_progress, "is_heard", lambda: False)
    assert capture(model, (x,)).graph.fingerprint == told
