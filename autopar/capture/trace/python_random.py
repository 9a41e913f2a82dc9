"""Numbers that a forward draws one at a time from Python's and numpy's shared generators are drawn by torch.

``if random.random() < self.layer_drop: continue`` is how many models leave out layers or condition on themselves. A
program that was traced past such a call would have the number of the trace for ever. A uniform number or integer that
torch draws is one of the same distribution, and is part of the program: drawn anew at every step, alike on all ranks.
What else these generators give (choices, arrays, normal numbers) is refused.

A generator that the forward makes itself, ``random.Random(seed)``, gives numbers that follow from its seed. Where that
is a number which is not known while a model is traced, such as one that torch draws, so are they, and an operator
computes them (:mod:`autopar.rules.families.seeded_number`). One that is made without a seed is drawn by torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from autopar.capture.branches.unknown_numbers import Drawn
from autopar.capture.python.user_lines import is_users, user_line
from autopar.capture.trace.patches import Function
from autopar.capture.trace.recording import now, refuse
from autopar.rules.families.seeded_number import GENERATORS, Draw, number_drawn, original
from autopar.words.trees import PyTree

_NAMES = ("random", "uniform", "rand", "random_sample", "sample", "ranf", "randint", "randrange", "Random",
          "RandomState", "default_rng")  # fmt: skip
"""How modules call such functions, their own and those that they were imported into."""
_OF_ANY_SIZE = ("random", "random_sample", "sample", "ranf")
"""Numpy's names for one function, whose argument is a size."""


def _drawn_and_noted(drawn: torch.Tensor) -> Any:
    """Return a number that torch has drawn, or in a trace its stand-in, and note it."""
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
    drawn = _drawn_and_noted(torch.rand((), dtype=torch.float64, device="cpu"))
    return drawn if (low, high) == (0.0, 1.0) else low + (high - low) * drawn


def _integer(low: Any, high: Any = None, *more: Any, **kwargs: PyTree) -> PyTree:
    if more or kwargs or not all(isinstance(x, int) for x in (low, high) if x is not None):
        return None
    begin, end = (0, low) if high is None else (low, high)
    return _drawn_and_noted(torch.randint(begin, end, (), device="cpu"))


def _drawing() -> list[tuple[Any, Function]]:
    """Return functions of Python and numpy that draw one number, and the same by torch: None if it is not one."""
    functions: list[tuple[Any, Function]] = [
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


class _Generator:
    """A stand-in for a generator that a forward makes, while its model is traced."""

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._draw, method)

    def _draw(self, method: str, *args: PyTree, **kwargs: PyTree) -> PyTree:
        raise NotImplementedError


class _Seeded(_Generator):
    """One with a seed that is not known yet."""

    def __init__(self, name: str, seed: torch.Tensor) -> None:
        self.name, self.seed, self.draws = name, seed, list[Draw]()

    def _draw(self, method: str, *args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            ast.literal_eval(repr((args, kwargs)))  # plain numbers, and containers of such
            draws = [*self.draws, (method, args, kwargs)]
            number_drawn(0, self.name, draws)
        except (SyntaxError, TypeError, ValueError) as error:
            raise refuse(
                f"{method}() of a {self.name} that is seeded with a tensor ({error}),",
                "draw single numbers from it (random(), uniform(), randrange()), or draw with torch",
            ) from None
        self.draws = draws
        return torch.ops.autopar.seeded_number(self.seed, self.name, repr(draws)).item()


class _Unseeded(_Generator):
    """One without a seed, which is another one at every call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _draw(self, method: str, *args: PyTree, **kwargs: PyTree) -> PyTree:
        by_torch = _OF_GENERATORS.get(method)
        drawn = by_torch(*args, **kwargs) if by_torch is not None else None
        if drawn is None:
            raise refuse(
                f"{method}() of a {self.name} that is made in forward without a seed,",
                "draw single numbers from it (random(), uniform(), randrange()), or draw with torch",
            )
        return drawn


def _integers(low: object, high: object = None, *more: object, endpoint: bool = False, **kwargs: PyTree) -> PyTree:
    begin, end = (0, low) if high is None else (low, high)
    return _integer(begin, end + endpoint, *more, **kwargs) if isinstance(end, int) else None


_OF_GENERATORS: dict[str, Function] = {
    "random": lambda size=None: _number(size=size), "uniform": _number, "randrange": _integer, "integers": _integers,
    "rand": lambda *shape: None if shape else _number(), "random_sample": lambda size=None: _number(size=size),
}  # fmt: skip
"""Methods of generators of Python's and numpy's that draw one number, and the same by torch; ``randint`` has another
end in either."""


class _Stand(type):
    """The type of what stands in the place of a class of generators: their instances are its own."""

    original: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __call__(cls, *args: PyTree, **kwargs: PyTree) -> PyTree:
        made = _generator(cls.original, *args, **kwargs) if is_users(sys._getframe(1).f_code.co_filename) else None
        return cls.original(*args, **kwargs) if made is None else made


def _generator(make: object, *args: PyTree, **kwargs: PyTree) -> _Generator | None:
    """Return ``make(*args, **kwargs)``, where it has no seed, or an unknown one; else None."""
    name = next(n for n in GENERATORS if original(n) is make)
    seed = next(iter((*args, *kwargs.values())), None)
    if seed is None:
        return _Unseeded(name)
    if isinstance(seed, torch.Tensor) and seed.numel() == 1:
        seed = seed.item()
    return _Seeded(name, seed.tensor) if isinstance(seed, Drawn) else None


def _makers() -> list[tuple[Any, Any]]:
    """Return the classes and functions that make generators, each with its substitute."""
    names = [name for name in GENERATORS if name.partition(".")[0] in sys.modules]
    return [(make, _stand_in(make)) for make in map(original, names)]


def _stand_in(make: object) -> Any:
    if isinstance(make, type):
        return _Stand(make.__name__, (make,), {"original": make})
    return _instead(make, functools.partial(_generator, make))


def _instead(function: Any, by_torch: Function) -> Function:
    def draw(*args: PyTree, **kwargs: PyTree) -> PyTree:
        drawn = by_torch(*args, **kwargs) if is_users(sys._getframe(1).f_code.co_filename) else None
        return function(*args, **kwargs) if drawn is None else drawn

    return draw


@contextlib.contextmanager
def drawn_by_torch() -> Iterator[None]:
    """Let code of the user that draws a number draw it with torch."""
    functions = {id(function): (function, _instead(function, by_torch)) for function, by_torch in _drawing()}
    functions |= {id(make): (make, stand) for make, stand in _makers()}
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
