"""Exchanges of rows between ranks, as the ends of names say how they are made: ``travel+/4@1.5``.

=======  =================================================================================================
``+``    one exchange along this axis and the one before it
``/4``   in four chunks
``@1.5`` as many rows to each rank, at most 1.5 times an equal share; ``@max``: as many as a rank has at all
=======  =================================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from cost_models.joined_axes import JOINED

_END = re.compile(r"(\+?)(?:/([1-9]\d*))?(?:@(max|[1-9]\d*(?:\.\d+)?))?$")
CHUNKS = (2, 4, 8)
BOUNDS = ("1.5", "2", "4", "max")
"""What may be written of an exchange."""


class RowExchange(NamedTuple):
    """How rows are exchanged.

    Attributes:
        axes: one or several neighbouring axes.
        chunks: in how many parts.
        bound: how many rows go to each rank at most, as a multiple of an equal share, and as many are sent always, so
            that the host need not know how many there are; infinite: all rows of a rank; 0: as many as there are.
    """

    axes: tuple[str, ...]
    chunks: int = 1
    bound: float = 0.0

    def rows_to_each(self, rows: int, ranks: int) -> int:
        """Return the rows that go to each of `ranks` ranks in a chunk, of ``rows`` rows of a rank, where bounded."""
        return rows if math.isinf(self.bound) else min(rows, math.ceil(self.bound * rows / (ranks * self.chunks)))


def exchange_written(name: str) -> str:
    """Return the end of a name about how rows are exchanged: ``/4`` of ``travel/4``; mostly empty."""
    found = _END.search(name)
    assert found is not None
    return found[0]


def without_exchange(name: str) -> str:
    """Return a name without :func:`exchange_written`."""
    return name[: len(name) - len(exchange_written(name))]


def exchange_of(name: str) -> tuple[bool, RowExchange]:
    """Return whether an exchange is one with that along the axis before, and how it is made; its axes are left out."""
    found = _END.search(name)
    assert found is not None
    bound = math.inf if found[3] == "max" else float(found[3] or 0)
    return bool(found[1]), RowExchange((), int(found[2] or 1), bound)


def exchanges_along(texts: Sequence[str]) -> list[RowExchange]:
    """Return the exchanges along axes, in order; each text is an axis with what is written of its exchange."""
    exchanges: list[RowExchange] = []
    for text in texts:
        joined, exchange = exchange_of(text)
        before = exchanges.pop().axes if joined else ()
        exchanges.append(exchange._replace(axes=(*before, without_exchange(text).partition("*")[0])))
    return exchanges


def ways_to_exchange(n: int) -> tuple[str, ...]:
    """Return what may be written of an exchange of rows to ``n`` experts."""
    chunks = ["", *(f"/{of}" for of in CHUNKS if not n % of and of < n)]
    bounds = ["", *(f"@{bound}" for bound in BOUNDS)]
    ways = [f"{joined}{of}{bound}" for bound in bounds for joined in ("", JOINED) for of in chunks]
    return tuple(way for way in ways if way)


def is_bounded(name: str) -> bool:
    """Check whether a name sends as many rows to each rank always."""
    return exchange_of(name)[1].bound > 0
