"""Random numbers outside torch: a program that was traced past them draws the same ones for ever."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from autopar.capture.python.user_lines import is_users
from autopar.errors import CaptureError


def is_generator(value: object) -> bool:
    """Check that a value is a generator of Python's or numpy's random numbers."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[Any, ...] = (random.Random,)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


def state_of(generator: Any) -> Any:
    """Return a state that tells whether a generator was drawn from."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set a generator back."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def same_state(a: Any, b: Any) -> bool:
    """Check that a generator was not drawn from between two states."""
    if isinstance(a, dict):
        return all(same_state(v, b[k]) for k, v in a.items())
    if isinstance(a, tuple) and len(a) < 10:
        return all(map(same_state, a, b))
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)


State = tuple[str, Callable[[], Any], Any, Callable[[Any], Any]]


class WatchedGenerators:
    """The generators that a trace may draw from: ``(name, read its state, its first state, set it)`` of each."""

    def __init__(self) -> None:
        self.all: list[State] = []
        self.known: set[int] = set()

    def begin(self, from_outside: Iterable[tuple[str, Any, Any]]) -> None:
        """Watch the generators that modules share, and names, generators and states of those that code names."""
        self.all.append(("random", random.getstate, random.getstate(), random.setstate))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy_random = numpy.random
            self.all.append(("numpy.random", numpy_random.get_state, numpy_random.get_state(), numpy_random.set_state))
        for label, generator, state in from_outside:
            self._watch(label, generator, state)

    def note(self, generator: Any, label: str) -> None:
        """Watch a generator that hangs on a module, from the first read on."""
        if id(generator) not in self.known:
            self.known.add(id(generator))
            self._watch(label, generator, state_of(generator))

    def _watch(self, label: str, generator: Any, state: Any) -> None:
        get, put = functools.partial(state_of, generator), functools.partial(set_state, generator)
        self.all.append((label, get, state, put))

    def drew(self) -> list[str]:
        """Return the generators that the trace drew from."""
        return [name for name, get, state, _ in self.all if not same_state(get(), state)]

    def states(self) -> tuple[Any, ...]:
        """Return the states of the generators, which tell whether any is drawn from."""
        return tuple(get() for _, get, _, _ in self.all)

    def set_back(self) -> None:
        """Give the generators the states that they had."""
        for _, _, state, put in reversed(self.all):  # of one that is watched twice, the earlier state
            put(state)


def draw_place(trace: Callable[[], Any], states: Callable[[], Any]) -> str:
    """Return ``file.py:12`` of the first of the user's lines that changes the generators; empty if none does.

    It traces once more and looks after every line, which is slow: only for a message.
    """
    places: list[str] = []
    last = states()

    def line(frame: FrameType, _event: str, _: object, at: list[str]) -> Any:
        if not places and not same_state(last, states()):
            places.append(at[0])
        at[0] = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        return None if places else functools.partial(line, at=at)

    def call(frame: Any, _event: str, _: object) -> Any:
        if places or not is_users(frame.f_code.co_filename):
            return None
        if not same_state(last, states()):  # before this function was called: in a line that runs, or in none we see
            while (frame := frame.f_back) is not None and frame.f_trace is None:
                pass
            places.append("" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
            return None
        return functools.partial(line, at=[f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"])

    before = sys.gettrace()
    sys.settrace(call)
    try:
        with contextlib.suppress(CaptureError):
            trace()
    finally:
        sys.settrace(before)
    return places[0] if places else ""
