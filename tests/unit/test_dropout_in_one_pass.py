"""Dropout as one compiled pass: the bits that it has in ten, forward and backward, and nothing kept of its size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.rules.families import sharded_random

SHAPES = [(8,), (4, 6), (2, 3, 4, 5)]


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processors count as accelerators; gives how often something was compiled."""
    real, calls = torch.compile, []

    def compile_(fn: Callable[..., Any], **options: Any) -> Any:
        calls.append(1)
        return real(fn, **{**options, "backend": request.param})

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(sharded_random, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(sharded_random, "_one_pass", sharded_random._OnePass())
    torch.compiler.reset()
    yield calls
    torch.compiler.reset()


def dropped(x: torch.Tensor, p: float, site: int) -> torch.Tensor:
    cut = tuple(() for _ in x.shape)
    return sharded_random.dropout(x, p, True, cut={}, seed=torch.tensor(5), site=site, shape=tuple(x.shape), shards=cut)


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
            monkeypatch.setattr(sharded_random, "FUSED_ON", set())
            ten, expected, _ = both(x, p)
            monkeypatch.setattr(sharded_random, "FUSED_ON", {"cpu"})
            assert torch.equal(one, ten) and torch.equal(gradient, expected), (shape, p)
            assert all(len(size) < len(shape) or len(size) == 1 for size in kept), kept
    assert fused == [1] and sharded_random._one_pass.run is not sharded_random._drop, "it is compiled once"


def test_ten_passes_where_the_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fn: Any, **_: Any) -> Any:
        def fail(*args: Any) -> Any:
            raise RuntimeError("no compiler here\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(sharded_random, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(sharded_random, "_one_pass", sharded_random._OnePass())
    x = torch.randn(4, 6)
    with pytest.warns(UserWarning, match="dropout cannot be compiled.*: no compiler here$"):
        once = dropped(x, 0.5, 1)
    monkeypatch.setattr(sharded_random, "FUSED_ON", set())
    assert torch.equal(once, dropped(x, 0.5, 1))


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, views aside."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = pytree.tree_leaves((args, kwargs, result))
            self.n_bytes += sum(x.untyped_storage().nbytes() for x in leaves if isinstance(x, torch.Tensor))
        return result


def test_bytes_of_ten_passes() -> None:
    """What compiling saves: about 70 bytes an element in place of one read and one write of 4."""
    x = torch.randn(64, 1024)
    with Traffic() as traffic:
        dropped(x, 0.1, 3)
    assert 50 < traffic.n_bytes / x.numel() < 90


def test_one_kernel_for_all_shapes_and_rates(fused: list[int]) -> None:
    """The compiler makes one program: of what has other dims, is a view, or is another gradient, it would make others,
    and after eight of them none."""
    programs = torch._dynamo.utils.counters["stats"]
    before = programs["unique_graphs"]
    for shape in [(4, 6), (8, 10), (2, 3, 16), (2, 3, 4, 5), (1, 16), (16, 1), (7,), (1, 1, 9), (0, 4)]:
        for p in (0.1, 0.5):
            x = torch.randn(shape).requires_grad_()
            for y in (dropped(x, p, 3), dropped(x.transpose(0, -1), p, 3), dropped(x[:1], p, 3)):
                y.sum().backward()  # its gradient is expanded
    assert programs["unique_graphs"] - before == 1
    assert sharded_random._one_pass.run is not sharded_random._drop


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_pass_reads_once_and_writes_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Forward and backward are one kernel, by inductor's account."""
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(sharded_random, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(sharded_random, "_one_pass", sharded_random._OnePass())
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        metrics.reset()
        x = torch.randn(64, 1024).to(dtype).requires_grad_()
        _, (code,) = run_and_get_code(lambda: dropped(x, 0.1, 3).sum().backward())
    assert metrics.generated_kernel_count == 1
    pointers = set(re.findall(r"\b\w+_ptr\d", code))
    assert pointers == {"in_ptr0", "in_ptr1", "in_ptr2", "in_ptr3", "out_ptr0"}  # x, hashes of rows, columns, the scale
    torch.compiler.reset()
