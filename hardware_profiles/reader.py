"""A strict reader of TOML and JSON tables: all failures are collected, then raised together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from .errors import MOST_TOLD, ProfileError
from .strict import Unreadable, parse_json, parse_toml, read_text, shortened

REQUIRED = object()

MOST_DEVICES = 65_536
"""No cluster has more, and no count in a profile is larger: a plan takes a minute for so many."""


SMALLEST, LARGEST = 1e-30, 1e30
"""Seconds, bytes and rates are within; products and quotients of others are infinite."""


def is_beyond(value: float) -> bool:
    """Return True if a finite number is so large or small that no price can be computed with it."""
    return value != 0 and math.isfinite(value) and not SMALLEST <= abs(value) <= LARGEST


Document: TypeAlias = dict[str, Any]
"""The contents of a TOML or JSON file."""


def read_document(path: Path) -> Document:
    """Return the table in a `.toml` or `.json` file; ProfileError if it cannot be read or parsed."""
    try:
        text = read_text(path)
        document = parse_json(text) if path.suffix == ".json" else parse_toml(text)
    except Unreadable as error:
        raise ProfileError(str(path), [f"cannot be read: {error}"]) from error
    if not isinstance(document, dict):
        raise ProfileError(str(path), [f"holds a {type(document).__name__}: the top level must be a table"])
    return document


def closest(word: str, words: Iterable[str]) -> str:
    """Return a hint for a mistyped word: the known ones that it begins, else the nearest one, else all of them."""
    words, word = sorted(words), word[:200]
    begun = [name for name in words if word and name.lower().startswith(word.lower())]
    if 1 < len(begun) < len(words):
        return f"did you mean one of {', '.join(begun)}?"
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(words) or 'none'}"


class ProfileErrors:
    """The list of failures of one file, shared by all of its tables."""

    def __init__(self, where: str):
        self.where = where
        self.lines: list[str] = []

    def add(self, path: str, problem: str) -> None:
        """Add one failure; raise all of them when there are too many to list."""
        self.lines.append(f"{shortened(path, 200)}: {problem}")
        if len(self.lines) > MOST_TOLD:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise all failures as one ProfileError."""
        if self.lines:
            raise ProfileError(self.where, self.lines)


class Table:
    """One table being read. Asking for a key marks it as known; `close` reports the other keys.

    A wrong value adds a failure and returns a harmless stand-in, so that reading goes on to the next key.
    """

    def __init__(self, value: object, path: str, failures: ProfileErrors):
        self.path = path
        self.failures = failures
        self.asked: set[str] = set()
        self.data: Mapping[str, object] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            failures.add(path, f"got {_show(value)}, expected a table")

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Return True if the key is present."""
        return key in self.data

    def take(self, key: str, default: object = REQUIRED, expected: str = "a value") -> Any:
        """Return the raw value of `key`; a missing one without default is a failure and gives None."""
        self.asked.add(key)
        if key in self.data:
            return self.data[key]
        if default is REQUIRED:
            self.failures.add(self._at(key), f"is missing, add {expected}")
            return None
        return default

    def number(self, key: str, default: object = REQUIRED, *, positive: bool = False) -> float:
        """Return a finite or infinite number >= 0 (> 0 when `positive`), as a float."""
        value = self.take(key, default, "a number")
        if value is None:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.failures.add(self._at(key), f"got {_show(value)}, expected a number in SI units without quotes")
            return 1.0
        if value != value or value < 0 or (positive and value == 0):
            bound = "> 0" if positive else ">= 0"
            self.failures.add(self._at(key), f"got {value}, expected a number {bound}")
            return 1.0
        if is_beyond(value):
            self.failures.add(self._at(key), f"got {value}, expected SI units: from {SMALLEST:g} to {LARGEST:g}")
            return 1.0
        return float(value)

    def integer(self, key: str, default: object = REQUIRED, *, low: int = 1) -> int:
        """Return a whole number from `low` to a million: counts of devices, nodes and ports."""
        value = self.take(key, default, "a whole number")
        if value is None:
            return low
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.failures.add(self._at(key), f"got {_show(value)}, expected a whole number >= {low}")
            return low
        if value > MOST_DEVICES:
            self.failures.add(self._at(key), f"got {_show(value)}, expected at most {MOST_DEVICES:,}")
            return low
        return value

    def text(self, key: str, default: object = REQUIRED) -> str:
        """Return a string that is not empty unless the default is."""
        value = self.take(key, default, "a string")
        if value is None:
            return ""
        if not isinstance(value, str):
            self.failures.add(self._at(key), f"got {_show(value)}, expected a string")
            return ""
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.failures.add(self._at(key), f"got {_show(value)}, expected true or false")
            return default
        return value

    def table(self, key: str, default: object = REQUIRED) -> Table:
        """Return a sub-table."""
        value = self.take(key, default, "a table")
        return Table({} if value is None else value, self._at(key), self.failures)

    def tables(self, key: str, default: object = REQUIRED) -> list[Table]:
        """Return a list of tables (`[[key]]` in TOML)."""
        value = self.take(key, default, f"at least one [[{key}]] table")
        if value is None:
            return []
        if not isinstance(value, list):
            self.failures.add(self._at(key), f"got {_show(value)}, expected a list of tables")
            return []
        return [Table(item, f"{self._at(key)}[{i}]", self.failures) for i, item in enumerate(value)]

    def numbers(self, key: str, default: object = REQUIRED, *, positive: bool = False) -> dict[str, float]:
        """Return a table whose values are all numbers."""
        inner = self.table(key, default)
        return {name: inner.number(name, positive=positive) for name in inner.data}

    def texts(self, key: str, default: object = REQUIRED) -> dict[str, str]:
        """Return a table whose values are all strings."""
        inner = self.table(key, default)
        return {name: inner.text(name) for name in inner.data}

    def close(self) -> None:
        """Report the keys that were never asked for."""
        for key in self.data:
            if key not in self.asked:
                hint = closest(key, self.asked)
                self.failures.add(self._at(key), f"is an unknown key: {hint} Remove or rename it")


def _show(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"


def shown(value: object) -> str:
    """Return the beginning of a value, for a message."""
    if isinstance(value, (str, list, dict)) and len(value) > 60:  # its whole text may take long to write
        value = value[:60] if not isinstance(value, dict) else dict(islice(value.items(), 20))
    return shortened(repr(value))
