"""The planner mixes keeping, recomputing and moving to the host: never slower than one of them for everything."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import stand_in
import torch
from procs.offloaded import GPT, LENGTH, WORDS
from torch import nn

import autopar
from autopar.errors import InfeasibleError

SHARES, RATES = (0.9, 0.75, 0.6), (1e8, 1e9, 1e10)
CASES = [("mlp", share, rate) for share in (*SHARES, 0.5) for rate in RATES[:2]]
CASES += [("mlp", share, 1e10) for share in SHARES] + [("gpt", share, rate) for share in SHARES for rate in RATES]
QUICK = [("mlp", 0.75, 1e9), ("mlp", 0.6, 1e8), ("gpt", 0.75, 1e9)]
KEEP, AGAIN, MOVE = {"recompute": "none"}, {}, {"recompute": "none", "offload": "activations=*"}


@cache
def model_of(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    torch.manual_seed(0)
    if name == "gpt":
        model, batch = GPT(4), (torch.randint(WORDS, (32, LENGTH)),)
        return model, batch, autopar.capture(model, batch)
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4))
    model, batch = nn.Sequential(*blocks), (torch.randn(1024, 32), torch.randn(1024, 32))
    captured = autopar.capture(model, batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:])
    return model, batch[:1], captured


def planned(name: str, rate: float, limit: int | None, **how: Any) -> Any:
    model, batch, captured = model_of(name)
    cluster = stand_in.stand_in(1, rate)
    try:
        return autopar.plan(model, cluster, batch, mesh="data=1", captured=captured, memory_limit=limit, **how)
    except InfeasibleError:
        return None


@cache
def free_bytes(name: str) -> int:
    plan = planned(name, 1e10, None, recompute="none")
    return int(plan.price.memory_bytes)


def of_everything(name: str) -> str:
    return "blocks.*" if name == "gpt" else "?"


@pytest.mark.parametrize(
    ("name", "share", "rate"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_never_slower_than_one_way_for_everything(name: str, share: float, rate: float) -> None:
    limit = int(share * free_bytes(name))
    found = planned(name, rate, limit, offload="activations")
    others = [
        planned(name, rate, limit, **KEEP), planned(name, rate, limit, recompute=[of_everything(name)]),
        planned(name, rate, limit, **MOVE), planned(name, rate, limit, **AGAIN),
    ]  # fmt: skip
    seconds = [plan.price.seconds for plan in others if plan is not None]
    assert found is not None or not seconds
    if found is not None:
        assert found.price.memory_bytes <= limit
        assert not seconds or found.price.seconds <= min(seconds) * (1 + 1e-9), (found.memory, seconds)


def test_there_are_twenty_cases() -> None:
    assert len(set(CASES)) == 20
