"""Tables of the terminal that fit the terminal: on a narrow one, columns move to a line below each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

MOST_LINES = 3
"""Most lines of a row on a narrow terminal: the row, a first cell that is too long to share its line, what is below."""
GAP, INDENT, LEAST_FIRST = 2, 4, 14
"""Columns between two cells, before the lines below a row, and of the narrowest first column."""
LEAST_FOLDED = 40
"""Columns that text needs to be read in two lines."""
CUT = "…"


class FittedTable(rich_table.Table):
    """A table with borders where it is wide enough, and without them elsewhere.

    Where the table with all its cells on one line is wider than the terminal, borders are left out and heads are
    written over several lines. If that is not enough, columns move to a line below each row, as ``head value``: those
    added with ``below``, the greatest number first and equal numbers together, then the widest columns of text, then
    the last ones. The first column stays. A row takes at most :data:`MOST_LINES` lines, and what is cut ends in an
    ellipsis.
    """

    def __init__(self, *heads: str, **options: Any) -> None:
        self.below: dict[int, int] = {}
        self.unnamed: set[int] = set()
        super().__init__(*heads, **({"header_style": "bold", "title_justify": "left"} | options))

    def add_column(self, *args: Any, below: int = 0, named: bool = True, **options: Any) -> None:
        """Add a column; see :class:`Table` for ``below``. Without ``named`` its head is not repeated below a row."""
        if below:
            self.below[len(self.columns)] = below
        if not named:
            self.unnamed.add(len(self.columns))
        super().add_column(*args, **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table for the width of the terminal."""
        natural = console.measure(self, options=options.update_width(100_000)).maximum
        tall = any(str(cell).count("\n") >= MOST_LINES for column in self.columns for cell in column._cells)
        if not tall and (natural <= options.max_width or self._folds(natural - options.max_width)):
            yield from super().__rich_console__(console, options)
        else:
            yield from _Narrow(self, options.max_width).lines()

    def _folds(self, excess: int) -> bool:
        """Return True if the widest column of text can be ``excess`` narrower, with two lines a cell at most."""
        texts = {
            k: max((_one_line(cell).cell_len for cell in column._cells), default=0)
            for k, column in enumerate(self.columns) if k and column.justify == "left"
        }  # fmt: skip
        if not texts:
            return False
        widest = max(texts, key=texts.__getitem__)
        room = texts[widest] - excess
        return room >= LEAST_FOLDED and all(
            len(_wrapped(_one_line(cell), room)) <= 2 for cell in self.columns[widest]._cells
        )


