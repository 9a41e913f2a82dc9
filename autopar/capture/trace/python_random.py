"""Numbers that a forward draws one at a time from Python's and numpy's shared generators are drawn by torch.

``if random.random() < self.layer_drop: continue`` is how many models leave out layers or condition on themselves. A
program that was traced past such a call would have the number of the trace for ever. A uniform number or integer that
torch draws is one of the same distribution, and is part of the program: drawn anew at every step, alike on all ranks.
What else these generators give (choices, arrays, normal numbers) is refused.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.capture.python.user_lines import is_users, user_line
from autopar.capture.trace.recording import now

_NAMES = ("random", "uniform", "rand", "random_sample", "sample", "ranf", "randint", "randrange")
"""How modules call such functions, their own and those that they were imported into."""
_OF_ANY_SIZE = ("random", "random_sample", "sample", "ranf")
"""Numpy's names for one function, whose argument is a size."""


def _told(drawn: torch.Tensor) -> Any:
    """A number that torch has drawn: one of Python's, or while a model is traced what stands for one."""
    recording = now()
    if recording is not None:
        recording.notes[
            f"forward draws from random or numpy.random at {user_line(sys._getframe(1))}: the program draws these "
            "numbers with torch, of the same distribution and alike on all ranks; torch.manual_seed seeds them"
        ] = None
    return drawn.item()


def _number(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
    if size is not None or not all(isinstance(x, (int, float)) for x in (low, high)):
        return None
    drawn = _told(torch.rand((), dtype=torch.float64, device="cpu"))
    return drawn if (low, high) == (0.0, 1.0) else low + (high - low) * drawn


def _integer(low: Any, high: Any = None, *more: Any, **kwargs: Any) -> Any:
    if more or kwargs or not all(isinstance(x, int) for x in (low, high) if x is not None):
        return None
    begin, end = (0, low) if high is None else (low, high)
    return _told(torch.randint(begin, end, (), device="cpu"))


def _drawing() -> list[tuple[Any, Callable[..., Any]]]:
    """Functions of Python and numpy that draw one number, and the same by torch: None where it is something else."""
    functions: list[tuple[Any, Callable[..., Any]]] = [
        (random.random, _number), (random.uniform, _number), (random.randrange, _integer),
        (random.randint, lambda a, b: _integer(a, b + 1)),
    ]  # fmt: skip
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        of_numpy = numpy.random
        functions += [
            (of_numpy.rand, lambda *shape: None if shape else _number()),
            (of_numpy.uniform, _number), (of_numpy.randint, _integer),
            *((getattr(of_numpy, n), lambda size=None: _number(size=size)) for n in _NAMES if n in _OF_ANY_SIZE),
        ]  # fmt: skip
    return functions


def _instead(function: Any, by_torch: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        drawn = by_torch(*args, **kwargs) if is_users(sys._getframe(1).f_code.co_filename) else None
        return function(*args, **kwargs) if drawn is None else drawn

    return draw


@contextlib.contextmanager
def drawn_by_torch() -> Iterator[None]:
    """In here code of the user that draws a number draws it with torch."""
    functions = {id(function): (function, _instead(function, by_torch)) for function, by_torch in _drawing()}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        held = vars(module) if isinstance(module, types.ModuleType) else {}
        if held.keys().isdisjoint(_NAMES):  # nearly all of thousands of modules
            continue
        replaced += [(held, name, held[name]) for name in _NAMES if id(held.get(name)) in functions]
    try:
        for held, name, function in replaced:
            held[name] = functions[id(function)][1]
        yield
    finally:
        for held, name, function in replaced:
            held[name] = function


__all__ = ["drawn_by_torch"]
