"""Random numbers of torch that a program cannot draw as the model does: by a seed or a generator of the forward's own.

A program draws from one seed and a counter, alike on all ranks and on any mesh. A forward that seeds torch has the same
numbers at every call, and a generator goes on where its last call ended; a program would do neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from autopar.capture.trace.patches import PASS, Args, Function, Kwargs
from autopar.capture.trace.recording import now, refuse
from autopar.words.trees import PyTree

_SEEDING = ((torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed"), (torch.random, "seed"))


def own_generators_refused(func: Function, args: Args, kwargs: Kwargs) -> PyTree:
    """Refuse draws from a ``torch.Generator``, and write ``random_`` as ``randint``."""
    if isinstance(kwargs.get("generator"), torch.Generator) and now() is not None:
        raise refuse(
            f"{getattr(func, '__name__', 'a draw')} with a torch.Generator inside a forward: a program has a seed of "
            "its own and would not go on where the generator is,",
            "draw without generator=, or draw before the call and pass a tensor",
        )
    if func is torch.Tensor.random_ and (len(args) == 3 or "from" in kwargs) and now() is not None:
        return _integers_over(*args, **kwargs)
    return PASS


def _integers_over(x: torch.Tensor, *args: PyTree, **kwargs: PyTree) -> torch.Tensor:
    """Compute ``x.random_(from, to)`` by ``randint``, which draws the same.

    ``torch.export`` cannot write down an operator whose overload has the name of a keyword of Python's.
    """
    low, high = args if len(args) == 2 else (kwargs["from"], kwargs["to"])
    return x.copy_(torch.randint(low, high, x.shape, dtype=x.dtype, device=x.device))


@contextlib.contextmanager
def own_seeds_refused() -> Iterator[None]:
    """Refuse to seed torch's generator while a trace runs."""
    with contextlib.ExitStack() as stack:
        for place, name in _SEEDING:
            stack.enter_context(mock.patch.object(place, name, _refusing(name, getattr(place, name))))
        yield


def _refusing(name: str, seed: Function) -> Function:
    def seeding(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if now() is None:
            return seed(*args, **kwargs)
        raise refuse(
            f"torch.{name} inside a forward: a program has a seed of its own and draws other numbers at every step,",
            "seed before training; for numbers that stay, draw them once and keep them in a buffer (register_buffer)",
        )

    return seeding
