"""Whoever waits for a search hears what is tried, and the best so far."""

from __future__ import annotations

import time

import torch
from torch import nn

import autopar
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


def test_what_comes_often_is_told_now_and_then() -> None:
    said: list[str] = []
    tell(lambda: "nobody")
    with heard(said.append):
        end = time.monotonic() + 0.35
        while time.monotonic() < end:
            tell(lambda: "often")
        tell(lambda: "at once", often=False)
    assert said[-1] == "at once" and 2 <= said.count("often") <= 5 and "nobody" not in said
