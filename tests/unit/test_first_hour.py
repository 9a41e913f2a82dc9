"""``make gpu`` says what is missing where there is no GPU, and does the same over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "first_hour.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert "no GPU here" in done.stdout and "--device cpu" in done.stdout


@pytest.mark.slow
def test_the_same_over_gloo(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    done = run("--device", "cpu", "--quick", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row["ok"] for row in json.loads(output.read_text())["rows"]}
    assert all(rows[name] for name in ("collectives and channels", "numbers, best plan", "a small training"))
