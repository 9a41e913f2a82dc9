"""Pipelines on real processes give the numbers of one device: losses, gradients, weights after two AdamW steps."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from procs.pipelines import (
    MODELS,
    ONE,
    SCHEDULES,
    THREE,
    TWO,
    Config,
    by_three,
    chosen_microbatches,
    compare,
    evaluates,
    fails_in_the_middle,
    microbatches_from,
    odd_eval,
    peaks,
    planned_on_three,
    refused_rows,
    searched_from_a_script,
)
from procs.unread_in_stages import UNREAD, all_of_it

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

PAIR = Mesh.of(data=2)
FOUR = {"2+2": (PAIR, PAIR), "3+1": (THREE, ONE), "2+1+1": (PAIR, ONE, ONE), "1+1+1+1": (ONE,) * 4}


def check(n: int, configs: list[Config]) -> None:
    ranks: list[Any] = run_local(compare, n, configs, timeout=1200)
    problems = []
    for i, config in enumerate(configs):
        for rank, found in enumerate(ranks):
            row = found[i]
            worst = max(row["loss"], row["gradient"][0], row["clip"], row.get("weight", (0.0,))[0])
            if not worst <= 1e-9:
                problems.append(f"{config} rank {rank}: {row}")
    assert not problems, "\n".join(problems)


def test_two_ranks() -> None:
    check(2, [
        Config("mlp", "1f1b", TWO, 4, clip=0.1),
        Config("gpt2", "zb-v", TWO, 4, stages=4),  # tied embedding: first and last stage on one rank
        Config("mlp", "dualpipe-v", TWO, 4, stages=4),
        Config("resnet", "1f1b", TWO, 2),  # batch norm: statistics of a microbatch
    ])  # fmt: skip


@pytest.mark.slow
def test_recompute() -> None:
    """Blocks that run again, in whole and split backwards, cut anywhere; gathered again where parameters are; stretches
    of operators whose results nobody keeps."""
    check(2, [
        Config("gpt2", "1f1b", TWO, 4, recompute=("*.h.*",), clip=0.1),
        Config("gpt2", "zb-h1", TWO, 4, seed=1, cuts=2, make_again=True, zoo={"dropout": 0.1}),
        Config("gpt2", "zb-h1", TWO, 4, cuts=3, recompute=("*.h.*",), zoo={"dropout": 0.1}),
        Config("resnet", "zb-h1", TWO, 2, recompute=("*layer?",)),  # running statistics move once
    ])  # fmt: skip


@pytest.mark.slow
def test_two_ranks_with_more_schedules() -> None:
    check(2, [
        Config("t5", "1f1b", TWO, 2),  # the encoder's output is read by every stage of the decoder
        Config("unet", "interleaved-1f1b", TWO, 2, stages=4, evaluate=True),  # skips past stages
        Config("gpt2", "gpipe", TWO, 2, evaluate=True),
        Config("gpt2", "zb-h1", TWO, 4, cuts=2, clip=0.1),
        Config("unet", "mine", TWO, 4, cuts=1, rows=MIXED),
    ])  # fmt: skip


@pytest.mark.slow
def test_recompute_on_groups() -> None:
    check(4, [
        Config("gpt2", "zb-h1", (PAIR, PAIR), 4, seed=1, recompute=("*.h.*",), lifetime="use"),
        Config("llama", "zb-v", (ONE,) * 4, 8, stages=8, cuts=1, recompute=("*.layers.*",)),
        Config("t5", "1f1b", (PAIR, ONE, ONE), 4, seed=2, recompute=("*.block.*",)),
    ])  # fmt: skip


@pytest.mark.slow
def test_copies_gathered_again_on_groups() -> None:
    """Where a schedule would split the backward, and beside parameters that are gathered for each use."""
    check(4, [
        Config("gpt2", "zb-h1", (PAIR, PAIR), 4, seed=1, lifetime="use", gather_again=True, zoo={"dropout": 0.1}),
        Config("llama", "zb-v", (PAIR, PAIR), 4, stages=4, seed=2, gather_again=True),
    ])  # fmt: skip


@pytest.mark.slow
def test_eval_mode() -> None:
    """Dropout off, running statistics used and left alone; the model's outputs whole on every rank."""
    ranks = run_local(evaluates, 2, [
        Config("gpt2", "zb-h1", TWO, 4, zoo={"dropout": 0.1}, recompute=("*.h.*",)),
        Config("resnet", "zb-v", TWO, 2, stages=4),
    ], timeout=300)  # fmt: skip
    for rank in ranks:
        for row in rank:
            assert max(row["loss"], row["output"], row["weight"][0]) < 1e-9, row
    for apart, said in run_local(odd_eval, 2, timeout=120):
        assert apart < 1e-6
        assert re.match(r"train\(\) of a part of a parallel module, '[ab]': stages keep those modes", said)


def test_what_no_stage_reads_is_in_the_first_and_in_every_state(tmp_path: Path) -> None:
    (wrong, held), _ = run_local(all_of_it, 2, str(tmp_path), timeout=120)
    assert wrong == [] and held == [UNREAD, set()]


