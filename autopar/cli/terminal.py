"""Consoles on which no text from a file, a model or an error can steer the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDE = 150
"""Columns where the output is no terminal."""


class Terminal(Console):
    """A console that writes control characters in texts out, ``\\x1b`` for the escape character."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is shown; only those that rich itself makes control the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def printable(text: str) -> str:
    """``text`` with everything written out that is neither printable nor the end of a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def out() -> Console:
    """Standard output, for tables."""
    return Terminal(width=None if sys.stdout.isatty() else WIDE, highlight=False, soft_wrap=False)


def err() -> Console:
    """Standard error, for progress and errors."""
    return Terminal(file=sys.stderr, width=None if sys.stderr.isatty() else WIDE, highlight=False)


__all__ = ["WIDE", "err", "out", "printable"]
