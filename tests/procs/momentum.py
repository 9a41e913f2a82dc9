"""What one rank does in the tests of frozen parameters that a forward writes: a momentum encoder beside eager mode."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from procs.habits import difference, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Momentum(nn.Module):
    """MoCo in small: keys come from an average of the encoder, and wait in a queue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        for parameter in self.k.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))
        self.double()

    def forward(self, x: Tensor, other_view: Tensor) -> Tensor:
        q = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            for trained, average in zip(self.q.parameters(), self.k.parameters(), strict=True):
                average.data = average.data * 0.9 + trained.data * 0.1
            k = F.normalize(self.k(other_view), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], dim=1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([k, self.queue[: -len(k)]]))
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.int64))


def trains(how: dict[str, Any], by_hand: bool) -> float:
    """The worst difference of losses, parameters and buffers over four steps, one of which has fewer rows.

    Args:
        by_hand: the script gives the average's first layer other values between two steps.
    """
    model = Momentum()
    truth = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    data = [[torch.randn(n, 6, generator=generator, dtype=torch.float64) for _ in range(2)] for n in (8, 8, 4, 8)]
    pm = autopar.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), tuple(data[0]), **how)
    assert [(n, p.requires_grad) for n, p in pm.named_parameters()] == [
        (n, p.requires_grad) for n, p in truth.named_parameters()
    ]
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (pm, truth))
    worst = 0.0
    for number, (x, y) in enumerate(data):
        losses = []
        for m, optimizer in ((pm, mine), (truth, theirs)):
            if by_hand and number == 1:
                with torch.no_grad():
                    m.k[0].weight.mul_(0.5)
            losses.append(m(x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, difference(*losses))
    theirs_now = truth.state_dict()
    assert pm.state_dict().keys() >= theirs_now.keys()
    return max(worst, *(difference(whole(pm.state_dict()[name]), value) for name, value in theirs_now.items()))


def saved_and_loaded() -> float:
    """The state dict of one process holds the average, too, and is loaded into another module."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    first = autopar.parallelize(Momentum(), mesh, (x, x))
    first(x, x)
    state = {name: whole(value).clone() for name, value in first.state_dict().items()}
    second = autopar.parallelize(Momentum(), mesh, (x, x))
    second.load_state_dict(state)
    return difference(first(x, x), second(x, x))
