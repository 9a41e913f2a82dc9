"""A child that has the name of a method of ``nn.Module``: as an attribute one finds the method."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar


class NBeats(nn.Module):
    """Blocks in lists, which register nothing; their parameters are registered under a method's name, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[nn.Linear(4, 4), nn.Linear(4, 4)] for _ in range(2)]
        learned = [p for stack in self.stacks for block in stack for p in block.parameters()]
        self.parameters = nn.ParameterList(learned)  # type: ignore[assignment]
        self.modules = nn.BatchNorm1d(4)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for forecast, backcast in self.stacks:
            x = x - backcast(torch.relu(forecast(x)))
        return self._modules["modules"](x).square().sum()  # type: ignore[misc]


def test_it_trains_as_in_eager_mode() -> None:
    torch.manual_seed(0)
    model = NBeats().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), 1, (x,))
        for module in (model, parallel):
            for _ in range(2):
                module.zero_grad()
                module(x).backward()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    gradients = {name: p.grad for name, p in parallel.named_parameters()}
    assert list(gradients) == [name for name, _ in model.named_parameters()] and "parameters.0" in gradients
    for name, p in model.named_parameters():
        assert gradients[name] is not None and p.grad is not None
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-9)
    mine, theirs = parallel.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and len(theirs) == 13
    torch.testing.assert_close(mine["modules.running_var"], theirs["modules.running_var"], rtol=1e-9, atol=1e-9)


def test_on_the_meta_device_it_is_made_by_its_own_code() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.half = nn.Linear(4, 4)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self._modules["half"](x).square().sum()  # type: ignore[misc]

    with torch.device("meta"):
        model = Named()
    x = torch.randn(8, 4)
    try:
        parallel = autopar.parallelize(model, 1, (x,))
        assert parallel(x) > 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
