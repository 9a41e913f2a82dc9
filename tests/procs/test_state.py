"""What is kept between steps and between runs: checkpoints, initial weights, dropout seeds; and ranks that fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from procs import cases

from autopar.errors import RunError
from autopar.runtime.launch import run_local

ONE, TWO, GRID = (("data", 1),), (("data", 2),), (("data", 2), ("tensor", 2))


def test_checkpoint_moves_between_meshes(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    state, loss = run_local(cases.save, 2, path, "gpt2", TWO, 4)[0]
    there, loss_there = run_local(cases.load, 4, path, "gpt2", GRID, 2)[0]
    assert list(state) == list(there)
    for name in state:
        assert torch.equal(state[name], there[name]), name
    assert abs(loss - loss_there) < 1e-6


def test_full_state_dict() -> None:
    found = run_local(cases.full_round_trip, 2, "gpt2", TWO, 4)
    for rank in found:
        assert rank["changed"] and rank["again"]
        unexpected, missing, shape = rank["messages"]
        assert "1 unexpected: nonsense" in unexpected
        assert "1 missing: transformer.wpe.weight" in missing
        assert "shape (3, 5) in the state dict, (64, 64) in the model" in shape


def test_meta_model_has_the_same_weights_on_any_mesh() -> None:
    one = run_local(cases.meta_state, 1, "gpt2", ONE, 1)[0]
    two = run_local(cases.meta_state, 2, "gpt2", TWO, 2)[0]
    assert list(one) == list(two) and one
    for name in one:
        assert torch.equal(one[name], two[name]), name
    spread = one["transformer.h.0.attn.c_attn.weight"].std()
    assert 0.015 < spread < 0.025


def test_dropout_does_not_depend_on_the_mesh() -> None:
    one = run_local(_losses, 1, ONE, None)[0]
    two = run_local(_losses, 2, TWO, 7)[0]
    assert len(set(one)) == len(one)
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-9


def _losses(mesh: cases.Mesh, seed: int | None) -> list[float]:
    return cases.losses("transformer_encoder", mesh, seed, dropout=0.3)


def test_rank_0_fails_to_plan_and_all_ranks_hear_it() -> None:
    first, second = run_local(cases.plan_fails_on_rank_0, 2)
    assert first == second
    assert "no plan fits" in first


def test_ranks_with_different_models_are_refused() -> None:
    for message in run_local(cases.model_differs, 2):
        assert "fingerprint" in message


def test_a_rank_that_raises_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 of 2 failed:[\s\S]*ValueError: trouble on 1"):
        run_local(cases.raise_on, 2, 1)
    with pytest.raises(RunError, match="exit code 7"):
        run_local(cases.die_on, 2, 0)
    assert time.monotonic() - start < 40


def test_time_limit_leaves_no_process() -> None:
    with pytest.raises(RunError, match="did not finish within 6 s"):
        run_local(cases.sleep, 2, 60.0, timeout=6)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if children.exists():
        for pid in children.read_text().split():
            assert b"spawn_main" not in Path(f"/proc/{pid}/cmdline").read_bytes()
