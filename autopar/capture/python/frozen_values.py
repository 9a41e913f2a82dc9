"""Values of Python in the form in which they are kept and compared: frozen, so that a later change shows.

Plain values are kept as they are, containers as tuples of what is in them, tensors and other objects as what stands for
them and holds none alive.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
         slice, range, enum.Enum, type(...))  # fmt: skip
"""Types of values that are compared with ``==``."""
NAMED = (types.FunctionType, types.BuiltinFunctionType, type)
"""Functions and classes, such as an activation that was chosen: compared by identity, and they keep no module alive."""
_MOST = 256
"""Values in a container that is compared as a whole; a larger one is data."""


class _Other:
    """A stand-in for a value in a container that is no plain one: a tensor, a module."""

    def __repr__(self) -> str:
        return "..."


OTHER = _Other()


class SameObject:
    """A weak reference to an object whose attributes were read: it must stay that object."""

    def __init__(self, value: object) -> None:
        self.kind = type(value).__name__
        self.ref: Callable[[], Any]
        try:
            self.ref = weakref.ref(value)
        except TypeError:
            self.ref = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.ref() is other.ref()

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"a {self.kind} object"


class Held:
    """A weak reference to a tensor that an object or a container keeps: it must stay that tensor.

    Whether its values are written anew is watched apart (:meth:`.guards.Guards.watch`).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.ref = tuple(tensor.shape), weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.ref() is not None and self.ref() is other.ref()

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        return f"a tensor of shape {self.shape}"


def is_plain(value: object) -> bool:
    """Check that a value need not be frozen to be compared."""
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | type(None)):
        return False  # a method of some object
    return isinstance(value, PLAIN) or isinstance(value, NAMED)


def frozen(value: object, depth: int = 4) -> Any:
    """Return a comparable copy, with :class:`Held` for tensors and :data:`OTHER` for unknown objects."""
    if is_plain(value):
        return value
    if isinstance(value, torch.Tensor):
        return Held(value)
    if depth and type(value) is types.SimpleNamespace:
        return frozen(vars(value), depth)
    items = items_in(value) if depth else None
    if items is None or len(items) > _MOST:
        return OTHER
    if isinstance(value, Mapping):
        entries = ((k if is_plain(k) else OTHER, frozen(v, depth - 1)) for k, v in items)
        return tuple(["dict", *(e for e in entries if not _by_tensor_class(*e))])
    if isinstance(value, (set, frozenset)):
        try:
            items = sorted(items, key=repr)
        except Exception:  # of the repr of a class of the user's
            return OTHER
    return tuple([type(value).__name__, *(frozen(v, depth - 1) for v in items)])


def items_in(container: object) -> list[Any] | None:
    """Return what a container holds, a mapping's pairs; None for any other value, or where its class does not show it.

    A subclass of one of Python's own containers is looked at past its methods: those of a class may raise an error
    (e3nn's ``Irrep`` is a tuple whose ``__len__`` does), and to look at a value runs no code of the user's.
    """
    if isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        return list(kind.items(container))
    for builtin in (tuple, list, set, frozenset):
        if isinstance(container, builtin):
            return list(builtin.__iter__(container))  # type: ignore[arg-type]
    if isinstance(container, Mapping):
        try:
            return list(container.items())
        except Exception:
            return None
    return None


def is_of_builtins(value: object) -> bool:
    """Check that a value is plain, or a builtin container of such, which Python alone copies and compares."""
    if type(value) not in (tuple, list, set, frozenset, dict, OrderedDict, defaultdict):
        return is_plain(value)
    items = items_in(value) or []
    return all(map(is_of_builtins, items))


def _by_tensor_class(key: object, value: object) -> bool:
    """Check that an entry is a library's note about a class of tensors, which a trace fills itself."""
    return value is OTHER and isinstance(key, type) and issubclass(key, torch.Tensor)


def says_the_same(before: object, after: object) -> bool:
    """Check that an object was replaced by one of its class that holds the same, as libraries do with their state.

    The second one may know more classes of what it is called with: a trace has tensors of classes of its own.
    """
    if before is after or type(before) is not type(after) or isinstance(before, torch.Tensor | torch.nn.Module):
        return before is after
    if is_plain(before):
        return bool(before == after)
    items, items_after = items_in(before), items_in(after)
    if items is not None and items_after is not None:
        if isinstance(before, Mapping):
            now = dict(items_after)
            more = now.keys() - dict(items).keys()
            return len(now) - len(more) == len(items) and all(map(_classes, more)) and all(
                says_the_same(value, now[key]) for key, value in items
            )  # fmt: skip
        if isinstance(before, (tuple, list)):
            return len(items) == len(items_after) and all(map(says_the_same, items, items_after))
        return set(items) == set(items_after)
    return hasattr(before, "__dict__") and says_the_same(vars(before), vars(after))


def _classes(key: object) -> bool:
    parts = key if isinstance(key, (tuple, set, frozenset)) else (key,)
    return all(isinstance(part, type) for part in parts)


def leaves_out(value: object) -> bool:
    """Check that :func:`frozen` leaves something out of a dict, or of values in a container."""
    items = items_in(value) or []
    if isinstance(value, Mapping):
        return any(_by_tensor_class(k, frozen(v)) or leaves_out(v) for k, v in items)
    return isinstance(value, (tuple, list)) and any(map(leaves_out, items))


def show(value: object) -> str:
    """Return a value for messages: a frozen container as it was written."""
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        kind, *items = value
        if kind == "dict":
            return "{" + ", ".join(f"{k!r}: {show(v)}" for k, v in items) + "}"
        if kind in ("list", "tuple", "set", "frozenset"):
            return {"list": "[", "tuple": "("}.get(kind, "{") + ", ".join(map(show, items)) + {
                "list": "]", "tuple": ")"}.get(kind, "}")  # fmt: skip
    if isinstance(value, NAMED):
        return getattr(value, "__qualname__", repr(value))
    return repr(value)
