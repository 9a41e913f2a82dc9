"""The page of docs with the published error, its picture, and the table of error bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from published.pricing import Priced


def write_page(path: Path, priced: Sequence[Priced], refused: Mapping[tuple[str, str], int]) -> None:
    """Write the page and its picture."""


def write_errors(path: Path, priced: Sequence[Priced]) -> None:
    """Write the bands."""
