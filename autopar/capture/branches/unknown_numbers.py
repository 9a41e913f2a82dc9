"""Numbers that are not known yet: ``tensor.item()`` of a random number while a model is traced.

It can be computed with and compared, as Python computes with floats and integers (in double precision), and tensors can
be multiplied with it and so on. Who needs its digits (``int()``, ``range()``, a list's index) is refused.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.capture.branches.random_answers import ask, refused
from autopar.errors import CaptureError
from autopar.torch_private import CHECK
from autopar.words.trees import PyTree


class Drawn:
    """A random number of a program: a tensor without dims, of float64, int64 or bool.

    Args:
        asks: gives the truth of a tensor without dims.
    """

    refusal: Callable[[str], CaptureError] = staticmethod(refused)
    """The error where its digits are wanted."""

    def __init__(self, tensor: torch.Tensor, asks: Callable[[torch.Tensor], bool] = ask) -> None:
        self.asks = asks
        wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
        tensor = tensor.detach() if tensor.requires_grad else tensor
        self.tensor = tensor.reshape(()).to(wide if wide in (torch.float64, torch.bool) else torch.int64)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        return func(*map(_tensor, args), **{k: _tensor(v) for k, v in (kwargs or {}).items()})

    def __bool__(self) -> bool:
        return self.asks(self.tensor)

    def like(self, tensor: torch.Tensor) -> Drawn:
        """Return another number that follows from this one."""
        return type(self)(tensor, self.asks)

    def __hash__(self) -> int:
        raise self.refusal("as a key")

    def __eq__(self, other: object) -> Any:
        return self.like(self.tensor == _tensor(other)) if _is_number(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self.like(self.tensor != _tensor(other)) if _is_number(other) else NotImplemented

    def __repr__(self) -> str:
        return "<a random number>"


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Let ``torch._check`` ask numbers that are not known yet."""
    check_with = CHECK.get()

    def asking(error_type: object, cond: object, message: object) -> None:
        check_with(error_type, bool(cond) if isinstance(cond, Drawn) else cond, message)

    with CHECK.replaced(asking):
        yield


def _tensor(value: object) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_tensor, value))
    return value.tensor if isinstance(value, Drawn) else value


def _is_number(value: object) -> bool:
    return isinstance(value, (Drawn, int, float))


_WITH_SIZE = "together with a size that depends on values too"


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def compute(self: Drawn, other: object) -> Any:
        if isinstance(other, torch.SymInt):
            raise self.refusal(_WITH_SIZE)
        if isinstance(other, torch.Tensor):
            return function(self.tensor, other)
        return self.like(function(self.tensor, _tensor(other))) if _is_number(other) else NotImplemented

    return compute


def _swapped(function: Callable[[Any, Any], Any]) -> Any:
    def compute(self: Drawn, other: object) -> Any:
        if isinstance(other, torch.SymInt):
            raise self.refusal(_WITH_SIZE)
        return self.like(function(other, self.tensor)) if _is_number(other) else NotImplemented

    return compute


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: self.like(function(self.tensor))


def _refusing(what: str) -> Any:
    def wanted(self: Drawn, *_args: PyTree) -> PyTree:
        raise self.refusal(what)

    return wanted


for _name in ("lt", "le", "gt", "ge"):
    setattr(Drawn, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Drawn, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(Drawn, f"__r{_name}__", _swapped(getattr(operator, _name)))
for _name in ("neg", "abs", "pos"):
    setattr(Drawn, f"__{_name}__", _unary(getattr(operator, _name)))
DIGITS = {
    "__int__": "as an int", "__float__": "as a float", "__index__": "as an index or a size", "__round__": "rounded",
    "__floor__": "rounded", "__ceil__": "rounded", "__trunc__": "rounded", "__format__": "as text",
    "__str__": "as text",
}  # fmt: skip
"""What of a number needs its digits, and what for."""
for _name, _what in DIGITS.items():
    setattr(Drawn, _name, _refusing(_what))
