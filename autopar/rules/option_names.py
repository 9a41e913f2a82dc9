"""Names of options, which say what an operator does on one mesh axis: a factor, one in blocks (``h*2``), or none.

Plans and pins have them, as people write them: there ``replicate`` is the option in which everything is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from autopar.words.exchanges import without_exchange
from autopar.words.placements import REPLICATE

WHOLE = "I"
"""The option in which everything is whole, gradients too."""
GRADIENTS_PENDING = "R"
"""The option in which everything is whole, and gradients are pending sums."""


@cache
def factor_and_block(option: str) -> tuple[str, int]:
    """Return the factor in the name of an option and the elements of its blocks, 0 if it is cut without blocks.

    How an exchange is made (:mod:`autopar.words.exchanges`) is left out.
    """
    factor, _, block = without_exchange(option).partition("*")
    return factor, int(block or 0)


def as_written(option: str) -> str:
    """Return the name of an option in plan files, tables and messages."""
    return REPLICATE if option == WHOLE else option


def option_written(text: str) -> str:
    """Invert :func:`as_written`."""
    return WHOLE if text == REPLICATE else text


def listed(options: Iterable[str], between: str = ", ") -> str:
    """Return the options in a message."""
    return between.join(map(as_written, options))
