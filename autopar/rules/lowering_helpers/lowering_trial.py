"""Lowerings that run without values: without ranks in a trial, or as the last rank while their work is counted.

:mod:`.collective_helpers` and :mod:`.local_shard` ask which it is.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import spmd_types as spmd

TRIAL: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("trial", default=None)
"""Sizes of the axes in a trial; None if there are ranks."""


@contextlib.contextmanager
def trial(sizes: Mapping[str, int]) -> Iterator[None]:
    """Run lowerings without ranks, on tensors without values: collectives make tensors of the right shape.

    Args:
        sizes: the sizes of the axes.
    """
    token = TRIAL.set(sizes)
    try:
        yield
    finally:
        TRIAL.reset(token)


def in_trial() -> bool:
    """Check whether lowerings run without ranks now."""
    return TRIAL.get() is not None


class ToOther(NamedTuple):
    """A message of :func:`~.collective_helpers.permuted` on an axis.

    Attributes:
        beside: the call whose compute it runs beside, in its forward or its backward; None if that waits for it.
        times: how many messages like it are sent, where a lowering makes some of its equal steps only.
    """

    axis: str
    n_bytes: int
    beside: object = None
    backward: bool = False
    times: int = 1


class Begun(NamedTuple):
    """A collective that is begun, beside which others may compute until somebody waits for it.

    Attributes:
        passage: one object for that of the forward and that of its backward.
        trip: one object for all of an exchange there and back, in its chunks; ``chunks``: their number.
        home: the forward's is on the way back.
    """

    passage: object
    axis: str
    n_bytes: int
    backward: bool
    trip: object = None
    chunks: int = 1
    home: bool = False


class Counted:
    """The work of lowerings while :func:`as_last_rank` is entered.

    Args:
        flops_so_far: how many multiplications and additions were counted; None if nobody counts them.

    Attributes:
        messages: the messages that were sent, of which none arrives.
        begun: collectives that are waited for later, in the order in which they began.
        under_way: the passages for which nobody has waited yet.
        flops_left_out: FLOPs of steps that a lowering leaves out, because they are like one that it makes.
    """

    def __init__(self, flops_so_far: Callable[[], float] | None = None) -> None:
        self.flops_so_far = flops_so_far
        self.messages: list[ToOther] = []
        self.begun: list[Begun] = []
        self.under_way: set[object] = set()
        self.flops_left_out = 0.0
        self.times = 1

    @contextlib.contextmanager
    def standing_for(self, times: int) -> Iterator[None]:
        """Count what happens in this scope as often as ``times`` equal steps."""
        before = self.flops_so_far() if self.flops_so_far is not None else 0.0
        self.times = times
        yield
        self.times = 1
        if self.flops_so_far is not None:
            self.flops_left_out += (times - 1) * (self.flops_so_far() - before)


COUNTED: contextvars.ContextVar[Counted | None] = contextvars.ContextVar("counted", default=None)
"""The counter of what lowerings do; None if nothing counts."""


@contextlib.contextmanager
def as_last_rank(flops_so_far: Callable[[], float] | None = None) -> Iterator[Counted]:
    """Make lowerings do what the last rank does, which works most where a mask is causal.

    Of equal steps they make some, and say for how many these stand.
    """
    counted = Counted(flops_so_far)
    token = COUNTED.set(counted)
    try:
        yield counted
    finally:
        COUNTED.reset(token)


def makes_some_steps() -> bool:
    """Check whether a lowering may leave out steps equal to those it makes, since no values are read."""
    return TRIAL.get() is not None or COUNTED.get() is not None or spmd.is_type_checking()


def standing_for(times: int) -> contextlib.AbstractContextManager[None]:
    """Let one step of a lowering count for ``times`` of them in this scope."""
    counted = COUNTED.get()
    return contextlib.nullcontext() if counted is None or times == 1 else counted.standing_for(times)
