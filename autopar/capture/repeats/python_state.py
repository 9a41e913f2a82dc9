"""Snapshots of the Python state that a module's code can read or write, which can be compared.

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
from typing import Any, Protocol

import torch

from autopar.capture.python.frozen_values import items_in
from autopar.torch_private import OpOverload, OpOverloadPacket
from autopar.words.trees import PyTree

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
Memo = dict[int, object]


class Unknown(Exception):
    """A value whose state cannot be compared."""


class ByIdentity:
    """An object that is compared by identity, and kept alive so that its place is not taken by another."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def seen(value: PyTree, memo: Memo, depth: int = DEPTH, above: tuple[int, ...] = ()) -> object:
    """Return a snapshot of a value, equal to a later one while nothing reachable from the value has changed.

    Tensors, modules, functions and classes are compared by identity; containers and objects by their contents. ``memo``
    has objects that were seen at the same moment; ``above`` are those around the value.

    Raises:
        Unknown: the value may change in a way that cannot be seen, or holds too much.
    """
    kind: Any = type(value)
    if kind in (int, str, bool, type(None)):
        return (kind, value)
    sort = _sort(kind)
    if sort == "value":
        return (kind, repr(value))
    if sort == "identity":
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
    if hasattr(value, "__dict__"):
        if id(value) not in memo:
            memo[id(value)] = (kind, _fields(value, memo, depth, above))
        return memo[id(value)]
    raise Unknown(f"{kind.__name__} does not show its state")


def _items_of(container: object) -> list[Any]:
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
    """Return how :func:`seen` treats values of a type.

    Of the type and not of each value: that answers by its ``__class__``, which is slow for classes that look up
    attributes in their own way, as configurations do.
    """
    if issubclass(kind, float) or issubclass(kind, _VALUES):
        return "value"
    if issubclass(kind, (torch.Tensor, torch.nn.Module)) or issubclass(kind, _NAMES):
        return "identity"
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
        return "value"
    # a lock or a reference is itself; a memoized function gives what its function gives
    opaque = issubclass(kind, (*_LOCKS, functools._lru_cache_wrapper)) or kind.__module__ == "weakref"
    return "identity" if opaque else "object"


def _fields(value: object, memo: Memo, depth: int, above: tuple[int, ...]) -> object:
    kind: Any = type(value)
    if _slots(kind):
        raise Unknown(f"{kind.__name__} has slots")
    return tuple([(k, seen(v, memo, depth - 1, above)) for k, v in vars(value).items()])


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> bool:
    return any(c.__dict__.get("__slots__") for c in kind.__mro__ if c.__module__ not in ("builtins", "abc", "typing"))


def _full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def plain(module: torch.nn.Module, memo: Memo) -> dict[str, object]:
    """Return snapshots of a module's attributes, by name, without parameters, buffers, children and hooks."""
    return {k: seen(v, memo) for k, v in module.__dict__.items() if k not in OWN and k not in HOOKS}


def hooked(module: torch.nn.Module) -> bool:
    """Return whether other code runs when the module is called."""
    return any(module.__dict__.get(k) for k in HOOKS) or "forward" in module.__dict__ or "__call__" in module.__dict__


# -- globals


LOOKS_INSIDE = frozenset({"__dict__", "vars", "__getattribute__", "__getstate__", "__reduce__", "deepcopy", "pickle"})
"""Names of functions that read attributes of an object without naming them."""


_NOT_RUN = frozenset({"__repr__", "__str__", "__format__", "extra_repr", "_abc_impl"})


class Namespace(Protocol):
    """A namespace of variables."""

    def get(self, name: str, /) -> Any:
        """Return the value of a variable."""


class _NamedState:
    """A search for state that functions name, also through functions that they call."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], tuple[Namespace, str]] = {}
        self.todo: list[object] = []
        self.visited: set[int] = set()
        self.inside = False

    def first(self, value: object) -> bool:
        """Return whether a value is visited for the first time."""
        known = id(value) in self.visited
        self.visited.add(id(value))
        return not known

    def of_class(self, kind: type) -> None:
        """Note the attributes of a class, and its methods for later."""
        for c in kind.__mro__ if self.first(kind) else ():
            for name, value in () if _foreign(c.__module__) else vars(c).items():
                if name in _NOT_RUN or (issubclass(c, torch.nn.Module) and name == "__init__"):
                    continue
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
                    self.todo.append(function)
                elif not name.startswith("__") and not isinstance(value, _NAMES) and not hasattr(value, "__get__"):
                    self.places[id(c), name] = (vars(c), name)

    def used(self, where: Namespace, name: str, others: frozenset[str]) -> None:
        """Note a variable; of a module those of its variables that the same function names."""
        value = where.get(name)
        if isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
            self.todo.append(value)
        elif isinstance(value, type):
            self.of_class(value)
        elif isinstance(value, types.ModuleType):
            if not _foreign(value.__name__) and self.first(value):
                for attribute in others & vars(value).keys():
                    self.used(vars(value), attribute, frozenset())
        elif not isinstance(value, _NAMES):
            self.places[id(where), name] = (where, name)

    def of_function(self, function: object) -> None:
        """Note what a function names."""
        wrapped = getattr(function, "__wrapped__", None)
        if not isinstance(function, types.FunctionType) or _foreign(function.__module__):
            if wrapped is not None and self.first(function):
                self.todo.append(wrapped)
            return
        if not self.first(function):
            return
        names = _names(function.__code__)
        self.inside = self.inside or not names.isdisjoint(LOOKS_INSIDE)
        for cell in function.__closure__ or ():
            if _full(cell):
                self.used(_Cell(cell), "", frozenset())
        self.todo.append(wrapped)
        for name in names & function.__globals__.keys():
            if not hasattr(builtins, name):
                self.used(function.__globals__, name, names)


def named_state(classes: Iterable[type]) -> tuple[list[tuple[Namespace, str]], bool]:
    """Return state that the methods of some classes name, also through functions that they call.

    Functions of torch and of Python's own library are assumed to do what their names say.

    Returns:
        Globals, attributes of classes and modules, and variables of enclosing functions, each as something with
        ``get`` and a name; and whether some function looks into objects as a whole.
    """
    found = _NamedState()
    for kind in classes:
        found.of_class(kind)
    while found.todo:
        found.of_function(found.todo.pop())
    return list(found.places.values()), found.inside


class _Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self, _name: str) -> object:
        return self.cell.cell_contents


_STDLIB = frozenset(sys.stdlib_module_names)


def _foreign(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in ("torch", "numpy", "autopar") or (top in _STDLIB and top != "__main__")


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))


def random_state() -> object:
    """Return the state of Python's and numpy's generators."""
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
    """Return what code can see of a tensor without its value."""
    return Shape(
        type(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad
    )


class Structures:
    """Numbers of modules, equal for those that are built alike, whatever their plain attributes are."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.known: dict[int, int | None] = {}

    def __call__(self, module: torch.nn.Module) -> int | None:
        """Return the number of a module; None if it contains hooks or tensors that cannot be described."""
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
