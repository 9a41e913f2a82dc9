"""Pieces that are not equal, with real processes: the numbers of one device on 3 ranks, and checkpoints between meshes.

In one process the same is tried on many more meshes and plans: ``tests/world/test_uneven.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from procs import cases
from procs.in_turn import several
from procs.pipelines import Config
from procs.test_pipeline import check as check_pipelines
from procs.test_train import check, of

from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

TWO, THREE, FOUR = Mesh.of(data=2), Mesh.of(data=3), Mesh.of(data=4)


def test_parameters_of_any_size_are_stored_in_pieces() -> None:
    """ZeRO on 3 ranks, none of which divides a parameter: hidden sizes are 64 and 128."""
    zero = {"params": {"*": "S0"}}
    check(3, [
        of("mlp", THREE, options=zero, microbatches=2, clip=0.1),  # ZeRO-1
        of("mlp", THREE, options=zero, lifetime="use", microbatches=2, clip=0.1),  # ZeRO-3
        of("mlp", THREE, options=zero, foreach=True),
        of("gpt2", THREE, seed=2, lifetime="use"),
    ])  # fmt: skip


VOCABULARY = {
    "zoo": {"vocabulary": 50257, "rows": 4},
    "options": {"constraints": {"lm_head:linear": {"data": "n"}, ":cross_entropy_loss": {"data": "v"}}},
}
"""Of 50257 words, cut in embedding, head and loss."""


@pytest.mark.slow
def test_operators_are_cut_into_uneven_pieces() -> None:
    """8 rows, 16 tokens, 64 features on 3 ranks; and a vocabulary."""
    check(3, [of("gpt2", THREE, **VOCABULARY, clip=0.1), of("mlp", THREE, seed=0)])


@pytest.mark.slow
def test_more_operators_are_cut_into_uneven_pieces() -> None:
    check(3, [of("resnet", THREE, seed=2)])
    check(2, [of("gpt2", TWO, **VOCABULARY)])


@pytest.mark.slow
def test_six_heads_on_four_ranks() -> None:
    """2, 2, 2 and 0 heads; the projection behind them is cut into blocks of a head's 8 features."""
    heads = {
        "zoo": {"heads": 6, "hidden": 48},
        "options": {"constraints": {
            "*:scaled_dot_product_attention": {"data": "h"}, "*attn.c_proj:addmm": {"data": "k*8"},
        }},
    }  # fmt: skip
    check(4, [of("gpt2", FOUR, **heads), of("gpt2", FOUR, **heads, lifetime="use", microbatches=2)])


@pytest.mark.slow
def test_rows_of_an_uneven_batch_go_through_its_flattening() -> None:
    """8 rows over 3 ranks; tokens of all rows in one dim of the loss are cut into multiples of a row's 16."""
    rows = {"options": {"constraints": {":cross_entropy_loss": {"data": "n*16"}, "*:layer_norm": {"data": "b"}}}}
    check(3, [of("gpt2", THREE, **rows)])


@pytest.mark.slow
def test_more_random_plans() -> None:
    check(3, [
        *(of(name, THREE, seed=seed) for name, seed in (("gpt2", 2), ("llama", 1), ("resnet", 3))),
        of("gpt2", THREE, seed=1, lifetime="step"),
        of("gpt2", THREE, seed=3, lifetime="use", microbatches=2),
    ])  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_of_uneven_pieces_is_read_on_another_mesh(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    calls = {"save": ("save", path, "gpt2", THREE, 4), "round trip": ("full_round_trip", "gpt2", THREE, 4)}
    results = run_local(several, 3, "cases", calls)[0]
    assert results["round trip"]["changed"] and results["round trip"]["again"]
    state, loss = results["save"]
    there, loss_there = run_local(cases.load, 2, path, "gpt2", TWO, 2)[0]
    for name in state:
        assert torch.equal(state[name], there[name]), name
    assert abs(loss - loss_there) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "1f1b"])
def test_uneven_pieces_of_microbatches_cross_between_stages(schedule: str) -> None:
    """4 rows of a microbatch, 16 tokens and 64 features on 3 ranks, whose backward is split in two or not; then one."""
    stages = 4 if schedule == "zb-v" else 2
    check_pipelines(4, [
        Config("gpt2", schedule, (THREE, Mesh.of(data=1)), 2, stages=stages, seed=seed, cuts=seed, lifetime=lifetime)
        for seed, lifetime in ((1, ""), (2, "use"))
    ])  # fmt: skip
