"""Tables on a narrow terminal: no line is wider than it, and no row takes more than three lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import command, plan_all

from autopar.cli import terminal
from autopar.cli.terminal import Terminal
from autopar.report.fitted_tables import CUT, MOST_LINES, FittedTable

WIDTH = 80
KINDS = {
    "mesh": ("-c", "local-x4", "--mesh", "data=2,tensor=2"),
    "wider": ("-c", "local-x4", "--mesh", "data=4"),
    "piped": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b"),
}
COMMANDS = {
    "clusters": ("clusters",), "devices": ("devices",), "show": ("show", "mesh.json", "--trust"),
    "show stages": ("show", "piped.json", "--trust"), "show a stage": ("show", "piped.json", "--stage", 1, "--trust"),
    "show the file": ("show", "mesh.json"), "memory": ("memory", "piped.json", "--trust"),
    "explain": ("explain", "mesh.json", "layers.0.up:linear", "--trust"),
    "explain a cut": ("explain", "piped.json", "stage:1", "--trust"),
    "diff": ("diff", "mesh.json", "wider.json", "--trust"), "check": ("check", "mesh.json", "--trust"),
    "inspect": ("inspect", "net.py:make"), "passes": ("inspect", "net.py:make", "--passes"),
    "fits": ("fits", "net.py:make", "-c", "local-x4", "--like", "dp=4"),
    "plan": ("plan", "net.py:make", "-c", "local-x4", "--stages", 2, "--microbatches", 2, "--schedule", "1f1b"),
    "plan --top": ("plan", "net.py:make", "-c", "local-x4", "--top", 3, "--like", "dp=4", "--like", "dp=2,pp=2,m=2"),
}  # fmt: skip
WITHOUT_TABLES = {"fits"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_all(tmp_path_factory.mktemp("narrow"), KINDS)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[FittedTable]:
    """The tables that are printed, on a terminal of 80 columns."""
    monkeypatch.setattr(terminal, "WIDE", WIDTH)
    monkeypatch.delenv("COLUMNS", raising=False)
    tables: list[FittedTable] = []
    real = FittedTable.__rich_console__

    def noted(self: FittedTable, *args: Any) -> Iterator[Any]:
        tables.append(self)
        return real(self, *args)

    monkeypatch.setattr(FittedTable, "__rich_console__", noted)
    return tables


def text_of(table: FittedTable, width: int) -> str:
    file = io.StringIO()
    Terminal(file=file, width=width, markup=False, highlight=False).print(table)
    return file.getvalue()


def heights(table: FittedTable, width: int) -> list[int]:
    """Lines of each row, which lines are drawn between."""
    table.show_lines = True
    found = [0]
    for line in text_of(table, width).rstrip("\n").split("\n"):
        if line and set(line) <= set("─├┼┤┡╇┩━└┴┘"):
            found.append(0)
        else:
            found[-1] += 1
    return found[1 : 1 + len(table.rows)]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_row_takes_more_than_three_lines(
    folder: Path, printed: list[FittedTable], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = command(*COMMANDS[name])
    assert code == 0, err
    assert bool(printed) == (name not in WITHOUT_TABLES), out
    for table in list(printed):
        assert text_of(table, WIDTH).rstrip() in out
        assert max(map(len, text_of(table, WIDTH).splitlines())) <= WIDTH
        assert len(heights(table, WIDTH)) == len(table.rows)
        assert max(heights(table, WIDTH), default=0) <= MOST_LINES, text_of(table, WIDTH)


def wide_table() -> FittedTable:
    table = FittedTable("name", title="a title")
    table.add_column("number of things", justify="right")
    table.add_column("first", below=2)
    table.add_column("second", below=1, named=False)
    table.add_row("a", "1", "x" * 30, "words of the second " * 2)
    table.add_row("a name that is longer than the room for names", "22", "", "")
    return table


def test_columns_move_below_in_order() -> None:
    assert "┏" in text_of(wide_table(), 200)
    lines = [line.rstrip() for line in text_of(wide_table(), 90).splitlines()]
    assert lines[0] == "a title" and CUT not in "\n".join(lines)
    row = next(k for k, line in enumerate(lines) if line.startswith("a  "))
    assert lines[row].endswith("words of the second words of the second")
    assert lines[row + 1] == "    first " + "x" * 30
    narrow = text_of(wide_table(), 50)
    assert f"    first {'x' * 30}; words" in narrow and "first" not in narrow.split("─\n")[0]


def test_what_does_not_fit_is_cut_and_says_so() -> None:
    table = FittedTable("name", "text")
    table.add_row("a", "word " * 100)
    text = text_of(table, 40)
    assert max(heights(table, 40)) == MOST_LINES and f"{CUT} stands for" in text.replace("\n", " ")
    assert CUT not in text_of(table, 600)


def test_the_width_of_a_pipe_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.out().width == terminal.WIDE
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal.out().width == 77
    monkeypatch.setenv("COLUMNS", "wide")
    assert terminal.out().width == terminal.WIDE
