"""Patches of a trace: records of what is exchanged while a model's code runs, and one dispatcher of torch's functions.

A :class:`Patch` is a context manager with a name and a reason. A :class:`Handler` takes the place of functions of
torch; all handlers are called by one function mode, :class:`Dispatcher`. The core's are listed, in their order, in
:mod:`autopar.capture.trace.contexts`; each file of :mod:`autopar.capture.patterns` registers its own here.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.trace.recording import Recording
from autopar.words.trees import PyTree

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handle = Callable[[Function, Args, Kwargs], PyTree]
"""Gives the result of a call of a function of torch, or :data:`PASS`."""
PASS: Any = object()
"""The answer of a handler that leaves a call to the next one."""
_HERE = "autopar.capture."


class Phase(enum.Flag):
    """Times at which the code of a model runs."""

    TRACE = enum.auto()
    OBSERVE = enum.auto()
    """The model runs on the values of its example, so that its branches on data have answers."""
    COMPARE = enum.auto()
    """The model runs next to its graph, on a device other than CUDA."""


@dataclass(frozen=True)
class Patch:
    """A change of torch, of a library or of the user's files, for the time of a trace.

    Attributes:
        name: unique among the patches.
        reason: why it is needed, in one sentence.
        enter: makes the context manager; it is given the recording of a trace, and the traced module or None if a
            model only runs.
        phases: the phases in which it is entered.
    """

    name: str
    reason: str
    enter: Callable[[Any], AbstractContextManager[object]]
    phases: Phase = Phase.TRACE


@dataclass(frozen=True)
class Handler:
    """A substitute for functions of torch, for the time of a trace.

    Attributes:
        name: unique among the handlers.
        reason: why it is needed, in one sentence.
        make: makes the function that handles calls in one trace; None if this trace needs none.
        functions: the functions that it handles; None for all, which costs time in every call.
        before: names of handlers that are asked only after this one.
        nested: the functions that it calls come to itself, too.
    """

    name: str
    reason: str
    make: Callable[[Recording], Handle | None]
    functions: Collection[Function] | None = None
    before: tuple[str, ...] = ()
    nested: bool = False


PATCHES: dict[str, Patch] = {}
HANDLERS: dict[str, Handler] = {}
"""Handlers of patterns, by name."""


def register(*entries: Patch | Handler) -> None:
    """Add the patches and handlers of a pattern."""
    for entry in entries:
        table: dict[str, Any] = PATCHES if isinstance(entry, Patch) else HANDLERS
        assert entry.name not in table, f"two patterns register '{entry.name}'"
        table[entry.name] = entry


def in_order(handlers: Sequence[Handler]) -> list[Handler]:
    """Sort handlers by their ``before``; apart from that they stay in their order."""
    ordered: list[Handler] = []
    todo = list(handlers)
    while todo:
        names = [h.name for h in todo]
        first = next((h for h in todo if not any(h.name in other.before for other in todo)), None)
        assert first is not None, f"handlers that are before each other: {', '.join(names)}"
        todo.remove(first)
        ordered.append(first)
    return ordered


class Dispatcher(TorchFunctionMode):
    """The function mode of a trace: asks the handlers of a function in their order.

    What a handler calls comes to the handlers behind it.
    """

    def __init__(self, handlers: Sequence[Handler], record: Recording) -> None:
        super().__init__()
        made = [(handler, handle) for handler in handlers if (handle := handler.make(record)) is not None]
        self._handlers = made
        self._of_all = tuple(i for i, (handler, _) in enumerate(made) if handler.functions is None)
        self._by_function: dict[Function, tuple[int, ...]] = {}
        for i, (handler, _) in enumerate(made):
            for function in handler.functions or ():
                self._by_function[function] = (*self._by_function.get(function, ()), i)
        for function, places in self._by_function.items():
            self._by_function[function] = tuple(sorted({*places, *self._of_all}))
        self._first = 0
        """The first handler that is asked: those before it are at work."""

    def __torch_function__(
        self, func: Function, types: Collection[type], args: tuple[PyTree, ...] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> Any:  # fmt: skip
        given, first = dict(kwargs or {}), self._first
        for i in self._by_function.get(func, self._of_all):
            if i < first:
                continue
            handler, handle = self._handlers[i]
            self._first = i if handler.nested else i + 1
            try:
                with self:
                    result = handle(func, args, given)
            finally:
                self._first = first
            if result is not PASS:
                return result
        return func(*args, **given)


_LIBRARIES = ("torch", "transformers", "builtins")


@contextmanager
def builtin_replaced(
    module: torch.nn.Module, name: str, by: Function, where: Callable[[dict[str, Any]], bool] = lambda _names: True
) -> Iterator[None]:
    """Give the files of a module's parts another builtin function; those that have one of that name keep it.

    ``where``: which files, by their globals.
    """
    files = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    users = [vars(sys.modules[f]) for f in files if f.partition(".")[0] not in _LIBRARIES and f in sys.modules]
    changed = [names for names in users if name not in names and where(names)]
    for names in changed:
        names[name] = by
    try:
        yield
    finally:
        for names in changed:
            names.pop(name, None)


def calling_frame() -> FrameType:
    """Return the frame whose call of torch a handler is asked about."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__", "").startswith(_HERE)
    ):
        frame = frame.f_back
    return frame
