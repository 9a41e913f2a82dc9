"""Names of places in the process group's store where some ranks meet: the same on all of them, and each used once."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

_numbers: dict[tuple[str, tuple[int, ...]], Iterator[int]] = {}
_world: list[Any] = []
LASTING = ("failures", "log")


def name_of(ranks: Sequence[int]) -> str:
    """Return the name of `ranks` in the store."""
    return "-".join(map(str, ranks)) if len(ranks) < 9 else f"{len(ranks)} {zlib.crc32(repr(tuple(ranks)).encode())}"


def next_number(kind: str, ranks: Sequence[int]) -> int:
    """Return how many places of a kind these ranks have had before, in this world; all of them call it alike.

    Those of :data:`LASTING` kinds are counted on from world to world: what is written there stays as long as the store.
    """
    if _world != [dist.group.WORLD]:
        _world[:] = [dist.group.WORLD]
        for key in [key for key in _numbers if key[0] not in LASTING]:
            del _numbers[key]
    return next(_numbers.setdefault((kind, tuple(ranks)), itertools.count()))


def next_name(kind: str, ranks: Sequence[int]) -> str:
    """Return the name of the next place of a kind; all of these ranks call it alike."""
    return f"autopar/{kind}/{name_of(ranks)}/{next_number(kind, ranks)}"
