"""Repairs of torch: the place, the versions that need it, and the undoing (which tests do)."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.torch_private import TORCH, Replaceable
from autopar.words.trees import PyTree

_MISSING = object()


@dataclass
class Replacement:
    """One entry of a dict, or one attribute, that gets another value.

    Attributes:
        owner: the dict or the object; a :class:`Replaceable` is asked for what it names, and ``name`` is None.
        name: the key or the attribute.
        made: gives the new value, from the old one; the old one is None if there is none.
    """

    owner: Any
    name: Any
    made: Callable[[Any], Any]
    _before: Any = field(default=_MISSING, repr=False)

    def apply(self) -> None:
        """Put the new value in."""
        self._before = self._read()
        self._write(self.made(None if self._before is _MISSING else self._before))

    def undo(self) -> None:
        """Put back what was there."""
        self._write(self._before)

    def _read(self) -> Any:
        if isinstance(self.owner, Replaceable):
            return self.owner.get()
        if isinstance(self.owner, MutableMapping):
            return self.owner.get(self.name, _MISSING)
        return vars(self.owner).get(self.name, _MISSING)

    def _write(self, value: PyTree) -> None:
        if isinstance(self.owner, Replaceable):
            self.owner.set(value)
        elif isinstance(self.owner, MutableMapping):
            if value is _MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass
class Repair:
    """One thing that torch gets wrong, or refuses in a way that does not help, made right for the whole process.

    Attributes:
        name: what it is called in tests (``tests/procs/test_repairs.py`` has a case for each, wrong without it).
        changes: gives what it changes; called when it is applied, because it imports torch's modules.
        until: the first version of torch that needs it no more, as (major, minor); None while all need it.
    """

    name: str
    changes: Callable[[], Sequence[Replacement]]
    until: tuple[int, int] | None = None
    _applied: list[Replacement] = field(default_factory=list, repr=False)

    @property
    def is_needed(self) -> bool:
        """True if this version of torch needs the repair."""
        return self.until is None or TORCH < self.until

    def apply(self) -> None:
        """Repair torch, where its version needs it; a second call changes nothing."""
        if self.is_needed and not self._applied:
            for change in self.changes():
                change.apply()
                self._applied.append(change)

    def undo(self) -> None:
        """Restore torch as it was."""
        while self._applied:
            self._applied.pop().undo()
