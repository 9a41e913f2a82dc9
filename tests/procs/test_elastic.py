"""Jobs whose ranks are killed, stopped or refused: they go on, with the losses of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from procs.restarted import EVERY, STEPS

SCRIPT = str(Path(__file__).parent / "restarted.py")
TORCHRUN, ELASTIC = ["torch.distributed.run", "--standalone", "--max-restarts", "3"], ["autopar.elastic"]


def losses(
    launcher: list[str], ranks: int, how: str, folder: Path, stages: int = 1, batch: str = "global"
) -> tuple[dict[int, float], list[int]]:
    """The loss of each step, which has been the same whenever it was done, and how many ranks each attempt had."""
    folder.mkdir()
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), SCRIPT, str(folder), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "AUTOPAR_SILENCE_SECONDS": "5"}
    done = subprocess.run(
        [*command, str(stages), batch], env=environment, capture_output=True, text=True, timeout=400, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    found = {step: loss for step, loss, _ in lines}
    assert sorted(found) == list(range(STEPS)) and len(lines) - STEPS <= EVERY
    assert all(abs(loss - found[step]) < 1e-12 for step, loss, _ in lines)
    return found, [int(n) for n in (folder / "attempts").read_text().split()]


def equal(found: dict[int, float], right: dict[int, float]) -> bool:
    return max(abs(found[step] - right[step]) for step in right) < 1e-9


@pytest.mark.slow  # it starts seven interpreters; what a killed rank leaves is in tests/unit/test_attempts.py, too
def test_torchrun_starts_ranks_again(tmp_path: Path) -> None:
    """What the killed ranks had left in the store was read by the next ones: none of seven went on."""
    _, attempts = losses(TORCHRUN, 2, "killed", tmp_path / "job")
    assert attempts == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "stopped"])
def test_torchrun_starts_ranks_again_after_anything(how: str, tmp_path: Path) -> None:
    _, attempts = losses(TORCHRUN, 2, how, tmp_path / "job", stages=2)
    assert attempts == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "attempts"),
    [("killed", 3, [3, 2, 3]), ("stopped", 3, [3, 2, 3]), ("error", 2, [2, 2]), ("refused 2", 4, [4, 3, 2])],
)
@pytest.mark.parametrize(("stages", "batch"), [(1, "global"), (1, "local"), (2, "global")])
def test_a_job_goes_on(how: str, ranks: int, attempts: list[int], stages: int, batch: str, tmp_path: Path) -> None:
    found, had = losses(ELASTIC, ranks, how, tmp_path / "job", stages, batch)
    right, _ = losses(TORCHRUN, 1, "killed", tmp_path / "one", stages, "global")
    assert had[: len(attempts)] == attempts and equal(found, right)
