"""Containers of a user's own classes that a forward reads: what they hold is looked at past their methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.capture.python.frozen_values import frozen, items_in, says_the_same
from autopar.comparison import compare_with_eager
from autopar.errors import RunError


class Irrep(tuple):
    """As e3nn has it."""

    def __len__(self) -> int:
        raise NotImplementedError


class Pair(tuple):
    """Made of two arguments, so that copy and pickle cannot make it of one."""

    def __new__(cls, a: Any, b: Any) -> Pair:
        return super().__new__(cls, (a, b))


class Rows(list):
    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise NotImplementedError


class Table(dict):
    def items(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class Shut(Mapping):
    """A mapping that does not show what it holds."""

    def __getitem__(self, key: Any) -> float:
        return 3.0

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class Layer(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.l, self.held = nn.Linear(8, 8), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) * self.held[0]


class Stack(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layers, self.held = nn.ModuleList(Layer(held) for _ in range(3)), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() * self.held[0]


@pytest.mark.parametrize(
    "held",
    [Irrep((1, -1)), Pair(2, 3), Rows([1.5, 2]), Table({0: 1.5}), Shut(), [2.0, Irrep((1, Pair(1, 2)))]],
    ids=lambda held: type(held).__name__,
)  # fmt: skip
def test_a_forward_reads_a_container_of_a_class_of_its_own(held: Any) -> None:
    model, x = Stack(held), torch.randn(4, 8)
    assert compare_with_eager(capture(model, (x,)), model, (torch.randn(4, 8),), {}).same


@pytest.mark.parametrize("one, other", [(Irrep((2, 1)), Irrep((3, 1))), (Pair(2, 1), Pair(3, 1))])
def test_another_value_in_it_is_noticed(one: Any, other: Any) -> None:
    model, x = Stack(one), torch.randn(4, 8)
    pm: Any = autopar.parallelize(model, 1, (x,))
    before = float(pm(x))
    pm.held = other
    with pytest.raises(RunError, match="captured with other values"):
        pm(x)
    pm.held = one
    assert float(pm(x)) == before


def test_values_are_frozen_and_compared_without_their_methods() -> None:
    assert frozen(Irrep((1, 2))) == ("Irrep", 1, 2) and frozen(Table({1: 2})) == ("dict", (1, 2))
    assert items_in(Shut()) is None and items_in(3) is None
    assert says_the_same(Rows([1, 2]), Rows([1, 2])) and not says_the_same(Irrep((1,)), Irrep((2,)))
