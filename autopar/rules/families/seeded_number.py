"""A number of a generator of Python's or numpy's that a forward seeds with a tensor: ``random.Random(seed).random()``.

The generator gives the same numbers for the same seed, so a number of it is a function of the seed and of the draws
before it. The operator makes the generator anew, draws these again, and gives the last one: those of eager mode.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.torch_private import LocalTensor

Draw = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of a generator, and its arguments: literals of Python's."""
GENERATORS = {
    "random.Random": lambda: random.Random,
    "numpy.random.RandomState": lambda: sys.modules["numpy"].random.RandomState,
    "numpy.random.default_rng": lambda: sys.modules["numpy"].random.default_rng,
}
"""By name, what makes a generator from a seed."""
_GENERATORS: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("seeded_number(Tensor seed, str generator, str draws) -> Tensor")


def number_drawn(seed: int | float, generator: str, draws: Sequence[Draw]) -> Any:
    """Return the last of some draws of a generator.

    Args:
        generator: one of :data:`GENERATORS`.

    Raises:
        TypeError: it is not a single number.
    """
    made = original(generator)(seed)
    drawn: Any = None
    for method, args, kwargs in draws:
        drawn = getattr(made, method)(*args, **kwargs)
    if hasattr(drawn, "item") and not getattr(drawn, "ndim", 0):  # a number of numpy's
        drawn = drawn.item()
    if not isinstance(drawn, (bool, int, float)):
        raise TypeError(f"{draws[-1][0]} of {generator} gives a {type(drawn).__name__}, which is no number")
    return drawn


def original(generator: str) -> Callable[..., Any]:
    """Return what makes the `generator` of numpy or Python, whatever stands in its place while a model is traced."""
    if generator not in _GENERATORS:
        _GENERATORS[generator] = GENERATORS[generator]()
    return _GENERATORS[generator]


def _seeded_number(seed: torch.Tensor, generator: str, draws: str) -> torch.Tensor:
    whole = next(iter(seed._local_tensors.values())) if isinstance(seed, LocalTensor) else seed
    drawn = number_drawn(whole.item(), generator, ast.literal_eval(draws))
    return torch.full((), drawn, dtype=_dtype(drawn), device=whole.device)


def _dtype(drawn: Any) -> torch.dtype:
    return torch.float64 if isinstance(drawn, float) else torch.int64


def _shape(seed: torch.Tensor, generator: str, draws: str) -> torch.Tensor:
    drawn = number_drawn(0, generator, ast.literal_eval(draws))
    return seed.new_empty((), dtype=_dtype(drawn))


_library.impl("seeded_number", _seeded_number, "CPU")
_library.impl("seeded_number", _seeded_number, "CUDA")
_library.impl("seeded_number", _shape, "Meta")

SEEDED_NUMBER = "autopar.seeded_number.default"


@rule(
    SEEDED_NUMBER,
    samples=[
        sample(T((), "int64", 9), "random.Random", repr([("randrange", (0, 3), {})])),
        sample(T((), "int64", 9), "random.Random", repr([("random", (), {}), ("uniform", (1, 2), {})])),
    ],
)
def seeded_number(call: Call) -> Rule:
    return Rule({}, ((),), ((),), "none", saves=())
