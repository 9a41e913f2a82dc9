"""Attribute lookups of classes, recorded for as long as a trace runs.

A class that is made in Python looks up and sets its attributes by methods that can be replaced. Here they tell a
listener of each attribute before they go on. The classes stay the users' own: of an object that is of a subclass while
it is traced, code that compares classes (``type(layer) is Block``, the ``__eq__`` of dataclasses) would get other
answers, and one with ``__slots__`` has no other class.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.python.containers import table_of
from autopar.torch_private import AttributeProxy

_OWN = frozenset({*torch.nn.Module().__dict__, *dir(torch.nn.Module)})
"""Attributes that every module has: the machinery's, and ``training``, which is what modes are for."""
_HEAP = 1 << 9
"""Flag of classes that are made in Python, whose attribute lookup can be changed."""


class Lookups:
    """Classes whose attribute lookups are recorded until :meth:`end`.

    Args:
        saw: is called with an object, a name and the value that was read, two frames below the code that read it.
        wrote: the same with the value that is written, before it is.
    """

    def __init__(self, saw: Callable[[Any, str, Any], None], wrote: Callable[[Any, str, Any], None]) -> None:
        self.saw, self.wrote = saw, wrote
        self.active = False
        self._before: dict[type, tuple[Any, Any]] = {}

    def listen(self, cls: type) -> None:
        """Let a class tell of its attributes until the trace ends."""
        if cls in self._before or not can_tell(cls):
            return
        get: Any = getattr(cls.__getattribute__, "_original", cls.__getattribute__)  # of a base that tells already
        set_: Any = getattr(cls.__setattr__, "_original", cls.__setattr__)

        def __getattribute__(owner: object, name: str) -> Any:
            try:
                value = get(owner, name)
            except AttributeError:  # torch looks then among what is registered, of which None is a plain value
                if name not in _OWN and self.active and is_registered_none(behind(owner), name):
                    self.saw(owner, name, None)
                raise
            if name not in _OWN and self.active and name[:2] != "__":
                self.saw(owner, name, value)
            return value

        def __setattr__(owner: object, name: str, value: object) -> None:
            if name not in _OWN and self.active and not isinstance(value, torch.nn.Module):
                self.wrote(owner, name, value)
            set_(owner, name, value)

        methods_before = vars(cls).get("__getattribute__"), vars(cls).get("__setattr__")
        try:
            for function, original in ((__getattribute__, get), (__setattr__, set_)):
                function.__dict__["_original"] = original
                setattr(cls, function.__name__, function)
        except TypeError:  # a class that cannot be changed
            return
        self._before[cls] = methods_before

    def end(self) -> None:
        """Restore the classes."""
        for cls, (get, set_) in self._before.items():
            for name, class_method in (("__getattribute__", get), ("__setattr__", set_)):
                if class_method is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, class_method)
        self._before.clear()


def can_tell(cls: type) -> bool:
    """Check that a class is made in Python, so that its attribute lookup can be changed."""
    return bool(cls.__flags__ & _HEAP)


def behind(owner: object) -> Any:
    """Return the module itself: torch.export traces one with two names through stand-ins that share its dict."""
    if not isinstance(owner, AttributeProxy):
        return owner
    stand_in: Any = type(owner)
    return stand_in.get_base(owner)


def is_registered_none(owner: object, name: str) -> bool:
    """Check that a parameter, buffer or submodule is None: ``register_buffer("mask", None)``."""
    table = table_of(owner, name) if isinstance(owner, torch.nn.Module) else None
    return table is not None and table[name] is None


def stored(owner: object, name: str, value: object) -> bool:
    """Check that an attribute is kept by the object or its class, and not computed."""
    if value is None and is_registered_none(owner, name):
        return True
    try:
        if name in object.__getattribute__(owner, "__dict__"):
            return True
    except AttributeError:
        pass
    for cls in type(owner).__mro__:
        if name in vars(cls):
            raw = vars(cls)[name]
            return raw is value or isinstance(raw, types.MemberDescriptorType)
    # found under another name, as a config's attribute_map has it: by a look-up that is written in Python
    return isinstance(getattr(type(owner).__getattribute__, "_original", None), types.FunctionType)
