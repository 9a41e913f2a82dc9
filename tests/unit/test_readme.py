"""The first Python block of README runs as written, on one device and under torchrun, and prints the block below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+")


def quickstart() -> tuple[str, list[str]]:
    """The script, and the lines of its output."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    first = next(i for i, (language, _) in enumerate(blocks) if language == "python")
    assert blocks[first + 1][0] == "text", "the output stands below the script"
    return blocks[first][1], blocks[first + 1][1].splitlines()


def same_line(found: str, expected: str) -> bool:
    """Words agree, and numbers up to one unit of the last digit that is shown."""
    if NUMBER.sub("", found) != NUMBER.sub("", expected):
        return False
    pairs = zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True)
    return all(abs(float(a) - float(b)) < 1.5 * 10 ** -len(b.partition(".")[2]) for a, b in pairs)


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_quickstart_prints_what_stands_below_it(ranks: int | None, tmp_path: Path) -> None:
    script, expected = quickstart()
    (tmp_path / "train.py").write_text(script)
    launcher = () if ranks is None else ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.sub(r"(?=step \d)", "\n", done.stdout).splitlines()  # two ranks may write on one line
    found, wanted = sorted(filter(None, lines)), sorted(expected * (ranks or 1))
    assert len(found) == len(wanted), f"it prints\n{done.stdout}"
    assert all(map(same_line, found, wanted)), f"it prints\n{done.stdout}"
