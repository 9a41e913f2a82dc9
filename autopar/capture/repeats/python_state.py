"""The Python state that a module's code can read or write, as values that can be compared.

Two instances of a block do the same only if what their code reads is the same: plain attributes of the block and of the
modules inside it, objects that these hold, and globals that their functions name. The same values taken before and
after a call tell whether the call wrote to any of them.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import functools
import itertools
import logging
import random
import sys
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.capture.python.frozen_values import items_in
from autopar.torch_private import OpOverload, OpOverloadPacket

OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""Entries of a module's ``__dict__`` that are no plain attributes."""

HOOKS = frozenset(k for k in torch.nn.Module().__dict__ if "hook" in k and k != "_is_full_backward_hook")
"""Entries of a module's ``__dict__`` that hold its hooks."""

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
           torch.memory_format, enum.Enum, range, slice, torch.Size)  # fmt: skip
_NAMES = (type, types.BuiltinFunctionType, types.ModuleType, types.MethodWrapperType, types.WrapperDescriptorType,
          types.MethodDescriptorType, types.GenericAlias, OpOverload, OpOverloadPacket,
          logging.Logger, property, staticmethod, classmethod)  # fmt: skip
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
DEPTH, LENGTH = 6, 4096


class Unknown(Exception):
    """A value whose state cannot be seen."""


class ByIdentity:
    """An object that is compared by identity, and kept alive so that its place is not taken by another."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def seen(value: Any, memo: dict[int, Any], depth: int = DEPTH, above: tuple[int, ...] = ()) -> Any:
    """``value`` as something that compares equal while nothing that can be reached from it has changed.

    Tensors, modules, functions and classes are themselves; containers and objects are what they hold.

    Args:
        memo: objects that were seen at the same moment; an empty dict at the first call.

    Raises:
        Unknown: the value may change in a way that cannot be seen, or holds too much.
    """
    kind: Any = type(value)
    if kind in (int, str, bool, type(None)):
        return (kind, value)
    sort = _sort(kind)
    if sort == "value":
        return (kind, repr(value))
    if sort == "same":
        return ByIdentity(value)
    if id(value) in above:
        return (kind, "again", above.index(id(value)))
    if depth == 0:
        raise Unknown(f"{kind.__name__} is nested too deeply")
    above = (*above, id(value))
    if sort == "function":
        cells = value.__closure__ or ()
        contents = tuple([seen(c.cell_contents, memo, depth - 1, above) for c in cells if _full(c)])
        return (ByIdentity(value.__code__), contents)
    if sort == "method":
        return (ByIdentity(value.__func__), seen(value.__self__, memo, depth - 1, above))
    if sort == "partial":
        parts = (value.func, value.args, value.keywords)
        return (kind, tuple([seen(part, memo, depth - 1, above) for part in parts]))
    if sort == "mapping":
        entries = tuple(
            [(seen(k, memo, depth - 1, above), seen(v, memo, depth - 1, above)) for k, v in _items_of(value)]
        )
        more = _fields(value, memo, depth, above) if hasattr(value, "__dict__") else ()
        return (kind, entries, more)
    if sort == "sequence":
        return (kind, tuple([seen(v, memo, depth - 1, above) for v in _items_of(value)]))
    if sort == "set":
        return (kind, frozenset(seen(v, memo, depth - 1, above) for v in _items_of(value)))
    if sort == "iterator":
        return (kind, repr(value))
    if sort == "opaque":
        return ByIdentity(value)
    if hasattr(value, "__dict__"):
        if id(value) not in memo:
            memo[id(value)] = (kind, _fields(value, memo, depth, above))
        return memo[id(value)]
    raise Unknown(f"{kind.__name__} does not show its state")


def _items_of(container: Any) -> list[Any]:
    """Return what a container holds, a mapping's pairs.

    Raises:
        Unknown: it holds too much, or does not show it.
    """
    items = list(container) if isinstance(container, collections.deque) else items_in(container)
    if items is None or len(items) > LENGTH:
        raise Unknown(f"{type(container).__name__} of {'unknown' if items is None else len(items)} entries")
    return items


@functools.lru_cache(maxsize=4096)
def _sort(kind: type) -> str:
    """How :func:`seen` sees values of a type. Asked of the type and not of each value: a value answers by its
    ``__class__``, which classes that look up attributes in their own way (configurations do) make dear."""
    if issubclass(kind, float) or issubclass(kind, _VALUES):
        return "value"
    if issubclass(kind, (torch.Tensor, torch.nn.Module)) or issubclass(kind, _NAMES):
        return "same"
    if issubclass(kind, types.FunctionType):
        return "function"
    if issubclass(kind, types.MethodType):
        return "method"
    if issubclass(kind, functools.partial):
        return "partial"
    if issubclass(kind, Mapping) and hasattr(kind, "__len__") and (kind is dict or hasattr(kind, "keys")):
        return "mapping"
    if issubclass(kind, (list, tuple, collections.deque)):
        return "sequence"
    if issubclass(kind, (set, frozenset)):
        return "set"
    if issubclass(kind, (itertools.count, itertools.repeat)):
        return "iterator"
    # a lock or a reference is itself; a memoized function gives what its function gives
    opaque = issubclass(kind, (*_LOCKS, functools._lru_cache_wrapper)) or kind.__module__ == "weakref"
    return "opaque" if opaque else "object"


def _fields(value: Any, memo: dict[int, Any], depth: int, above: tuple[int, ...]) -> Any:
    kind: Any = type(value)
    if _slots(kind):
        raise Unknown(f"{kind.__name__} has slots")
    return tuple([(k, seen(v, memo, depth - 1, above)) for k, v in vars(value).items()])


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> bool:
    return any(c.__dict__.get("__slots__") for c in kind.__mro__ if c.__module__ not in ("builtins", "abc", "typing"))


def _full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def plain(module: torch.nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    """What a module holds beside its parameters, buffers, children and hooks, by name, as :func:`seen`."""
    return {k: seen(v, memo) for k, v in module.__dict__.items() if k not in OWN and k not in HOOKS}


def hooked(module: torch.nn.Module) -> bool:
    """Whether code of others runs when the module is called."""
    return any(module.__dict__.get(k) for k in HOOKS) or "forward" in module.__dict__ or "__call__" in module.__dict__


# -- globals


LOOKS_INSIDE = frozenset({"__dict__", "vars", "__getattribute__", "__getstate__", "__reduce__", "deepcopy", "pickle"})
"""Names of what reads attributes of an object without naming them."""


_NOT_RUN = frozenset({"__repr__", "__str__", "__format__", "extra_repr", "_abc_impl"})


def named_state(classes: Iterable[type]) -> tuple[list[tuple[Any, str]], bool]:
    """State that the methods of some classes name, also through functions that they call.

    Functions of torch and of Python's own library are taken for what their names say.

    Returns:
        Globals, attributes of classes and modules, and variables of enclosing functions, each as something with
        ``get`` and a name; and whether some function looks into objects as a whole.
    """
    places: dict[tuple[int, str], tuple[Any, str]] = {}
    todo: list[Any] = []
    visited: set[int] = set()
    inside = False

    def of_class(kind: type) -> None:
        if id(kind) in visited:
            return
        visited.add(id(kind))
        for c in kind.__mro__:
            if _foreign(c.__module__):
                continue
            for name, value in vars(c).items():
                if name in _NOT_RUN or (issubclass(c, torch.nn.Module) and name == "__init__"):
                    continue
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
                    todo.append(function)
                elif not name.startswith("__") and not isinstance(value, _NAMES) and not hasattr(value, "__get__"):
                    places[id(c), name] = (vars(c), name)

    def used(where: Any, name: str, others: frozenset[str]) -> None:
        value = where.get(name)
        if isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
            todo.append(value)
        elif isinstance(value, type):
            of_class(value)
        elif isinstance(value, types.ModuleType):
            if not _foreign(value.__name__) and id(value) not in visited:
                visited.add(id(value))
                for attribute in others & vars(value).keys():
                    used(vars(value), attribute, frozenset())
        elif not isinstance(value, _NAMES):
            places[id(where), name] = (where, name)

    for kind in classes:
        of_class(kind)
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or id(function) in visited or _foreign(function.__module__):
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is not None and id(function) not in visited:
                visited.add(id(function))
                todo.append(wrapped)
            continue
        visited.add(id(function))
        names = _names(function.__code__)
        inside = inside or not names.isdisjoint(LOOKS_INSIDE)
        for cell in function.__closure__ or ():
            if _full(cell):
                used(_Cell(cell), "", frozenset())
        todo.append(getattr(function, "__wrapped__", None))
        for name in names & function.__globals__.keys():
            if not hasattr(builtins, name):
                used(function.__globals__, name, names)
    return list(places.values()), inside


class _Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def get(self, name: str) -> Any:
        return self.cell.cell_contents


_STDLIB = frozenset(sys.stdlib_module_names)


def _foreign(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in ("torch", "numpy", "autopar") or (top in _STDLIB and top != "__main__")


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))


def random_state() -> Any:
    """Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)


