"""Everyday habits of scripts on two real ranks."""

from __future__ import annotations

from pathlib import Path

from procs.in_turn import several

from autopar.runtime.ranks.launch import run_local


def test_a_checkpoint_is_that_of_one_device(tmp_path: Path) -> None:
    calls = {"saved": ("saved", str(tmp_path)), "alone": ("saved_by_one_rank", str(tmp_path))}
    first, second = run_local(several, 2, "everyday", calls, timeout=120)
    assert first["saved"] < 1e-12 and second["saved"] < 1e-12
    assert first["alone"].startswith("RunError: rank 0 saves a state of ")
    assert "all ranks must do it" in first["alone"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "open.pt"]
