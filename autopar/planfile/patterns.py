"""Compression of one decision per name into few patterns, as a person would write them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from fnmatch import translate
from typing import TypeVar

V = TypeVar("V", bound=Hashable)


def _template(name: str) -> str:
    """Return ``layers.*.mlp:add.1`` for ``layers.3.mlp:add.1``: every number in the module path becomes ``*``."""
    path, colon, op = name.partition(":")
    parts = ("*" if part.isdigit() else _literal(part) for part in path.split("."))
    return ".".join(parts) + colon + _literal(op)


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def compress(every: Sequence[str], value: Callable[[str], V], needed: set[str] | None = None) -> list[tuple[str, V]]:
    """Return patterns with values, later ones overriding earlier ones, that give every needed name its value.

    All names in ``needed`` (None for all) are matched, and every name that is matched gets its value.
    """
    needed = set(every) if needed is None else needed
    groups: dict[str, list[str]] = {}
    by_end: dict[str, list[str]] = {}
    for name in every:
        groups.setdefault(_template(name), []).append(name)
        by_end.setdefault(_ending(name), []).append(name)
    base = {t: Counter(value(n) for n in names).most_common(1)[0][0] for t, names in groups.items()}
    hits = {t: list(filter(re.compile(translate(t)).match, by_end[_ending(names[0])])) if len(names) > 1 else names
            for t, names in groups.items()}  # fmt: skip
    template = {n: t for t, names in groups.items() for n in names}
    chosen = {t for t, names in groups.items() if any(n in needed for n in names)}
    overridden = {t: {template[n] for n in hits[t] if template[n] != t and value(n) != base[t]} for t in groups}
    first = _broader(overridden, chosen)
    entries: dict[str, V] = {}
    result: dict[str, V] = {}

    def add(pattern: str, names: Sequence[str], v: V) -> None:
        entries.pop(pattern, None)
        entries[pattern] = v
        result.update(dict.fromkeys(names, v))

    done: set[str] = set()

    def visit(t: str) -> None:
        if t in done:
            return
        done.add(t)
        for broader in sorted(first.get(t, ()), key=list(groups).index):
            visit(broader)
        names = groups[t]
        if len(names) == 1 or sum(value(n) == base[t] for n in names) == 1:
            names = [n for n in names if n in needed or n in result]
        else:
            add(t, hits[t], base[t])
        for n in names:
            if result.get(n) != value(n):
                add(_literal(n), [n], value(n))

    for t in groups:
        if t in chosen:
            visit(t)
    for n in every:  # names left wrong by two patterns that match each other's names
        if (n in needed or n in result) and result.get(n) != value(n):
            add(_literal(n), [n], value(n))
    return list(entries.items())


def _broader(overridden: Mapping[str, set[str]], chosen: set[str]) -> dict[str, set[str]]:
    """Return the broader patterns that must precede each pattern, and add those that they override to ``chosen``."""
    pending, first = list(chosen), dict[str, set[str]]()
    while pending:
        t = pending.pop()
        for narrower in overridden[t]:
            first.setdefault(narrower, set()).add(t)
            if narrower not in chosen:
                chosen.add(narrower)
                pending.append(narrower)
    return first


def _ending(name: str) -> str:
    return name.rpartition(":")[2] if ":" in name else name.rpartition(".")[2]
