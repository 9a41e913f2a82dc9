"""What the server of ranks does once, so that no rank begins with it: a first capture and plan take ten times as long
as the next ones, since torch imports and compiles on the way. Ranks are forked from the server, and draw as before."""

from __future__ import annotations

import torch
from torch import nn

import autopar


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu().square().mean()


with torch.random.fork_rng(devices=[]):
    autopar.plan(_Net(), "local-x2", (torch.zeros(4, 4),), mesh="data=2")
