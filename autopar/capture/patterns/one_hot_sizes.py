"""``F.one_hot(places, max(places.max() + 1, n))[..., :n]``: the first classes of a number that depends on data.

``one_hot`` refuses numbers that are too large, so code that wants zeros for them (places in an expert beyond its
capacity) makes enough classes and cuts off the rest. How many these are depends on data; what is left does not: it says
where ``places`` is 0, ..., n - 1. So in the files of a model ``max`` of a number of data and a plain one, in a function
that calls ``one_hot``, is a number that ``one_hot`` takes, and only a slice of known size can be taken of what it
makes. To anything else such a maximum is the larger of both, chosen by a branch that is checked at every call.
"""

from __future__ import annotations

import builtins
import functools
from inspect import isroutine
from typing import Any

import torch

from autopar.capture.branches.random_answers import site_of, users_frame
from autopar.capture.branches.unknown_numbers import Drawn
from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, Patch, builtin_replaced, register
from autopar.capture.trace.value_origins import depends_on_data
from autopar.errors import CaptureError
from autopar.torch_private import FakeTensor
from autopar.words.trees import PyTree


def _calls_one_hot(names: dict[str, Any]) -> bool:
    """Check that a file's functions may call ``one_hot`` at all."""
    classes = [cls for cls in names.values() if isinstance(cls, type)]
    functions = [f for f in (*names.values(), *(m for cls in classes for m in vars(cls).values())) if isroutine(f)]
    return any("one_hot" in f.__code__.co_names for f in functions if hasattr(f, "__code__"))


def _larger(*args: PyTree, **kwargs: PyTree) -> PyTree:
    """Compute ``max``, with the same parameters."""
    if len(args) != 2 or kwargs:
        return builtins.max(*args, **kwargs)
    of_data = [x for x in args if _is_of_data(x)]
    frame = users_frame()
    in_hot = frame is not None and "one_hot" in frame.f_code.co_names
    if len(of_data) != 1 or not in_hot or not any(isinstance(x, int) for x in args):
        return builtins.max(*args)
    return Classes(args)


def _is_of_data(x: object) -> bool:
    if isinstance(x, Drawn):
        return True
    return isinstance(x, FakeTensor) and x.numel() == 1 and not x.is_floating_point() and depends_on_data(x)


class Classes:
    """A number of classes: the larger of two numbers, one of which depends on data."""

    def __init__(self, numbers: tuple[Any, ...]) -> None:
        self._numbers = numbers

    @functools.cached_property
    def _chosen(self) -> Any:
        """The number that a branch chooses, for everything that is not ``one_hot``."""
        return builtins.max(*self._numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen, name)

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        def plain(x: object) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(plain, x))
            return x._chosen if isinstance(x, Classes) else x

        return func(*plain(args), **{name: plain(x) for name, x in (kwargs or {}).items()})


def _of_chosen(name: str) -> Any:
    def method(self: Classes, *args: PyTree) -> PyTree:
        others = [x._chosen if isinstance(x, Classes) else x for x in args]
        return getattr(self._chosen, name)(*others)

    return method


for _name in ("__index__", "__int__", "__float__", "__bool__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
              "__rmul__", "__floordiv__", "__truediv__", "__mod__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__",
              "__ne__"):  # fmt: skip
    setattr(Classes, _name, _of_chosen(_name))


class Hot:
    """``one_hot`` of a number of classes that is not known: a slice of its first classes can be taken."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    def __getitem__(self, index: PyTree) -> torch.Tensor:
        last = index[-1] if isinstance(index, tuple) and index and index[0] is Ellipsis and len(index) == 2 else None
        known = isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
        if not known or not isinstance(last.stop, int) or last.stop < 0:  # type: ignore[union-attr]
            raise _refused()
        classes = torch.arange(last.stop, device=self._numbers.device)  # type: ignore[union-attr]
        return (self._numbers.unsqueeze(-1) == classes).to(torch.int64)

    def __getattr__(self, name: str) -> Any:
        raise _refused()

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        raise _refused()


def _hot(_func: Function, args: Args, kwargs: Kwargs) -> PyTree:
    """Return ``one_hot`` for a number of classes that follows from data."""
    given = dict(zip(("tensor", "num_classes"), args, strict=False)) | kwargs
    classes = given.get("num_classes", -1)
    return Hot(given["tensor"]) if isinstance(classes, Classes) or _is_of_data(classes) else PASS


def _refused() -> CaptureError:
    return CaptureError(
        "one_hot is given a number of classes that depends on data, and more is done with what it makes than to take "
        f"the first ones, at {site_of().partition('@')[0]}\n  take as many as there can be (F.one_hot(x, n)[..., :m]), "
        "or compare with a range: (x.unsqueeze(-1) == torch.arange(m))"
    )


register(
    Patch(
        "max of sizes", "``max(places.max() + 1, n)`` is a number of classes that depends on data",
        lambda record: builtin_replaced(record.module, "max", _larger, _calls_one_hot),
    ),
    Handler(
        "one-hot sizes", "of a number of classes that depends on data the first ones are known",
        lambda _record: _hot, (torch.nn.functional.one_hot,), before=("grouped rows",),
    ),
)  # fmt: skip
