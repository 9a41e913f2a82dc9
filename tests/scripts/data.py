"""Small data in the formats that the scripts read, made in the folder where a script runs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np


def nothing(folder: Path) -> None:
    """The stubs make it."""


def tokens(folder: Path) -> None:
    """nanoGPT's: 16-bit numbers of tokens, without a vocabulary beside them."""
    place = folder / "data" / "noise"
    place.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for name, count in (("train.bin", 4000), ("val.bin", 1000)):
        (drawn.integers(0, 64, count) ** 2 % 61).astype(np.uint16).tofile(place / name)


def text(folder: Path) -> None:
    """A text of sentences."""
    drawn = random.Random(0)
    sentence = "O God, O God! how weary, stale, flat and unprofitable seem to me all the uses of this world!\n"
    (folder / "input.txt").write_text("".join(sentence[drawn.randrange(8) :] for _ in range(40)), encoding="utf-8")
    (folder / "out" / "chargpt").mkdir(parents=True)


def results(folder: Path) -> None:
    """Where a script puts pictures."""
    (folder / "results").mkdir(exist_ok=True)


def pictures(folder: Path) -> None:
    """Names of pictures; what is in them follows from the name (``stubs/PIL``)."""
    for part, count in (("train", 10), ("test", 5)):
        place = folder / "dataset" / "BSDS300" / "images" / part
        place.mkdir(parents=True)
        for i in range(count):
            (place / f"{i}.png").touch()


def words(folder: Path) -> None:
    """Three texts of words."""
    place = folder / "data" / "words"
    place.mkdir(parents=True)
    drawn = random.Random(0)
    for name, count in (("train", 60), ("valid", 25), ("test", 25)):
        lines = (" ".join(f"w{drawn.randrange(8) + i % 5}" for i in range(9)) for _ in range(count))
        (place / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
