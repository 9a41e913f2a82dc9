"""The copy of a model that is captured when the model is gone: all of its code reads the copy, or the model is kept."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.without_values import without_values


def closure(block: Any) -> Callable[..., Any]:
    """As minGPT's blocks have it."""
    m = block.layers
    return lambda x: m.second(torch.relu(m.first(x)))


def default(block: Any) -> Callable[..., Any]:
    def f(x: torch.Tensor, first: Any = block.layers.first, *, second: Any = block.layers.second) -> Any:
        return second(torch.relu(first(x)))

    return f


def partial(block: Any) -> Callable[..., Any]:
    return functools.partial(lambda m, x: m.second(torch.relu(m.first(x))), block.layers)


def partial_of_closure(block: Any) -> Callable[..., Any]:
    return functools.partial(closure(block))


def method(block: Any) -> Callable[..., Any]:
    inner = closure(block)
    return types.MethodType(lambda self, x: inner(x), block)


def of_a_list(block: Any) -> Callable[..., Any]:
    listed = [block.layers.first, torch.relu, {"then": block.layers.second}]
    return lambda x: listed[2]["then"](listed[1](listed[0](x)))


def of_itself(block: Any) -> Callable[..., Any]:
    def f(x: torch.Tensor, again: bool = True) -> Any:
        return f(block.layers.first(x), False) if again else block.layers.second(torch.relu(x))

    return f


def of_parameters(block: Any) -> Callable[..., Any]:
    first, second = block.layers.first, block.layers.second
    w, b, v, c = first.weight, first.bias, second.weight, second.bias
    return lambda x: torch.relu(x @ w.T + b) @ v.T + c


def weak(block: Any) -> Callable[..., Any]:
    of = weakref.ref(block.layers)
    return lambda x: of().second(torch.relu(of().first(x)))  # type: ignore[union-attr]


class Cached:
    """What no copy can be made of, and what no function can be found in."""

    __slots__ = ("m",)

    def __init__(self, m: torch.nn.Module) -> None:
        self.m = m

    def __call__(self, x: torch.Tensor) -> Any:
        return self.m.second(torch.relu(self.m.first(x)))  # type: ignore[operator]

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


HOW = [closure, default, partial, partial_of_closure, method, of_a_list, of_itself, of_parameters, weak]


class Block(torch.nn.Module):
    def __init__(self, how: Callable[[Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"first": torch.nn.Linear(8, 16), "second": torch.nn.Linear(16, 8)})
        for name, layer in list(self.layers.items()):
            setattr(self.layers, name, layer)
        self.f = how(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor((x + self.f(x)).square().mean())


@pytest.mark.parametrize("how", HOW)
def test_functions_in_attributes_read_the_copy(how: Callable[[Any], Callable[..., Any]]) -> None:
    model = Block(how)
    copied: Any = without_values(model)
    x = torch.ones(2, 8)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.set_(torch.zeros(parameter.shape))
        expected, before = x.square().mean(), model(x)
    assert torch.equal(copied(x), expected)
    assert not torch.equal(before, expected) and torch.equal(model(x), before)


TRAINED = (closure, partial, weak, of_parameters, Cached)
"""The others are trained with in the sweep only; each is copied every time."""


@pytest.mark.parametrize("how", [
    how if how in TRAINED else pytest.param(how, marks=pytest.mark.slow)
    for how in (*HOW, Cached) if how is not of_itself  # a capture keeps that
])  # fmt: skip
def test_training_goes_on_in_other_shapes_and_in_eval_mode(how: Any) -> None:
    torch.manual_seed(0)
    plain = Block(closure)
    model = Block(how if how is not Cached else lambda block: Cached(block.layers))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8)
    pm = autopar.parallelize(model, 1, (x,))
    for rows in (x, x[:3]):
        torch.testing.assert_close(pm(rows), plain(rows))
    pm.eval()
    torch.testing.assert_close(pm(x[:2]), plain(x[:2]))
    assert pm.training is False