@pytest.mark.slow
def test_eval_mode_on_groups() -> None:
    ranks = run_local(evaluates, 4, [
        Config("gpt2", "1f1b", (PAIR, PAIR), 4, seed=1, lifetime="use", zoo={"dropout": 0.1}),
        Config("t5", "1f1b", (PAIR, PAIR), 2, seed=3, zoo={"dropout": 0.1}),
        Config("transformer_encoder", "1f1b", (PAIR, PAIR), 2, zoo={"dropout": 0.1}),
        Config("resnet", "1f1b", (PAIR, ONE, ONE), 2, seed=2),
    ], timeout=300)  # fmt: skip
    for rank in ranks:
        for row in rank:
            assert max(row["loss"], row["output"], row["weight"][0]) < 1e-9, row


MIXED = """
schedule mine stages 2 microbatches 4
rank 0 holds 0: 0F0 0F1 0B0 0F2 0I1 0F3 0I2 0W2 0W1 0B3
rank 1 holds 1: 1F0 1B0 1F1 1I1 1F2 1I2 1W1 1F3 1W2 1B3
"""


@pytest.mark.slow
def test_rows_of_actions() -> None:
    """Searched ones, and any written by hand: whole and split backwards may stand in one row."""
    check(2, [
        Config("gpt2", "searched", TWO, 4, cuts=2, clip=0.1),
        Config("gpt2", "mine", TWO, 4, cuts=2, rows=MIXED),
    ])  # fmt: skip
    waiting, disordered = run_local(refused_rows, 2, timeout=120)[1]
    assert "the schedule never ends" in waiting and "rank 0 waits at action 1, 0B0, for 1B0" in waiting
    assert "stage 0 runs microbatches [1, 0] forward and changes buffers" in disordered


@pytest.mark.slow
def test_searched_from_a_script() -> None:
    plain, name, error = run_local(searched_from_a_script, 2, (), timeout=300)[0]
    again, _, _ = run_local(searched_from_a_script, 2, ("*.h.*",), timeout=300)[1]
    assert name == "searched" and plain[-1] < plain[0]
    assert again == pytest.approx(plain, rel=1e-5)
    assert "is read by stages 0, 1, whose weights schedule 'pipedream-2bw' updates at different times" in error


def test_the_number_of_microbatches_is_chosen() -> None:
    ranks = run_local(chosen_microbatches, 2, timeout=300)
    mine, reference, number = ranks[1]
    assert number in (2, 4) and ranks[0] == ranks[1]
    assert mine == pytest.approx(reference, rel=1e-5)


def test_a_rank_that_fails_ends_the_job() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match="trouble in stage 1"):
        run_local(fails_in_the_middle, 2, timeout=120)
    assert time.monotonic() - start < 60, "the other rank waited for its timeout"


@pytest.mark.slow
def test_three_ranks_from_a_script() -> None:
    ranks = run_local(planned_on_three, 3, timeout=300)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][-1] < ranks[0][0]


@pytest.mark.slow
def test_four_ranks() -> None:
    check(4, [
        Config("mlp", "zb-h1", (PAIR, ONE, ONE), 4, seed=2, clip=0.1),
        Config("gpt2", "zb-v", (THREE, ONE), 2, stages=4, even=True, seed=3, zoo=by_three("gpt2", 2)),
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, schedule, n_microbatches", [
    ("gpt2", "1f1b", 3), ("gpt2", "1f1b", 6), ("llama", "1f1b", 6), ("t5", "1f1b", 6), ("resnet", "1f1b", 4),
    ("unet", "gpipe", 4),
])  # fmt: skip
def test_real_peaks_of_three_ranks(name: str, schedule: str, n_microbatches: int) -> None:
    """Every rank's, with all that is received ahead and under way, is what its stage's price says."""
    for real, predicted, at in run_local(peaks, 3, name, schedule, n_microbatches, {"rows": 12}, timeout=300):
        assert -0.05 < real / predicted - 1 < 0.02, (real, predicted, at)


@pytest.mark.slow
def test_four_ranks_with_other_models() -> None:
    check(4, [
        Config("gpt2", "1f1b", (PAIR, PAIR), 4, seed=1, clip=0.1),
        Config("t5", "1f1b", (PAIR, PAIR), 4, seed=4, lifetime="use"),
        Config("llama", "1f1b", (ONE,) * 4, 4, seed=6, clip=0.1),
        Config("unet", "zb-v", (PAIR, PAIR), 2, stages=4, seed=5, lifetime="use"),
    ])  # fmt: skip


def wide(name: str, meshes: tuple[Mesh, ...], wanted: Sequence[int]) -> list[Config]:
    """Every schedule, with every number of microbatches that is wanted and that it can do; every other one has stages
    of even numbers of operators."""
    found = []
    for i, (schedule, per_group) in enumerate(SCHEDULES.items()):
        for k in sorted({microbatches_from(schedule, len(meshes), k) for k in wanted}):
            zoo = by_three(name, k) if THREE in meshes else {"rows": 2 * k if 8 % k else 0}
            found.append(
                Config(
                    name, schedule, meshes, k, stages=len(meshes) * per_group, cuts=i + k, seed=i + k, zoo=zoo,
                    even=(i + k) % 2 == 0, clip=0.1,
                )
            )  # fmt: skip
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_wide(name: str) -> None:
    odd = (3, 5, 6, 7)[MODELS.index(name) % 4]
    check(2, wide(name, TWO, (1, 2, 4, 8, odd)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_three_ranks_wide(name: str) -> None:
    check(3, wide(name, (PAIR, ONE), (2,)))


@pytest.mark.slow
@pytest.mark.parametrize("groups", FOUR)
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_wide(name: str, groups: str) -> None:
    meshes = FOUR[groups]
    check(4, wide(name, meshes, ((1, 2, 4)[MODELS.index(name) % 3], 8)))
