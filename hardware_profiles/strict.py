"""A strict reader for every file that autopar is given: plans, profiles, configs, traces.

A file from somebody else may be anything: a pipe that never ends, a terabyte, a thousand nested lists, an invalid
number, a repeated key. Each of these is refused here, with one sentence that says what and what to do; callers put the
file's name in front of it and raise it as an error of their own.
"""

from __future__ import annotations

import json
import math
import stat
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

LARGEST_FILE_BYTES = 128 * 2**20
"""The largest plans (a stage for each of a hundred groups, every operator named) take two fifths of this."""

DEEPEST_NESTING = 64
"""Tables within tables; the files that autopar writes nest 8 deep."""

MOST_VALUES = 5_000_000
"""Values in one file, which take a gigabyte as Python objects."""


MOST_COUNTED = 1 << 24
"""No count of devices, stages, microbatches, rows or operators is larger."""

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number of a file, as in TOML; larger ones do not fit a double or torch's integers."""


class Unreadable(ValueError):
    """An error for a file that is not read: the reason and what to do, without the file's name."""


def is_there(path: Path) -> bool:
    """Return True if a path is that of a file; a name that is too long or has a NUL has none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path) -> str:
    """Return the text of a regular UTF-8 file, or raise Unreadable."""
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


def read_beginning(path: Path, n_bytes: int) -> bytes:
    """Return up to `n_bytes` of a file that need not be text, to tell its kind; may raise OSError."""
    with path.open("rb") as file:
        return file.read(n_bytes)


def parse_json(text: str, repeated: list[str] | None = None) -> Any:
    """Return the value of a JSON text, or raise Unreadable.

    ``repeated`` collects repeated keys of one object, of which all but the last are lost; without it they are an error.
    So are numbers that are not finite, and too deep or too many values.
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
            raise Unreadable(f"{shortened(digits)} is larger than any double: write a finite number")
        return value

    def whole(digits: str) -> int:
        if len(digits) > 20 or abs(value := int(digits)) > LARGEST_WHOLE:
            raise Unreadable(f"{shortened(digits)} is larger than {LARGEST_WHOLE:,}: write a smaller whole number")
        return value

    try:
        value = json.loads(text, object_pairs_hook=table, parse_constant=no_number, parse_float=number, parse_int=whole)
    except RecursionError as error:
        raise Unreadable(f"it is nested deeper than {DEEPEST_NESTING} levels") from error
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"no valid JSON ({error}): correct the syntax there") from error
    if repeated is None and twice:
        raise Unreadable(f"'{twice[0]}' is repeated in one table: keep one of them")
    if "\\ud" in text.lower():  # an escape of half a character, which is no text and cannot be printed or written
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise Unreadable(f"{half} is half a character: write the whole one") from None
    return _bounded(value)


def parse_count(digits: str) -> int:
    """Parse a whole number of a file or of the command line, or raise Unreadable.

    Only the digits 0 to 9 are allowed (int() also takes others, and str.isdigit() even ones that int() refuses), and no
    number larger than any count.
    """
    if not digits.isascii() or not digits.isdigit():
        raise Unreadable(f"'{shortened(digits)}' is no whole number")
    if len(digits) > 20 or int(digits) > MOST_COUNTED:
        raise Unreadable(f"{shortened(digits)} is larger than {MOST_COUNTED:,}, the largest count")
    return int(digits)


def shortened(text: str, most: int = 60) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= most else f"{text[: most - 3]}... ({len(text):,} characters)"


def parse_toml(text: str) -> dict[str, Any]:
    """Return the value of a TOML text, in which infinite numbers are allowed, or raise Unreadable."""
    try:
        value = tomllib.loads(text)
    except RecursionError as error:
        raise Unreadable(f"it is nested deeper than {DEEPEST_NESTING} levels") from error
    except ValueError as error:
        raise Unreadable(f"no valid TOML ({error}): correct the syntax there") from error
    return _bounded(value)


def _bounded(value: Any) -> Any:
    """Return ``value``, unless it is nested too deep or holds too much."""
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
            elif isinstance(item, int) and not -LARGEST_WHOLE <= item <= LARGEST_WHOLE:
                raise Unreadable(f"a whole number is larger than {LARGEST_WHOLE:,}: write a smaller one")
        level, depth = inner, depth + 1
    return value
