"""A rank alone behind the training loop, while another one's process has ended: an error that says so. And ranks whose
launcher has ended: they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from procs.ending import answers, behind_the_end

from autopar.runtime.ranks.launch import run_local


@pytest.mark.parametrize("in_order", [True, False])
def test_a_rank_that_goes_on_alone_hears_who_has_ended(in_order: bool) -> None:
    said = answers(in_order, 60.0)
    assert set(said) == {"eval", "method", "save", "checkpoint"}
    for what, text in said.items():
        assert "rank 1" in text and "has ended" in text, (what, text)


def test_what_comes_behind_the_end_of_the_process_group_is_refused() -> None:
    for said in run_local(behind_the_end, 2, timeout=120):
        for what, text in said.items():
            assert text.startswith("RunError: the process group in which this module was parallelized has been"), what


def begun(pid: int) -> str:
    """When a process began; empty where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def test_a_rank_ends_in_order_while_its_threads_are_in_the_store() -> None:
    """It was aborted by C++ (``terminate called without an active exception``), now and then, after all its work."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "from procs.ending import watched; watched()"], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are spawned, and /proc is Linux's")
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    code = f"from procs.ending import launches; launches({str(tmp_path)!r})"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    try:
        for _ in range(1200):
            texts = [path.read_text() for path in tmp_path.iterdir()]
            if len(texts) == 2 and all(len(text.split()) == 2 for text in texts):
                break
            assert launcher.poll() is None
            time.sleep(0.05)
        pids = {int(pid): begun(int(pid)) for text in texts for pid in text.split()}
        assert len(pids) == 3 and all(pids.values())  # two ranks and the server that has forked them
    finally:
        launcher.kill()
        launcher.wait()
    for _ in range(200):
        left = [pid for pid, since in pids.items() if begun(pid) == since]
        if not left:
            return
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"processes {left} outlive the launcher")
