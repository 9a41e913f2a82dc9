"""transformers' Trainer and accelerate over parallel modules, on two real ranks with cuts forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from procs.in_turn import LONG, several

from autopar.runtime.ranks.launch import run_local

pytest.importorskip("accelerate")
LOGGED = 1e-6  # what a trainer logs is rounded
LOOPS: dict[str, tuple[Any, ...]] = {
    "accelerated": ("accelerated",), "of other lengths": ("accelerated", False), "trainer": ("trainer",),
    "adapted": ("trainer", True),
}  # fmt: skip


def far(loops: list[str], folder: Path, seconds: float = 280.0) -> dict[str, Any]:
    """What is not as on one device."""
    calls = {loop: (LOOPS[loop][0], str(folder), *LOOPS[loop][1:]) for loop in loops}
    ranks = run_local(several, 2, "libraries", calls, timeout=seconds)
    return {
        f"{loop}, {what}": value
        for on_rank in ranks
        for loop, values in on_rank.items()
        for what, value in values.items()
        if not value < LOGGED
    }


@pytest.mark.slow
def test_a_loop_of_accelerate_trains_as_on_one_device(tmp_path: Path) -> None:
    assert far(["accelerated"], tmp_path) == {}


@pytest.mark.slow
def test_a_trainer_trains_as_on_one_device_with_every_length_of_batches(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert far(["of other lengths", "trainer", "adapted"], tmp_path, LONG) == {}
