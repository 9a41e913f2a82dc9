"""What the server of ranks does once, so that no rank begins with it: a first capture takes ten times as long as the
next ones, since torch imports and compiles on the way. Ranks are forked from the server, and draw as before.

No backward runs here: autograd counts the devices in its first one, and an emulated accelerator comes later.
"""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu().square().mean()


with torch.random.fork_rng(devices=[]):
    capture(_Net(), (torch.zeros(4, 4),))