# -- structure


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tensor of a module, without its value."""

    kind: type
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def shape_of(tensor: torch.Tensor) -> Shape:
    """What code can see of a tensor without its value."""
    return Shape(
        type(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad
    )


class Structures:
    """Numbers for modules: two have the same if they are built alike, whatever their plain attributes are."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.known: dict[int, int | None] = {}

    def __call__(self, module: torch.nn.Module) -> int | None:
        """The number of a module; None where it, or one inside it, has hooks or tensors that cannot be described."""
        if id(module) not in self.known:
            self.known[id(module)] = None  # a module inside itself is like no other
            self.known[id(module)] = self._number(module)
        return self.known[id(module)]

    def _number(self, module: torch.nn.Module) -> int | None:
        children = tuple([(n, None if m is None else self(m)) for n, m in module._modules.items()])
        bad = any(m is not None and number is None for m, (_, number) in zip(
            module._modules.values(), children, strict=True))  # fmt: skip
        if bad or hooked(module):
            return None
        tensors = [*module._parameters.items(), *module._buffers.items()]
        if any(t is not None and t.layout is not torch.strided for _, t in tensors):
            return None
        shapes = tuple([(n, None if t is None else shape_of(t)) for n, t in tensors])
        key = (type(module), shapes, tuple(module._parameters), tuple(sorted(module._non_persistent_buffers_set)),
               children, tuple(k for k in module.__dict__ if k not in OWN and k not in HOOKS))  # fmt: skip
        return self.numbers.setdefault(key, len(self.numbers))