class _Narrow:
    """A table without borders, ``width`` columns wide."""

    def __init__(self, table: FittedTable, width: int) -> None:
        self.table, self.width = table, width
        self.cells = [[_one_line(cell) for cell in column._cells] for column in table.columns]
        self.heads = [Text(str(column.header)) for column in table.columns]
        self.right = [column.justify == "right" for column in table.columns]
        self.widths = [
            max([*map(_words, (head.plain,)), *(cell.cell_len for cell in column)], default=0)
            for head, column in zip(self.heads, self.cells, strict=True)
        ]
        self.shown = [k for k in range(len(self.heads)) if k == 0 or any(cell.plain for cell in self.cells[k])]
        self.hidden: list[int] = []
        while self._rest() < min(self.widths[0], LEAST_FIRST) and len(self.shown) > 1:
            moved = self._next()
            self.hidden += moved
            self.shown = [k for k in self.shown if k not in moved]
        self.hidden.sort()
        self.widths[0] = max(1, min(self.widths[0], self._rest()))
        self.was_cut = False

    def _rest(self) -> int:
        """Return the width that the other columns leave to the first."""
        return self.width - sum(self.widths[k] + GAP for k in self.shown[1:])

    def _next(self) -> list[int]:
        """Return the columns that move below the rows first: those marked alike move together."""
        movable, below = self.shown[1:], self.table.below
        greatest = max((below.get(k, 0) for k in movable), default=0)
        if greatest:
            return [k for k in movable if below.get(k) == greatest]
        texts = [k for k in movable if not self.right[k]]
        return [max(texts, key=self.widths.__getitem__) if texts else movable[-1]]

    def lines(self) -> Iterator[Text]:
        """Yield the lines of the table."""
        title, caption = (_one_line(t) for t in (self.table.title or "", self.table.caption or ""))
        if title.plain:
            yield _styled(title, self.table.title_style or "bold")
        stacked = [_stacked(self.heads[k].plain, self.widths[k]) for k in self.shown]
        depth = max(map(len, stacked))
        for level in zip(*([""] * (depth - len(lines)) + lines for lines in stacked), strict=True):
            heads = [Text(text) for text in level]
            if any(head.plain for head in heads):
                yield _styled(self._line(heads), str(self.table.header_style or "bold"))
        yield Text("─" * min(self.width, self._rest_of_line()))
        for number, row in enumerate(self.table.rows):
            for line in self._row(number):
                yield _styled(line, row.style or "")
            if self.table.show_lines or (row.end_section and number + 1 < len(self.table.rows)):
                yield Text("─" * min(self.width, self._rest_of_line()))
        if self.was_cut:
            yield Text(f"{CUT} stands for what is cut: a wider terminal shows it, and so does --json", style="dim")
        if caption.plain:
            yield _styled(caption, "italic")
        yield Text("")

    def _rest_of_line(self) -> int:
        return sum(self.widths[k] for k in self.shown) + GAP * (len(self.shown) - 1)

    def _line(self, cells: Sequence[Text]) -> Text:
        """Return cells next to each other, each as wide as its column."""
        line = Text(no_wrap=True)
        for k, cell in zip(self.shown, cells, strict=True):
            cell = cell.copy()
            cell.truncate(self.widths[k], overflow="ellipsis")
            space = " " * (self.widths[k] - cell.cell_len)
            line.append_text(Text(space) + cell if self.right[k] else cell + Text(space))
            line.append(" " * GAP)
        line.rstrip()
        return line

    def _row(self, number: int) -> list[Text]:
        """Return the lines of a row."""
        cells = [self.cells[k][number] for k in self.shown]
        lines = []
        if cells[0].cell_len > self.widths[0]:  # a long name has a line of its own
            lines.append(self._cut(cells[0], self.width))
            cells[0] = Text("")
        if any(cell.plain for cell in cells):
            lines.append(self._line(cells))
        below = Text()
        for k in self.hidden:
            cell = self.cells[k][number]
            if cell.plain not in ("", "-"):
                below.append("; " if below else "")
                below.append("" if k in self.table.unnamed or not self.heads[k].plain else f"{self.heads[k]} ", "dim")
                below.append_text(cell)
        if below:
            room = self.width - INDENT
            wrapped = _wrapped(below, room)
            if len(wrapped) > MOST_LINES - len(lines):
                most = max(1, MOST_LINES - len(lines))
                last = Text(" ").join(wrapped[most - 1 :])
                wrapped = [*wrapped[: most - 1], self._cut(last, room)]
            lines += [Text(" " * INDENT) + line for line in wrapped]
        return lines or [Text("")]

    def _cut(self, text: Text, width: int) -> Text:
        """Return a text of at most ``width`` columns."""
        self.was_cut |= text.cell_len > width
        text = text.copy()
        text.truncate(width, overflow="ellipsis")
        return text


def _one_line(cell: object) -> Text:
    """Return a cell as one line of text."""
    text = cell.copy() if isinstance(cell, Text) else Text(str(cell))
    if "\n" not in text.plain:
        return text
    return Text(", ").join(line for line in text.split("\n") if line.plain)


def _words(text: str) -> int:
    """Return the width of the longest word."""
    return max(map(len, text.split()), default=0)


def _stacked(head: str, width: int) -> list[str]:
    """Return a head in lines of at most ``width`` columns, or as wide as its longest word."""
    lines: list[str] = []
    for word in head.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def _wrapped(text: Text, width: int) -> list[Text]:
    """Return a text in lines of at most ``width`` columns, cut between words where it can be."""
    return list(text.wrap(Console(width=width), width))


def _styled(line: Text, style: Any) -> Text:
    """Return a line in a style."""
    line = line.copy()
    if style:
        line.stylize(style)
    line.no_wrap = True
    return line
