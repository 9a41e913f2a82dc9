"""Patterns of module paths: ``layers.*`` for all blocks of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def compressed(paths: Sequence[str]) -> list[str]:
    """Return patterns for paths of which all those of a list are there: ``layers.*`` for ``layers.0`` to the last."""
    of_list: dict[str, list[int]] = {}
    found: list[str] = []
    for path in paths:
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            of_list.setdefault(parent, []).append(int(last))
    for path in paths:
        parent, _, last = path.rpartition(".")
        whole = last.isdigit() and sorted(of_list[parent]) == list(range(len(of_list[parent])))
        pattern = f"{parent}.*".lstrip(".") if whole and len(of_list[parent]) > 1 else path
        if pattern not in found:
            found.append(pattern)
    return found


def compressed_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table by paths with ``*`` for the number of a list's modules, where all of them have one entry."""
    found: dict[str, Any] = {}
    for path in table:
        parts = path.split(".")
        numbers = [k for k, part in enumerate(parts) if part.isdigit()]
        pattern = path
        if numbers:
            k = numbers[0]
            before, after = parts[:k], parts[k + 1 :]
            alike = [other for other in table if other.split(".")[:k] == before and other.split(".")[k + 1 :] == after]
            alike = [other for other in alike if other.split(".")[k].isdigit()]
            indices = sorted(int(other.split(".")[k]) for other in alike)
            if (
                len(alike) > 1
                and all(table[other] == table[path] for other in alike)
                and indices == list(range(len(indices)))
            ):
                pattern = ".".join([*before, "*", *after])
        found[pattern] = table[path]
    return found
