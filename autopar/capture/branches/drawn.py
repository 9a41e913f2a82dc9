"""What ``tensor.item()`` gives for a random number while a model is traced: a number that is not known yet.

It can be computed with and compared, as Python computes with floats and integers (in double precision), and tensors can
be multiplied with it and so on. Who needs its digits (``int()``, ``range()``, a list's index) is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.branches.asking import ask, refused


class Drawn:
    """A random number of a program: a tensor without dims, of float64, int64 or bool."""

    def __init__(self, tensor: torch.Tensor) -> None:
        wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.tensor = tensor.reshape(()).to(wide if wide in (torch.float64, torch.bool) else torch.int64)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_tensor, args), **{k: _tensor(v) for k, v in (kwargs or {}).items()})

    def __bool__(self) -> bool:
        return ask(self.tensor)

    def __hash__(self) -> int:
        raise refused("as a key")

    def __eq__(self, other: object) -> Any:
        return Drawn(self.tensor == _tensor(other)) if _is_number(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return Drawn(self.tensor != _tensor(other)) if _is_number(other) else NotImplemented

    def __repr__(self) -> str:
        return "<a random number>"


def _tensor(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_tensor, value))
    return value.tensor if isinstance(value, Drawn) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (Drawn, int, float))


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def compute(self: Drawn, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(self.tensor, other)
        return Drawn(function(self.tensor, _tensor(other))) if _is_number(other) else NotImplemented

    return compute


def _swapped(function: Callable[[Any, Any], Any]) -> Any:
    def compute(self: Drawn, other: Any) -> Any:
        return Drawn(function(other, self.tensor)) if _is_number(other) else NotImplemented

    return compute


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: Drawn(function(self.tensor))


def _refusing(what: str) -> Any:
    def wanted(self: Drawn, *args: Any) -> Any:
        raise refused(what)

    return wanted


for _name in ("lt", "le", "gt", "ge"):
    setattr(Drawn, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Drawn, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(Drawn, f"__r{_name}__", _swapped(getattr(operator, _name)))
for _name in ("neg", "abs", "pos"):
    setattr(Drawn, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _what in (
    ("int", "as an int"), ("float", "as a float"), ("index", "as an index or a size"), ("round", "rounded"),
    ("floor", "rounded"), ("ceil", "rounded"), ("trunc", "rounded"), ("format", "as text"), ("str", "as text"),
):  # fmt: skip
    setattr(Drawn, f"__{_name}__", _refusing(_what))


__all__ = ["Drawn"]
