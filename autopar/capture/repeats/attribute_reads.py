"""Which attributes are read while a block is traced: of those that differ between modules that are built alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class _Watched:
    """Stands in a class for an attribute that differs between instances, and notes when it is read."""

    def __init__(self, name: str, default: Any, reads: set[tuple[int, str]]) -> None:
        self.name, self.default, self.reads = name, default, reads

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is not None:
            self.reads.add((id(instance.__dict__), self.name))
            if self.name in instance.__dict__:
                return instance.__dict__[self.name]
        if self.default is _NoDefault:
            raise AttributeError(self.name)
        return self.default

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value

    def __delete__(self, instance: Any) -> None:
        del instance.__dict__[self.name]


class _NoDefault:
    """The class has no attribute of this name."""


@contextlib.contextmanager
def watched(kind: type, name: str, reads: set[tuple[int, str]]) -> Iterator[None]:
    """Note in ``reads``, as ``(id of the instance's dict, name)``, where this attribute of a class is read inside."""
    there = name in vars(kind)
    before = vars(kind).get(name)
    setattr(kind, name, _Watched(name, getattr(kind, name, _NoDefault), reads))
    try:
        yield
    finally:
        delattr(kind, name)
        if there:
            setattr(kind, name, before)


__all__ = ["watched"]
