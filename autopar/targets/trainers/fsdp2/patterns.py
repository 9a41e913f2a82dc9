"""Patterns of module paths: ``layers.*`` for all modules of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def compressed(paths: Sequence[str], model: nn.Module) -> list[str]:
    """Return patterns for paths: ``layers.*`` where all modules with parameters of a list are there."""
    return list(compressed_table(dict.fromkeys(paths), model))


def compressed_table(table: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a table by paths with ``*`` for the number of a list's modules, where all of them have one entry."""
    found: dict[str, Any] = {}
    for path, entry in table.items():
        parts = path.split(".")
        k = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        if k is None:
            found[path] = entry
            continue
        before, after = parts[:k], parts[k + 1 :]
        numbers = numbers_in(model, ".".join(before))
        alike = [".".join([*before, number, *after]) for number in numbers]
        same = len(alike) > 1 and all(other in table and table[other] == entry for other in alike)
        found[".".join([*before, "*", *after]) if same else path] = entry
    return found


def numbers_in(model: nn.Module, path: str) -> list[str]:
    """Return the names of the modules with parameters that a module holds."""
    children = model.get_submodule(path).named_children()
    return [name for name, child in children if any(True for _ in child.parameters())]
