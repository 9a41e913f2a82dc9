"""Globals and free variables that the model's code names: what its ``forward`` reads without an attribute.

Python notifies nobody of such a read, so the code itself is looked at: ``forward`` of each module, the loss
function, and the functions and methods of the user that they name. Only the user's own files count.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.python.bytecode import uses_in
from autopar.capture.python.frozen_values import frozen
from autopar.capture.python.generators import is_generator, state_of
from autopar.capture.python.guards import ReadValue
from autopar.capture.python.user_lines import is_own
from autopar.words.trees import PyTree


@dataclass
class Free:
    """One value: ``place`` is the dict of a module's globals, or a cell."""

    place: Any
    read: ReadValue
    value: PyTree
    state: Any = None

    def now(self) -> Any:
        """Return the present value."""
        if self.read.kind == "global":
            return self.place.get(self.read.name)
        return self.place.cell_contents

    def restore(self) -> None:
        """Give the global, or the cell, the value that it had."""
        if self.read.kind == "global":
            self.place[self.read.name] = self.value
        else:
            self.place.cell_contents = self.value


GRADIENT_MODE = "is_grad_enabled"
_CHOSEN = types.FunctionType | types.MethodType | functools.partial
"""Types of an activation that was chosen, or of another forward."""


def free_values(
    modules: Sequence[torch.nn.Module], functions: Sequence[object] = (), of_gradient_mode: list[str] | None = None
) -> list[Free]:
    """Return the plain values, and the objects, that the code of ``modules`` and ``functions`` takes from outside.

    ``of_gradient_mode``: gets the names and places of functions that ask ``torch.is_grad_enabled()``.
    """
    values: dict[tuple[int, str], Free] = {}
    seen: set[tuple[int, type | None]] = set()
    todo = list(_called_first(modules, functions))
    while todo:
        function, owner = todo.pop()
        if (id(function.__code__), owner) in seen or not is_own(function.__code__.co_filename):
            continue
        seen.add((id(function.__code__), owner))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet given
                continue
            todo.extend((f, owner) for f in _functions(value))
            _keep(values, cell, "cell_contents", value, f"variable '{name}' of {function.__qualname__}", "cell")
        file = os.path.basename(function.__code__.co_filename)
        for code in _codes(function.__code__):
            names, attributes, *_ = uses_in(code)
            if of_gradient_mode is not None and GRADIENT_MODE in names | attributes:
                of_gradient_mode.append(f"{function.__qualname__} ({file}:{code.co_firstlineno})")
            for name in names:
                if name not in function.__globals__:
                    continue
                value = function.__globals__[name]
                todo.extend((f, None) for f in _functions(value))
                if isinstance(value, types.ModuleType) and is_own(getattr(value, "__file__", None) or "<"):
                    for attribute in attributes & vars(value).keys():
                        inner = vars(value)[attribute]
                        todo.extend((f, None) for f in _functions(inner))
                        _keep(values, vars(value), attribute, inner, os.path.basename(value.__file__ or ""), "global")
                else:
                    _keep(values, function.__globals__, name, value, file, "global")
            for name in attributes if owner is not None else ():
                todo.extend((f, owner) for f in _functions(inspect.getattr_static(owner, name, None)))
    return list(values.values())


def _called_first(
    modules: Sequence[torch.nn.Module], functions: Sequence[object]
) -> Iterator[tuple[types.FunctionType, type | None]]:
    for kind in dict.fromkeys(type(module) for module in modules):
        yield from ((f, kind) for f in _functions(kind.forward))
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, _CHOSEN):
                yield from ((f, type(module)) for f in _functions(value))
    for function in functions:
        yield from ((f, None) for f in _functions(function))


def _keep(values: dict[tuple[int, str], Free], place: object, name: str, value: object, path: str, kind: str) -> None:
    if isinstance(value, types.FunctionType | type | types.BuiltinFunctionType | types.ModuleType):
        return
    state = state_of(value) if is_generator(value) else None
    frozen_value = frozen(value)
    values.setdefault((id(place), name), Free(place, ReadValue(path, name, frozen_value, kind=kind), value, state))


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield the Python functions behind a callable, with those that decorators have wrapped."""
    while value is not None:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.FunctionType):
            yield value
            value = value.__dict__.get("__wrapped__")
        else:
            return


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)
