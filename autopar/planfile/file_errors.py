"""All that is wrong with one file, reported together."""

from __future__ import annotations

import json
from typing import Any

from autopar.errors import PlanError, closest

TYPES = {
    dict: "a table", list: "a list", str: "a string", int: "a whole number", float: "a number", bool: "true or false",
}  # fmt: skip
"""What a reader calls the types of a file."""


class FileErrors:
    """What is wrong with a file, or with a part of it, whose paths then begin with that of the part."""

    def __init__(self, where: str, part: str = "", lines: list[str] | None = None) -> None:
        self.where, self.part = where, part
        self.lines = [] if lines is None else lines

    def within(self, part: str) -> FileErrors:
        """Failures of a part of the file, kept with those of the whole."""
        return FileErrors(self.where, f"{self.part}{part}.", self.lines)

    def add(self, path: str, problem: str) -> None:
        """One failure: the JSON path, what is there, what to do."""
        self.say(f"{self.part}{path}: {problem}")

    def say(self, line: str) -> None:
        """One failure in words of its own."""
        if line not in self.lines:
            self.lines.append(line)

    def unknown(self, path: str, key: str, known_keys: Any) -> None:
        """A key that means nothing."""
        self.add(path, f"unknown key; {closest(key, known_keys)}")

    def type(self, path: str, value: Any, kind: type) -> bool:
        """Whether a value has the type; if not, that is a failure."""
        fine = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fine:
            self.add(path, f"got {json.dumps(value)}; expected {TYPES[kind]}")
        return fine

    def count(self, path: str, value: Any) -> bool:
        """Whether a value is a whole number of at least 1."""
        fine = self.type(path, value, int)
        if fine and value < 1:
            self.add(path, f"got {value}; expected a whole number of 1 or more")
        return fine and value >= 1

    def texts(self, path: str, value: Any) -> bool:
        """Whether a value is a list of strings."""
        return self.type(path, value, list) and all(
            [self.type(f"{path}[{k}]", item, str) for k, item in enumerate(value)]
        )

    def raise_if_any(self) -> None:
        """Raise all of them as one PlanError."""
        if self.lines:
            count = "1 problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
            raise PlanError(f"{self.where}: {count} in this plan\n" + "\n".join(f"  - {line}" for line in self.lines))


__all__ = ["FileErrors"]
