"""A collector that reports all mistakes of one file together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeAlias

from autopar.errors import PlanError, closest
from hardware_profiles.strict import MOST_COUNTED, shortened

Section: TypeAlias = Mapping[str, Any]
"""A table of a plan file."""
TYPES = {
    dict: "a table", list: "a list", str: "a string", int: "a whole number", float: "a number", bool: "true or false",
}  # fmt: skip
"""Names of the types of a file, for messages."""

MOST_TOLD = 40
"""Most failures of one file in a message."""
MOST_ENTRIES = 100_000
"""Most entries of one table or list."""
MOST_OF_LINE, MOST_OF_VALUE = 1000, 120
"""Most characters of one failure, and of the value in it."""


class FileErrors:
    """The mistakes of a file, or of a part of it, whose paths then begin with that of the part."""

    def __init__(self, where: str, part: str = "", lines: dict[str, None] | None = None) -> None:
        self.where, self.part = where, part
        self.lines = {} if lines is None else lines

    def within(self, part: str) -> FileErrors:
        """Return a collector for a part of the file; its failures are kept with those of the whole."""
        return FileErrors(self.where, f"{self.part}{part}.", self.lines)

    def add(self, path: str, problem: str) -> None:
        """Add one failure: the JSON path, what is there, what to do."""
        self.say(f"{self.part}{path}: {problem}")

    def say(self, line: str) -> None:
        """Add one failure as a full sentence; raise all of them when there are too many to list."""
        self.lines.setdefault(line)
        if len(self.lines) > MOST_TOLD:
            self.raise_if_any()

    def unknown(self, path: str, key: str, known_keys: Iterable[str]) -> None:
        """Add a failure for an unknown key."""
        self.add(path, f"unknown key; {closest(key, list(known_keys))}")

    def type(self, path: str, value: Any, kind: type) -> bool:
        """Return True if a value has the type; else add a failure."""
        fine = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fine:
            self.add(path, f"got {_json(value)}; expected {TYPES[kind]}")
        elif kind in (dict, list) and len(value) > MOST_ENTRIES:
            self.add(path, f"has {len(value):,} entries, at most {MOST_ENTRIES:,} are read; join some by patterns")
            return False
        return fine

    def count(self, path: str, value: Any, most: int = MOST_COUNTED) -> bool:
        """Return True if a value is a whole number from 1 to ``most``; else add a failure."""
        if not self.type(path, value, int):
            return False
        if value < 1:
            self.add(path, f"got {value}; expected a whole number of 1 or more")
        elif value > most:
            self.add(path, f"got {value}; expected at most {most:,}")
        return bool(1 <= value <= most)

    def texts(self, path: str, value: Any) -> bool:
        """Return True if a value is a list of strings; else add a failure."""
        return self.type(path, value, list) and all(
            [self.type(f"{path}[{k}]", item, str) for k, item in enumerate(value)]
        )

    def raise_if_any(self) -> None:
        """Raise all failures as one PlanError."""
        if self.lines:
            count = "1 problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
            if len(self.lines) > MOST_TOLD:
                count = f"more than {MOST_TOLD} problems"
            listed = [f"  - {shortened(line, MOST_OF_LINE)}" for line in islice(self.lines, MOST_TOLD)]
            raise PlanError(f"{self.where}: {count} in this plan\n" + "\n".join(listed))


def _json(value: object) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, (str, list, dict)) and len(value) > MOST_OF_LINE:  # which would take long to write out
        value = value[:MOST_OF_LINE] if not isinstance(value, dict) else dict(islice(value.items(), MOST_OF_LINE))
    return shortened(json.dumps(value), MOST_OF_VALUE)
