"""One strict reader for every file that autopar is given: plans, profiles, configs, traces.

A file that somebody else wrote may be anything: a pipe that never ends, a terabyte, a thousand nested lists, a number
that is none, a key that stands twice. Each of these is refused here, once, with one sentence that says what and what to
do; callers put the file's name before it and raise it as an error of their own.
"""

from __future__ import annotations

import json
import math
import stat
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

LARGEST_FILE_BYTES = 512 * 2**20
"""The largest plans (a stage for each of a hundred groups, every operator named) take a tenth of this."""

DEEPEST_NESTING = 64
"""Tables within tables; the files that autopar writes nest 8 deep."""

MOST_VALUES = 20_000_000
"""Values in one file, which take some gigabytes as Python objects."""


class Unreadable(ValueError):
    """A file that is not read; the text says why and what to do, without the file's name."""


def read_text(path: str | Path) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        Unreadable: there is none, it is a folder, pipe or device, too large, or no UTF-8.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise Unreadable(f"it is {kind}: give a regular file")
        if status.st_size > LARGEST_FILE_BYTES:
            raise Unreadable(f"it has {status.st_size:,} bytes, at most {LARGEST_FILE_BYTES:,} are read")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is no text in UTF-8 (byte {error.start}): give a text file") from error
    except OSError as error:
        raise Unreadable(f"{error.strerror or error}: give an existing file that may be read") from error
    except ValueError as error:  # a NUL in the path
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{error}: give the path of a file") from error


def parse_json(text: str, repeated: list[str] | None = None) -> Any:
    """What a JSON text holds.

    Args:
        repeated: takes the keys that stand twice in one object, of which all but the last are lost; without it they
            are an error.

    Raises:
        Unreadable: no JSON, a number that is not finite, a repeated key, nested too deep, or too many values.
    """
    twice: list[str] = [] if repeated is None else repeated

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(unique := dict(pairs)) != len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return unique

    def no_number(word: str) -> float:
        raise Unreadable(f"{word} is no number of JSON: write a finite one")

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise Unreadable(f"{digits} is larger than any double: write a finite number")
        return value

    try:
        value = json.loads(text, object_pairs_hook=table, parse_constant=no_number, parse_float=number)
    except RecursionError as error:
        raise Unreadable(f"it is nested deeper than {DEEPEST_NESTING} levels") from error
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"no valid JSON ({error}): correct the syntax there") from error
    if repeated is None and twice:
        raise Unreadable(f"'{twice[0]}' stands twice in one table: keep one of them")
    return _bounded(value)


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text holds; infinite numbers are part of that language.

    Raises:
        Unreadable: no TOML (a repeated key is none), nested too deep, or too many values.
    """
    try:
        value = tomllib.loads(text)
    except RecursionError as error:
        raise Unreadable(f"it is nested deeper than {DEEPEST_NESTING} levels") from error
    except ValueError as error:
        raise Unreadable(f"no valid TOML ({error}): correct the syntax there") from error
    return _bounded(value)


def _bounded(value: Any) -> Any:
    """``value``, unless it is nested too deep or holds too much."""
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if depth > DEEPEST_NESTING:
            raise Unreadable(f"it is nested deeper than {DEEPEST_NESTING} levels")
        if count > MOST_VALUES:
            raise Unreadable(f"it holds more than {MOST_VALUES:,} values")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level, depth = inner, depth + 1
    return value


__all__ = ["Unreadable", "parse_json", "parse_toml", "read_text"]
