"""Dropout as one compiled pass: the bits that it has in ten, forward and backward, and nothing kept of its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autopar.rules import random

SHAPES = [(8,), (4, 6), (2, 3, 4, 5)]


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processors count as accelerators; gives how often something was compiled."""
    real, calls = torch.compile, []

    def compile_(fn: Callable[..., Any], **options: Any) -> Any:
        calls.append(1)
        return real(fn, **{**options, "backend": request.param})

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(random, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(random, "_one_pass", random._OnePass())
    torch.compiler.reset()
    yield calls
    torch.compiler.reset()


def dropped(x: torch.Tensor, p: float, site: int) -> torch.Tensor:
    cut = tuple(() for _ in x.shape)
    return random.dropout(x, p, True, cut={}, seed=torch.tensor(5), site=site, shape=tuple(x.shape), shards=cut)


def both(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor, list[torch.Size]]:
    """Result and gradient, and the shapes of what autograd keeps."""
    kept: list[torch.Size] = []
    leaf = x.clone().requires_grad_()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.shape)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        y = dropped(leaf, p, 3)
    (gradient,) = torch.autograd.grad(y, leaf, torch.arange(y.numel(), dtype=y.dtype).view_as(y))
    return y.detach(), gradient, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(fused: list[int], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = torch.randn(shape).to(dtype)
        for p in (0.1, 0.5, 1.0):
            one, gradient, kept = both(x, p)
            monkeypatch.setattr(random, "FUSED_ON", set())
            ten, expected, _ = both(x, p)
            monkeypatch.setattr(random, "FUSED_ON", {"cpu"})
            assert torch.equal(one, ten) and torch.equal(gradient, expected), (shape, p)
            assert all(len(size) < len(shape) or len(size) == 1 for size in kept), kept
    assert fused == [1] and random._one_pass.run is not random._drop, "it is compiled once"


def test_ten_passes_where_the_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fn: Any, **_: Any) -> Any:
        def fail(*args: Any) -> Any:
            raise RuntimeError("no compiler here\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(random, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(random, "_one_pass", random._OnePass())
    x = torch.randn(4, 6)
    with pytest.warns(UserWarning, match="dropout cannot be compiled.*: no compiler here$"):
        once = dropped(x, 0.5, 1)
    monkeypatch.setattr(random, "FUSED_ON", set())
    assert torch.equal(once, dropped(x, 0.5, 1))
