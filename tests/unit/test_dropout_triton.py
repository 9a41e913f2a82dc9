"""Dropout's Triton kernels, by Triton's interpreter: the bits of the operators, forward and backward, in one pass."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.rules.families import sharded_random

pytest.importorskip("triton", reason="kernels are interpreted and compiled by triton")
from autopar.rules.families import dropout_triton

SHAPES = [(8,), (4, 6), (2, 3, 4, 5), (1, 16), (16, 1), (0, 4), (1030, 3)]
CODE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from autopar.rules.families import dropout_triton as d
numbers = {"site": "i32", "threshold": "i32", "scale": "fp32", "n": "i32", "n_rows": "i32", "n_columns": "i32"}
for kernel, constants in ((d._hashes, {"CUT": True, "BLOCK": 1024}), (d._dropped, {"BLOCK": 1024})):
    for dtype in ("bf16", "fp16", "fp32"):
        kinds = {"x": "*" + dtype, "out": "*" + dtype, "row": "*i32", "column": "*i32", **numbers}
        signature = {a: "constexpr" if a in constants else kinds.get(a, "*i64") for a in kernel.arg_names}
        for capability in (80, 90):
            source = ASTSource(kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
            assert made.asm["cubin"]
print("compiled")
"""


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Processors count as GPUs; gives which kernels ran."""
    ran: list[str] = []
    for name in ("hashes", "dropped"):
        real = getattr(dropout_triton, name)
        monkeypatch.setattr(
            dropout_triton, name, lambda *args, real=real, name=name: (ran.append(name), real(*args))[1]
        )
    monkeypatch.setattr(sharded_random, "KERNELS_ON", {"cpu"})
    yield ran


def both(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor, list[torch.Size]]:
    """Result and gradient, and the shapes of what autograd keeps."""
    kept: list[torch.Size] = []
    leaf, cut = x.clone().requires_grad_(), tuple(() for _ in x.shape)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (kept.append(saved.shape), saved)[1], lambda s: s):
        y = sharded_random.dropout(
            leaf, p, True, cut={}, seed=torch.tensor(5), site=3, shape=tuple(x.shape), shards=cut
        )  # fmt: skip
    (gradient,) = torch.autograd.grad(y, leaf, torch.arange(y.numel(), dtype=y.dtype).view_as(y))
    return y.detach(), gradient, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits(
    on_kernels: list[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape).to(dtype)
    for p in (0.1, 1.0):
        mine, gradient, kept = both(x, p)
        with monkeypatch.context() as patch:
            patch.setattr(sharded_random, "KERNELS_ON", set())
            expected, of_x, _ = both(x, p)
        assert torch.equal(mine == 0, expected == 0) and torch.equal(gradient == 0, of_x == 0)
        torch.testing.assert_close((mine, gradient), (expected, of_x))
        assert all(len(size) < len(shape) or len(size) == 1 for size in kept), "something of the size of x is kept"
    assert on_kernels[:3] == ["hashes", "dropped", "dropped"]


def test_hashes_of_a_piece(on_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    places = [torch.arange(2, 5), torch.arange(8), torch.arange(3, 7)]
    mine = sharded_random.hashes_at(torch.tensor(9), 4, (6, 8, 10), places)
    monkeypatch.setattr(sharded_random, "KERNELS_ON", set())
    expected = sharded_random.hashes_at(torch.tensor(9), 4, (6, 8, 10), places)
    assert on_kernels == ["hashes"] and all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_hashes_of_some_rows_are_views(on_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring drops block by block, with rows of the middle of a tensor and columns by number."""
    row, column = sharded_random.halves(torch.tensor(9), 4, (2, 8, 10), ((),) * 3, torch.device("cpu"))
    rows, columns, x = row[:, 2:5], column[torch.tensor([7, 1, 3, 0])], torch.randn(2, 3, 4)
    mine = sharded_random.dropping(rows, columns, 0)(x)
    monkeypatch.setattr(sharded_random, "KERNELS_ON", set())
    assert "dropped" in on_kernels and torch.equal(mine, sharded_random.dropping(rows, columns, 0)(x))


def test_double_precision_has_no_kernel(on_kernels: list[str]) -> None:
    """Whose scale would be rounded to single precision."""
    both(torch.randn(4, 6, dtype=torch.float64), 0.1)
    assert "dropped" not in on_kernels


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, views aside."""

    n_bytes = 0

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if not func.is_view:  # type: ignore[attr-defined]
            leaves = pytree.tree_leaves((args, kwargs, result))
            self.n_bytes += sum(x.untyped_storage().nbytes() for x in leaves if isinstance(x, torch.Tensor))
        return result


def test_bytes_of_ten_passes() -> None:
    """What a kernel saves: about 70 bytes an element in place of one read and one write of 4."""
    x, cut = torch.randn(64, 1024), ((), ())
    with Traffic() as traffic:
        sharded_random.dropout(x, 0.1, True, cut={}, seed=torch.tensor(5), site=3, shape=tuple(x.shape), shards=cut)
    assert 50 < traffic.n_bytes / x.numel() < 90


@pytest.mark.slow
def test_compiled_for_gpus() -> None:
    """Triton's compiler makes machine code of both kernels for an A100 and an H100."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
