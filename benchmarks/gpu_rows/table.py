"""Results of rows, the table that is printed, and the JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """What one row says.

    Attributes:
        said: one line for the table.
        ok: None for a row that cannot fail, such as a time.
        data: numbers behind the line, for the JSON file.
    """

    said: str
    ok: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """A finished row: its name, its result and the seconds that it took."""

    name: str
    result: Result
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "" if self.result.ok is None else "ok" if self.result.ok else "FAILED"


class Table:
    """Rows so far. Every row is printed and written to the file at once, so that running out of time loses nothing."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about, self.rows = path, about, list[Row]()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.verdict:6} {row.name}: {row.result.said} ({row.seconds:.0f} s)", flush=True)
        self.write()

    def write(self) -> None:
        rows = [{"name": r.name, "seconds": round(r.seconds, 2), **asdict(r.result)} for r in self.rows]
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps({"about": self.about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def show(self) -> None:
        """Print the table as markdown."""
        width = max((len(row.name) for row in self.rows), default=4)
        print("\n| | " + "what".ljust(width) + " | result |\n|---|---|---|")
        for row in self.rows:
            print(f"| {row.verdict} | {row.name.ljust(width)} | {row.result.said} |")

    @property
    def failed(self) -> bool:
        return any(row.result.ok is False for row in self.rows)


__all__ = ["Result", "Row", "Table"]
