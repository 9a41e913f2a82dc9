"""Patterns of module paths: ``layers.*`` for all blocks of a list."""

from __future__ import annotations

from collections.abc import Sequence


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
