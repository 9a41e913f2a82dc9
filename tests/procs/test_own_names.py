"""Models whose attributes, buffers, modules and methods are called as a parallel module might call its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.ranks.launch import run_local

WAYS: dict[str, dict[str, Any]] = {"one mesh": {}, "stages": {"stages": 2, "microbatches": 1}}


class SameNames(nn.Module):
    """Reads them all in the first half of forward, so that the first stage of two has the tensors among them."""

    modes_now = (1.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.follow, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.leads, self.layout, self._seed, self.sampler = 1.5, 0.5, 0.25, 2.0
        self.buckets, self._device = [1.0, 2.0], "cpu"
        self.register_buffer("count", torch.tensor(2.0))
        self.stage = nn.Parameter(torch.tensor(3.0))

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layout

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.buckets[1] if self._device == "cpu" else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.follow(self._run(self.shard(self.first(x)))) * self.count * self.stage
        x = x * self.leads + self._seed * self.sampler + self.modes_now[0]
        return self.last(torch.tanh(x)).square().mean()


NUMBERS = {"leads": 2.5, "layout": 0.75, "_seed": 0.5, "buckets": [1.0, 3.0], "_device": "meta", "sampler": 3.0}
SHOWN = ("leads", "layout", "_seed", "buckets", "_device", "modes_now")
"""Those that are read of a parallel module, too; ``sampler`` and ``shard`` it has for users."""


def every() -> dict[str, list[str]]:
    return {way: list(_differences(**options)) for way, options in WAYS.items()}


def _differences(**options: Any) -> Iterator[str]:
    """What is not as on one device: losses and gradients, what is read, and what is set."""
    torch.manual_seed(0)
    model, x = SameNames().double(), torch.randn(8, 8, dtype=torch.float64)
    eager = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm: Any = autopar.parallelize(model, 2, (x,), on_change="recapture", **options)
    told = [str(warning.message) for warning in caught if "both have" in str(warning.message)]
    if dist.get_rank() == 0 and (len(told) != 1 or "called sampler, shard:" not in told[0]):
        yield f"told: {told}"
    yield from _trained(pm, eager, x, "at first")
    for name in SHOWN:
        if getattr(pm, name) != getattr(eager, name):
            yield f"{name} reads {getattr(pm, name)!r}"
    held = dict(pm.named_parameters())
    if pm.stage is not held["stage"] if "stage" in held else not pm.stage.is_meta:
        yield "stage is not the parameter"
    if "first.weight" in held:
        if pm.count is not dict(pm.named_buffers())["count"] or not isinstance(pm.follow, nn.Linear):
            yield "count or follow is not the model's"
        pm.count.fill_(4.0)
    eager.count.fill_(4.0)
    for name, value in NUMBERS.items():
        setattr(pm, name, value)
        setattr(eager, name, value)
        if name in SHOWN and (getattr(pm, name) != value or getattr(model, name) != value):
            yield f"{name} was set to {value!r}, and reads {getattr(pm, name)!r}"
        yield from _trained(pm, eager, x, f"{name} was set")


def _trained(pm: Any, eager: nn.Module, x: torch.Tensor, when: str) -> Iterator[str]:
    loss, expected = pm.train_step(x), eager(x)
    expected.backward()
    if abs(float(loss - expected)) > 1e-12:
        yield f"{when}: the loss is {float(loss)}, not {float(expected)}"
    gradients = {name: param.grad.clone() for name, param in eager.named_parameters() if param.grad is not None}
    for name, param in pm.named_parameters():
        if param.numel() and not torch.allclose(_whole(param.grad), gradients[name], rtol=0, atol=1e-10):
            yield f"{when}: the gradient of {name}"
    pm.zero_grad()
    eager.zero_grad()


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[str]]]:
    return run_local(every, 2, timeout=240)


@pytest.mark.parametrize("way", WAYS)
def test_names_reach_the_model(found: list[dict[str, list[str]]], way: str) -> None:
    assert [rank[way] for rank in found] == [[], []]
