"""The small case of the studies that simulate runs: a scheduler that learns, and recovery from failures."""

from __future__ import annotations

import itertools
import math
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "studies"))
import elastic_restart
import learning_scheduler
import recovery
from scheduler_environment import LayoutScheduling, Planner, PriceTable, price_table

LAYOUTS = ((1, 1, 8), (2, 1, 4), (1, 2, 4))


def small_llama(length: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1024, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def priced() -> PriceTable:
    return price_table(small_llama, "dgx-h100", (512, 2048), LAYOUTS, 8192)


@pytest.fixture
def table() -> PriceTable:
    """Two lengths and three layouts; at the longer length the first one does not fit, and the second is best."""
    return PriceTable(
        (512, 2048), LAYOUTS, np.array([[1.0, 1.5, 3.0], [2.0, 2.0, 4.0]]), np.array([[50.0, 30.0, 20.0],
        [90.0, 60.0, 40.0]]), np.array([[0.0, 0.1, 0.2], [0.1, 0.0, 0.3], [0.2, 0.3, 0.0]]), 80.0, 1_000_000,
    )  # fmt: skip


def test_prices_are_those_of_autopar(priced: PriceTable) -> None:
    import autopar

    with torch.device("meta"):
        ids = torch.zeros(16, 512, dtype=torch.long)
    of_model = autopar.layouts(small_llama(512), {"input_ids": ids, "labels": ids}, precision="bf16-mixed")
    row = of_model.price("dgx-h100", "tp=2,dp=4,sp,zero=1")
    assert priced.seconds[0, 1] == row.seconds and priced.memory[0, 1] == row.memory_bytes
    assert priced.limit == row.limit_bytes and priced.named(1) == "tp=2,dp=4"
    assert math.isinf(priced.seconds[1, 0]) and not priced.fits[1, 0]  # four rows are not cut by dp=8
    assert (priced.moves[~np.eye(3, dtype=bool)] > 0).all() and not priced.moves.diagonal().any()


def test_a_step_gives_tokens_per_second_less_the_switch(table: PriceTable) -> None:
    environment = LayoutScheduling(table, [0, 0, 1, 1], switch_seconds=2.0, misfit_seconds=30.0, first=1)
    seen, info = environment.reset(seed=0)
    assert seen[:2].tolist() == [1, 0] and seen[2:5].tolist() == [0, 1, 0]
    assert np.allclose(seen[5:], [50 / 80, 30 / 80, 20 / 80]) and info["length"] == 0
    seen, reward, ended, over, info = environment.step(0)
    assert info["seconds"] == pytest.approx(1.0 + 2.0 + 0.1) and reward == pytest.approx(1 / 3.1)
    assert not (ended or over)
    assert environment.step(0)[1] == pytest.approx(1.0)  # no switch
    assert not environment._info(0.0, 0.0)["fits"][0]
    seen, reward, _, over, info = environment.step(0)  # does not fit at the longer length
    assert reward == 0.0 and info["seconds"] == 30.0 and info["tokens"] == 0 and info["layout"] == 0
    _, reward, _, over, _ = environment.step(1)
    assert over and reward == pytest.approx(1 / 4.1)


def test_noise_follows_the_seed_and_truth_the_step(table: PriceTable) -> None:
    truth = np.ones((50, 2, 3))
    truth[25:, 0, 1] = 2.0
    environment = LayoutScheduling(table, [0] * 50, truth=truth, noise=0.1, first=1)

    def seconds(seed: int) -> np.ndarray:
        environment.reset(seed=seed)
        return np.array([environment.step(1)[4]["seconds"] for _ in range(50)])

    first = seconds(3)
    assert (first == seconds(3)).all() and (first != seconds(4)).any()
    assert first[25:].mean() / first[:25].mean() == pytest.approx(2.0, rel=0.1)


def test_gymnasium_accepts_the_environment(table: PriceTable) -> None:
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    environment = LayoutScheduling(table, [0, 1] * 10, noise=0.1)
    checker.check_env(environment, skip_render_check=True)
    assert environment.observation_space.contains(environment.reset()[0])


def test_the_planner_is_the_best_of_all_paths(table: PriceTable) -> None:
    trace = [0, 0, 0, 1, 0, 1]
    environment = LayoutScheduling(table, trace, switch_seconds=0.3, first=2)

    def seconds(path: Any) -> float:
        environment.reset()
        return sum(environment.step(a)[4]["seconds"] for a in path)

    paths = [path for path in itertools.product(range(3), repeat=len(trace))
             if all(table.fits[length, a] for length, a in zip(trace, path))]  # fmt: skip
    assert seconds(Planner(environment).path) == pytest.approx(min(map(seconds, paths)))


def test_learners_come_near_a_planner_with_right_prices(table: PriceTable) -> None:
    found = learning_scheduler.trial(table, learning_scheduler.LEARNERS, steps=1500, seeds=1, stay=50)
    assert {name for name, (ratio, _) in found.items() if ratio > 1.01} == set(), "nothing beats right prices"
    assert found["planner that learns"][0] > 0.95 and math.isfinite(found["planner that learns"][1])
    assert found["bandit (UCB)"][0] > 0.9
    untold = learning_scheduler.trial(table, learning_scheduler.UNTOLD, steps=1500, seeds=1, stay=50)
    assert untold["bandit not told what fits"][0] < found["bandit (UCB)"][0]


def test_who_learns_beats_a_planner_whose_prices_are_wrong(table: PriceTable) -> None:
    truth = np.ones((2, 3))
    truth[0, 0], truth[1, 1] = 2.0, 4.0  # what the prices prefer is slow
    environment = LayoutScheduling(table, [0] * 100 + [1] * 100 + [0] * 300, truth=truth, switch_seconds=1.0)
    ran = {name: learning_scheduler.run(environment, make(environment), 0)[200:] for name, make in
           {"planner": Planner, **learning_scheduler.LEARNERS}.items()}  # fmt: skip
    assert learning_scheduler.rate(ran["planner that learns"]) > 1.1 * learning_scheduler.rate(ran["planner"])


def test_near_from_counts_to_the_last_bad_window() -> None:
    planner, rows = np.ones((8, 2)), np.ones((8, 2))
    assert learning_scheduler.near_from(rows, planner, 2) == 0
    rows[3, 1] = 2.0
    assert learning_scheduler.near_from(rows, planner, 2) == 4
    rows[7, 1] = 2.0
    assert learning_scheduler.near_from(rows, planner, 2) == math.inf


# --- recovery

JOB = recovery.Job(devices=16384, step=9.0, slowed=1.055, stall=0.014, write=2.8, kill=1.0, hang=61.0, restart=80.0,
                   regroup=49.0, copy=0.01)  # fmt: skip
WAITS, ELASTIC, SPARE, STAGES = recovery.STRATEGIES[1:]


def test_losses_without_waits_are_those_of_daly(monkeypatch: pytest.MonkeyPatch) -> None:
    """His formula for exponential failures, restarts after `r` seconds, and saves of `c` seconds."""
    monkeypatch.setattr(recovery, "HANGS", 0.0)
    mtbf = 3600 * recovery.DEVICE_HOURS / JOB.devices
    c, r = JOB.write, JOB.restart + JOB.kill
    tau = recovery.interval(c, mtbf)
    taken = mtbf * math.exp(r / mtbf) * math.expm1((tau + c) / mtbf) / tau
    found = recovery.lost(JOB, recovery.STRATEGIES[0], wait=0.0, failures=20000)
    assert found == pytest.approx(1 - 1 / taken, rel=0.04)
    for other in (tau / 3, 3 * tau):  # it is the best interval
        assert mtbf * math.exp(r / mtbf) * math.expm1((other + c) / mtbf) / other > taken


def test_spares_suffice_but_for_one_time_in_a_hundred() -> None:
    k = recovery.spares_for(3600.0, 7200.0)
    tail = 1 - sum(math.exp(-2.0) * 2.0**i / math.factorial(i) for i in range(k + 1))
    assert tail <= 0.01 < tail + math.exp(-2.0) * 2.0**k / math.factorial(k)


def test_who_waits_loses_the_wait_and_others_do_not() -> None:
    mtbf = 3600 * recovery.DEVICE_HOURS / JOB.devices
    short, long = (recovery.lost(JOB, WAITS, wait=wait) for wait in (0.0, 3600.0))
    restarted = math.expm1(3600 / mtbf)  # failures meet waits, too
    assert 1 / (1 - long) - 1 / (1 - short) == pytest.approx(restarted, rel=0.05)
    assert recovery.lost(JOB, ELASTIC, wait=3600.0) < 0.3 * long
    assert recovery.lost(JOB, STAGES, wait=3600.0) < recovery.lost(JOB, SPARE, wait=3600.0)
    rates = [recovery.lost(JOB, SPARE, device_hours=hours) for hours in (6000, 20000, 100000)]
    assert rates == sorted(rates, reverse=True)


def test_a_replica_less_takes_whole_rounds_of_microbatches() -> None:
    """128 replicas have 16 microbatches, 127 have 17, and 7 have 304: 293 are no equal rounds of 16 stages."""
    bubble = 15 / 7
    assert [recovery.in_slots(n) - bubble for n in (128, 127, 8, 7)] == pytest.approx([16, 17, 256, 304])


def test_the_report_draws_what_it_returns(tmp_path: Path) -> None:
    table = recovery.report([JOB], tmp_path / "plot.svg", failures=100)
    assert set(table) == {(16384, how.name) for how in recovery.STRATEGIES}
    assert all(0 < part < 1 for part in table.values())
    assert "spare stages" in (tmp_path / "plot.svg").read_text()


@pytest.mark.slow
def test_a_killed_rank_is_noticed_and_the_job_goes_on() -> None:
    found = elastic_restart.measured(2, signal.SIGKILL)
    assert {"noticed", "process", "planned", "loaded", "first step", "save", "CPU process"} <= set(found)
    assert all(seconds >= 0 for seconds in found.values()) and found["process"] > 0.1
