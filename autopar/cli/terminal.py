"""Consoles on which text from a file, a model or an error cannot send control codes to the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from autopar.words.texts import printable

WIDE = 150
"""Columns of an output that is not a terminal, unless the environment variable COLUMNS says how many."""
_HOLE = "\ue000"
"""Placeholder of a value in a template: a private-use character of Unicode."""


class Terminal(Console):
    """A console that prints control characters as escapes and square brackets literally.

    Styles are given by :func:`styled`.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments; only those that rich itself makes control the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Print nothing more where nobody reads, as behind ``| head``."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def styled(template: str, *values: object) -> Text:
    """Fill the ``{}`` of a template in rich's markup with texts that are not markup.

    Example: ``styled("[bold]{}[/bold]", model)``.
    """
    marked = Text.from_markup(template.replace("{}", _HOLE))
    holes = [i for i, c in enumerate(marked.plain) if c == _HOLE]
    result, rest = Text(), iter(values)
    for piece in marked.divide([end for i in holes for end in (i, i + 1)]):
        if piece.plain == _HOLE:
            result.append(str(next(rest)), piece.spans[0].style if piece.spans else None)
        else:
            result.append_text(piece)
    return result


def out() -> Console:
    """Return the console of standard output, for tables."""
    return Terminal(width=_width(sys.stdout), highlight=False, markup=False, soft_wrap=False)


def print_lines(*lines: str) -> None:
    """Print lines of text on standard output without breaking them, so that words can be found and copied."""
    for line in lines:
        out().print(line, soft_wrap=True)


def err() -> Console:
    """Return the console of standard error, for progress and errors."""
    return Terminal(file=sys.stderr, width=_width(sys.stderr), highlight=False, markup=False)


def _width(stream: TextIO) -> int | None:
    """Return the columns of an output; None lets rich ask the terminal."""
    if stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and 20 <= int(columns) <= 1000 else WIDE
