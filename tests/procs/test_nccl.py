"""Pipelines of real processes under NCCL's rules: no hang, the numbers of one device, the same groups on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from nccl_rules import SHARED
from procs.nccl import compare_under, over_the_world
from procs.pipelines import MODELS, ONE, SCHEDULES, THREE, TWO, Config, by_three, microbatches_from

from autopar.errors import RunError
from autopar.placements import Mesh
from autopar.runtime.launch import run_local

PAIR: Mesh = (("data", 2),)
SQUARE: Mesh = (("data", 2), ("tensor", 2))


def check(n: int, shared: str, configs: Sequence[Config], late: float = 0.0) -> None:
    ranks: list[Any] = run_local(compare_under, n, shared, configs, late, timeout=600)
    for rank, rows in enumerate(ranks):
        for config, row in zip(configs, rows, strict=True):
            worst = max(row["loss"], row["gradient"][0], row["clip"], row.get("weight", (0.0,))[0])
            assert worst <= 1e-9, f"{config} rank {rank}: {row}"


@pytest.mark.parametrize("shared", SHARED)
def test_unequal_groups(shared: str) -> None:
    """Stages on two ranks and on one, tensors that skip a stage, an embedding that two stages hold."""
    check(3, shared, [
        Config("gpt2", "1f1b", (PAIR, ONE), 4, seed=1),
        Config("unet", "zb-h1", (ONE, ONE, ONE), 2, evaluate=True),
    ], late=1.0)  # fmt: skip


def test_one_channel_for_both_directions_hangs() -> None:
    with pytest.raises(RunError, match="never ended"):
        run_local(over_the_world, 2, "pair", Config("mlp", "1f1b", TWO, 4), timeout=120)


def sweep(name: str, meshes: tuple[Mesh, ...]) -> list[Config]:
    """Every schedule."""
    found = []
    for i, (schedule, per_group) in enumerate(SCHEDULES.items()):
        k = microbatches_from(schedule, len(meshes), 4)
        zoo = by_three(name, k) if THREE in meshes else {"rows": 2 * k if 8 % k else 0}
        stages = len(meshes) * per_group
        found.append(Config(name, schedule, meshes, k, stages=stages, cuts=i, seed=i, zoo=zoo, even=i % 2 == 0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(
    "meshes", [TWO, (PAIR, ONE), (PAIR, PAIR), (THREE, ONE), (PAIR, ONE, ONE), (ONE,) * 4, (SQUARE, PAIR)], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_all_schedules(name: str, meshes: tuple[Mesh, ...], shared: str) -> None:
    n = sum({ONE: 1, PAIR: 2, THREE: 3, SQUARE: 4}[mesh] for mesh in meshes)
    check(n, shared, sweep(name, meshes))
