"""A backward in two halves gives what one backward gives, on any graph, and computes nothing twice in a chain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.pipelines.backward import Halves


def graph(seed: int, n_inputs: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Inputs, weights and outputs of random operators; weights are used several times, outputs by others too."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(n_inputs)]
    weights = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(5)]
    made: list[torch.Tensor] = [*inputs, *weights]
    for _ in range(rng.randint(4, 14)):
        a, b = rng.choice(made), rng.choice(made)
        kind = rng.randrange(5)
        if kind == 0:
            made.append(a @ b)
        elif kind == 1:
            made.append(torch.tanh(a) + b)
        elif kind == 2:
            made.append(torch.softmax(a * b, -1))
        elif kind == 3:
            made.extend(torch.cat([a, b]).chunk(2))
        else:
            made.append(torch.nn.functional.layer_norm(a, (3,), b[0], b[1]))
    own = made[n_inputs + len(weights) :]
    outputs = [made[-1], *rng.sample(own, rng.randint(0, 2))]
    return inputs, weights, [x for x in outputs if x.requires_grad]


def edges(tensors: Sequence[torch.Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(x) for x in tensors]


@pytest.mark.parametrize("n_inputs", [0, 1, 2])
def test_halves_equal_the_whole(n_inputs: int) -> None:
    for seed in range(150):
        found = []
        for split in (False, True):
            inputs, weights, outputs = graph(seed, n_inputs)
            grads = [torch.full_like(x, 1 + i) for i, x in enumerate(outputs)]
            if split:
                halves = Halves()
                gradients = halves.inputs(0, edges(outputs), grads, edges(inputs), weights)
                assert all(w.grad is None for w in weights), "they come with the second half"
                halves.weights(0)
                assert all(x.grad is None for x in inputs), "the second half does not come there"
                for x, gradient in zip(inputs, gradients, strict=True):
                    x.grad = gradient
            else:
                torch.autograd.backward(outputs, grads)
            found.append([x.grad for x in [*inputs, *weights]])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None), seed
            if a is not None and b is not None:
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_a_chain_is_computed_once() -> None:
    layers = [torch.nn.Linear(4, 4) for _ in range(5)]
    x = y = torch.randn(3, 4, requires_grad=True)
    for layer in layers:
        y = torch.tanh(layer(y))
    weights = [p for layer in layers for p in layer.parameters()]
    halves = Halves()
    with _Products() as first:
        halves.inputs(0, edges([y]), [torch.ones_like(y)], edges([x]), weights)
    with _Products() as second:
        halves.weights(0)
    assert (first.count, second.count) == (5, 5)
