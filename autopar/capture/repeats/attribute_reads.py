"""Detection of attributes that a block's code reads, among those that differ between equally built modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class _Watched:
    """A descriptor for an attribute that differs between instances, which notes reads."""

    def __init__(self, name: str, default: object, reads: set[tuple[int, str]]) -> None:
        self.name, self.default, self.reads = name, default, reads

    def __get__(self, instance: object, _owner: type) -> object:
        if instance is not None:
            self.reads.add((id(instance.__dict__), self.name))
            if self.name in instance.__dict__:
                return instance.__dict__[self.name]
        if self.default is _NoDefault:
            raise AttributeError(self.name)
        return self.default

    def __set__(self, instance: object, value: object) -> None:
        instance.__dict__[self.name] = value

    def __delete__(self, instance: object) -> None:
        del instance.__dict__[self.name]


class _NoDefault:
    """The default of an attribute that the class does not have."""


@contextlib.contextmanager
def watched(kind: type, name: str, reads: set[tuple[int, str]]) -> Iterator[None]:
    """Note reads of a class's attribute in this scope in ``reads``, as ``(id of the instance's dict, name)``."""
    there = name in vars(kind)
    before = vars(kind).get(name)
    setattr(kind, name, _Watched(name, getattr(kind, name, _NoDefault), reads))
    try:
        yield
    finally:
        delattr(kind, name)
        if there:
            setattr(kind, name, before)
