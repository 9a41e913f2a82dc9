"""Triton's kernels of attention with dropout: the numbers of the call at once, and code for GPUs.

Here, without a GPU, Triton's interpreter runs the kernels, block by block, on processors; its compiler makes of them
what a GPU would run (down to the machine code of several kinds). Both need ``pip install triton``, which comes with
torch for CUDA and not with torch for processors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CASES, SEED, P, attend, both, inputs

from autopar.rules.attention import attention_on_gpus
from autopar.rules.families.sharded_random import bits, threshold_of

pytest.importorskip("triton", reason="kernels are interpreted and compiled by triton")
from autopar.rules.attention import attention_triton

TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.filterwarnings("error:attention with dropout")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Processors count as GPUs; gives which kernels ran."""
    ran: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(attention_triton, name)
        monkeypatch.setattr(
            attention_triton, name, lambda *args, real=real, name=name: (ran.append(name), real(*args))[1]
        )
    monkeypatch.setattr(attention_on_gpus, "KERNELS_ON", {"cpu"})
    monkeypatch.setattr(attention_on_gpus.kernels, "refused", False)
    yield ran


def at_once(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The numbers in float64, from the inputs as they are in ``dtype``."""
    with monkeypatch.context() as patch:
        patch.setattr(attention_on_gpus, "KERNELS_ON", set())
        tensors = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x
                   for x in inputs(name, dtype)]
        return both(tensors, CASES[name][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_the_call_at_once(
    name: str, dtype: torch.dtype, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that end within, and of fewer queries than keys: float32 to rounding, float16 to its own."""
    monkeypatch.setattr(attention_triton, "blocks_of", lambda *_: dict(QUERIES=16, KEYS=32, INNER=16, VALUES=16))
    expected = at_once(name, dtype, monkeypatch)
    found = both(inputs(name, dtype), CASES[name][-1])
    assert kernels == (["forward"] if "trained" in name else ["forward", "backward"])
    limit = {torch.float32: 2e-6, torch.float16: 3e-3}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= limit * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("shape, causal", [((1, 2, 70, 24), True), ((40, 64), False), ((3, 33, 48), True)])
def test_blocks_as_they_are_chosen(
    shape: tuple[int, ...], causal: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no block divides, without batch or heads; gradients that lie in another order."""
    monkeypatch.setitem(CASES, "these", (shape, shape, shape, None, causal))
    expected = at_once("these", torch.float32, monkeypatch)
    tensors = inputs("these", torch.float32)
    y = attend(tensors, causal)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    found = [y, *torch.autograd.grad(y, tensors[:3], grad.mT.contiguous().mT)]
    assert kernels == ["forward", "backward"]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= 4e-6 * max(1.0, float(b.abs().max()))


def test_which_elements_are_dropped(kernels: list[str]) -> None:
    """With values that are the identity, the result is the probabilities themselves: the bits are those of a mask."""
    q, k = (torch.randn(1, 2, 40, 8) for _ in range(2))
    v = torch.eye(40).expand(1, 2, 40, 40)
    found = attend([q, k, v, None], False)
    kept = bits(SEED, 5, (1, 2, 40, 40), ((),) * 4, q.device) < threshold_of(P)
    assert kernels == ["forward"] and torch.equal(found != 0, kept)


def test_a_kernel_that_cannot_be_made_is_told_of(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers come in blocks then."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    expected = at_once("causal", torch.float32, monkeypatch)
    monkeypatch.setattr(attention_triton, "forward", refuse)
    with pytest.warns(UserWarning, match="no kernel here.*out of resource"):
        found = both(inputs("causal", torch.float32), True)
    assert not kernels
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= 2e-6


def test_compiled_it_is_the_same_kernels(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that is compiled as a whole."""
    expected = at_once("shared keys", torch.float32, monkeypatch)
    tensors = inputs("shared keys", torch.float32)
    torch.compiler.reset()
    called = torch.compiler.allow_in_graph(lambda *tensors: attend([*tensors, None], False))
    y = torch.compile(lambda *tensors: called(*tensors), backend="aot_eager", fullgraph=True)(*tensors[:3])
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    found = [y, *torch.autograd.grad(y, tensors[:3], grad)]
    assert kernels == ["forward", "backward"]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= 2e-6 * max(1.0, float(b.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, inner, causal, mask, capability, ones", [
    ("float16", 64, True, 0, 90, True), ("float16", 64, True, 1, 80, False), ("bfloat16", 128, True, 0, 80, False),
    ("float32", 64, False, 1, 80, True), ("bfloat16", 256, False, 2, 90, False),
])  # fmt: skip
def test_machine_code_of_gpus(dtype: str, inner: int, causal: bool, mask: int, capability: int, ones: bool) -> None:
    """Triton's compiler and its assembler take the kernels, and what threads share is less than 99 KiB, as all kinds
    have."""
    numbers = map(str, map(int, (inner, causal, mask, capability, ones)))
    command = [sys.executable, str(TESTS / "compiled_kernels.py"), dtype, *numbers]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    needs = [list(map(int, line.split()[-2:])) for line in done.stdout.splitlines()]
    assert len(needs) == 3 and all(shared < 99 * 1024 for shared, _ in needs), needs
