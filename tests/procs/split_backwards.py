"""What one rank does in the tests of compiled stages whose backward is split."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.cases import whole
from torch import nn

import autopar
from autopar.runtime.pipelines import backward
from autopar.runtime.pipelines.stage_in_flight import Flight

MICROBATCHES = 4
Found = dict[Any, torch.Tensor | None]


class Scaled(torch.autograd.Function):
    """A product with a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Layer(nn.Module):
    """Two products, a norm whose one operator gives all its gradients, user code, and a branch that leaves it out."""

    def __init__(self, own_code: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)
        self.scale, self.own_code = nn.Parameter(torch.rand(8) + 0.5), own_code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand(()) < 0.4:
            return x
        y = self.down(self.norm(self.up(x)).tanh())
        if not self.own_code:
            return x + y * self.scale
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return x + Scaled.apply(y, self.scale)


class Layers(nn.Module):
    """Layers between an embedding and a product that share a weight; each step leaves some out."""

    def __init__(self, own_code: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.layers = nn.Sequential(*(Layer(own_code) for _ in range(4)))
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.embed(tokens) + x)), y)


def batch(seed: int, wants_grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    tokens, y = (torch.randint(0, 8, (16,), generator=generator) for _ in range(2))
    return tokens, torch.randn(16, 8, generator=generator).double().requires_grad_(wants_grad), y


def run_step(pm: Any, seed: int, wants_grad: bool = False) -> Found:
    """Loss and gradients, of the input too where one is wanted."""
    pm.zero_grad()
    torch.manual_seed(seed)
    args = batch(seed, wants_grad)
    found: Found = {(seed, "loss"): pm.train_step(*args).detach(), (seed, "x"): args[1].grad}
    found |= {(seed, name): None if p.grad is None else whole(p.grad).clone() for name, p in pm.named_parameters()}
    return found


def difference(a: Found, b: Found) -> list[Any]:
    """What is not equal to the bit, of what both have."""
    both = a.keys() & b.keys()
    return [k for k in both if a[k] is not b[k] and (a[k] is None or b[k] is None or not torch.equal(a[k], b[k]))]


def halves(schedule: str, options: dict[str, Any], seeds: int, wants_grad: bool = False) -> dict[str, Any]:
    """Steps of stages that are compiled, with this schedule; and of others, that are not, with it and with 1F1B.

    Returns:
        the differences; how many gradients there are, and how many do not come; and how often the first half of a
        compiled backward ran.
    """
    warnings.simplefilter("ignore")
    found: dict[str, Found] = {}
    n_halves = 0
    for way, more in (
        ("compiled", {"schedule": schedule, "compile": {"backend": "eager"}}),
        ("eager", {"schedule": schedule}), ("1f1b", {"schedule": "1f1b"}),
    ):  # fmt: skip
        pm = autopar.parallelize(
            Layers("params" not in options), dist.get_world_size(), batch(0, wants_grad), stages=2,
            microbatches=MICROBATCHES, **options, **more,
        )  # fmt: skip
        with mock.patch.object(backward, "first_half", wraps=backward.first_half) as first_half:
            found[way] = {}
            for seed in range(seeds):
                found[way] |= run_step(pm, seed, wants_grad)
            assert way == "compiled" or not first_half.called
            n_halves += first_half.call_count
    mine = found["compiled"]
    return {
        "eager": difference(mine, found["eager"]), "1f1b": difference(mine, found["1f1b"]),
        "gradients": sum(x is not None for x in mine.values()), "none": sum(x is None for x in mine.values()),
        "halves": n_halves,
    }  # fmt: skip


def breaks_off() -> list[Any]:
    """Differences of a step that follows two that broke off in each half, to one of stages that did not break."""
    warnings.simplefilter("ignore")
    results = []
    for breaks in (True, False):
        pm = autopar.parallelize(
            Layers(), 2, batch(0), stages=2, microbatches=MICROBATCHES, schedule="zb-h1", compile={"backend": "eager"}
        )  # fmt: skip
        for part in ("backward", "weights") if breaks else ():
            calls: list[int] = []
            whole_part = getattr(Flight, part)

            def broken(flight: Flight, *args: Any, calls: list[int] = calls, part: Any = whole_part) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise ValueError("trouble in a half")
                part(flight, *args)

            with mock.patch.object(Flight, part, broken):
                try:
                    run_step(pm, 0)
                except Exception as error:
                    assert "trouble in a half" in str(error), error
                else:
                    raise AssertionError("the step did not break off")
        results.append(run_step(pm, 1))
    return difference(*results)


class InFloat32(nn.Module):
    """Products that autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layers(x.float()).square().mean()


def under_autocast() -> list[list[Any]]:
    """Differences of steps under autocast, split and compiled or not, to one with 1F1B."""
    warnings.simplefilter("ignore")
    results: list[Found] = []
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for more in ({"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"schedule": "zb-h1", "compile": {"backend": "eager"}}):
        pm = autopar.parallelize(InFloat32(), 2, (x,), stages=2, microbatches=2, cuts=["layers.2"], **more)
        with torch.autocast("cpu", torch.bfloat16):
            pm.train_step(x)
        results.append({name: whole(p.grad).clone() for name, p in pm.named_parameters()})
    return [difference(results[0], other) for other in results[1:]]
