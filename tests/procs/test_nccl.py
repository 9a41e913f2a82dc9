"""Pipelines of real processes under NCCL's rules: no hang, the numbers of one device, the same groups on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nccl_rules import SHARED
from procs.nccl import (
    Place,
    comes_late,
    compare_models_under,
    compare_under,
    fail_at,
    members_of_other_groups,
    on_a_part_of_the_world,
    over_the_world,
    rows_of,
    with_groups_between,
)
from procs.pipelines import MODELS, ONE, SCHEDULES, THREE, TWO, Config, by_three, microbatches_from

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

PAIR = Mesh.of(data=2)
SQUARE = Mesh.of(data=2, tensor=2)


def check(n: int, shared: str, configs: Sequence[Config], late: float = 0.0) -> None:
    check_rows(configs, run_local(compare_under, n, shared, configs, late, timeout=600))


def check_rows(configs: Sequence[Config], ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    for rank, rows in enumerate(ranks):
        for config, row in zip(configs, rows, strict=True):
            worst = max(row["loss"], row["gradient"][0], row["clip"], row.get("weight", (0.0,))[0])
            assert worst <= 1e-9, f"{config} rank {rank}: {row}"


ONE_QUICK = ["pair", pytest.param("group", marks=pytest.mark.slow)]


@pytest.mark.parametrize("shared", ONE_QUICK)
def test_unequal_groups(shared: str) -> None:
    """Stages on two ranks and on one, and an embedding that both hold."""
    check(3, shared, [Config("gpt2", "1f1b", (PAIR, ONE), 2, seed=1)], late=1.0)


@pytest.mark.slow
def test_tensors_that_skip_a_stage() -> None:
    check(3, "pair", [Config("unet", "zb-h1", (ONE, ONE, ONE), 2, evaluate=True)])


@pytest.mark.slow
def test_one_channel_for_both_directions_hangs() -> None:
    with pytest.raises(RunError, match="never ended"):
        run_local(over_the_world, 2, "pair", Config("mlp", "1f1b", TWO, 4), timeout=120)


def check_failures(places: Sequence[Place], grace: float | None = None) -> None:
    """The failing rank stays alive; all others have its error, within ten seconds at most."""
    ranks = run_local(fail_at, 4, places, grace, timeout=1500)
    for at, place in enumerate(places):
        culprits = ranks[place.rank][at][1]
        assert culprits.startswith("trouble in ")
        for number, answers in enumerate(ranks):
            seconds, text = answers[at]
            assert culprits in text and seconds < 10, (number, place, seconds, text)
            assert number == place.rank or f"rank {place.rank} failed in {place.called}: ValueError: {culprits}" in text


def test_a_failure_ends_the_step_on_all_ranks() -> None:
    """In the middle of a row."""
    check_failures([Place(2, 3)], grace=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_failure_at_every_action(schedule: str) -> None:
    """Forwards, and backwards at once or in halves."""
    each = rows_of(schedule, 4)
    check_failures([Place(rank, at, schedule) for rank in range(4) for at in range(each[rank])])


@pytest.mark.slow
def test_a_failure_in_a_first_step_or_a_later_one_or_an_evaluation() -> None:
    check_failures([Place(rank, at, step=step) for step in (0, 3) for rank, at in ((0, 0), (1, 4), (3, 7))])
    check_failures([Place(rank, at, evaluate=True) for rank in range(4) for at in (0, 3)])


def check_groups(shared: str, runs: int, late: float) -> None:
    ranks = run_local(with_groups_between, 3, shared, runs, late, timeout=1500)
    groups, losses = ranks[0]
    assert ranks == [ranks[0]] * 3 and len(losses) == 2 * runs
    made = [tuple(sorted(set(group))) for group in groups]
    assert len(made) - 2 * runs <= 20, "groups of autopar's are made once, whatever is parallelized afterwards"


def test_user_groups_between_calls_of_parallelize() -> None:
    check_groups("group", 1, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED)
def test_user_groups_between_calls_of_parallelize_fifty_times(shared: str) -> None:
    check_groups(shared, 50, 3.0)


def test_the_others_wait_in_the_store_while_the_first_decides() -> None:
    """Longer than a collective of theirs may take, and for more than one entry of the store holds."""
    ranks = run_local(comes_late, 3, 4.0, timeout=120)
    assert [text for text, _ in ranks] == ["long long10000000"] * 3
    assert min(seconds for _, seconds in ranks[1:]) > 2


def test_a_mesh_of_a_part_of_the_world_leaves_the_count_of_groups_alone() -> None:
    """The third rank knows nothing of the model, and the group of all three that follows has one name everywhere."""
    ranks = run_local(on_a_part_of_the_world, 3, timeout=60)
    assert ranks[0] == ranks[1] and [number for _, number in ranks] == [3.0] * 3


def test_members_that_are_in_different_numbers_of_groups_find_each_other(tmp_path: Path) -> None:
    """torch names such a group by how many its members are in: where these are not as many, it is made for ever."""
    assert run_local(members_of_other_groups, 3, str(tmp_path), timeout=60) == [(9.0, ["step-00000001"])] * 3


def sweep(name: str, meshes: tuple[Mesh, ...]) -> list[Config]:
    """Every schedule."""
    found = []
    for i, (schedule, per_group) in enumerate(SCHEDULES.items()):
        k = microbatches_from(schedule, len(meshes), 4)
        zoo = by_three(name, k) if THREE in meshes else {"rows": 2 * k if 8 % k else 0}
        stages = len(meshes) * per_group
        found.append(Config(name, schedule, meshes, k, stages=stages, cuts=i, seed=i, zoo=zoo, even=i % 2 == 0))
    return found


GROUPS = {
    "1+1": TWO, "2+1": (PAIR, ONE), "2+2": (PAIR, PAIR), "3+1": (THREE, ONE), "2+1+1": (PAIR, ONE, ONE),
    "1+1+1+1": (ONE,) * 4, "4+2": (SQUARE, PAIR),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("models", [MODELS[:3], MODELS[3:]], ids="-".join)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("groups", GROUPS)
def test_all_schedules(groups: str, shared: str, models: tuple[str, ...]) -> None:
    """Of several models, in the same processes: starting them takes as long as all that one model does."""
    by_model = [sweep(name, GROUPS[groups]) for name in models]
    n = sum(map(int, groups.split("+")))
    ranks: list[Any] = run_local(compare_models_under, n, shared, by_model, timeout=1500)
    for i, configs in enumerate(by_model):
        check_rows(configs, [rows[i] for rows in ranks])
