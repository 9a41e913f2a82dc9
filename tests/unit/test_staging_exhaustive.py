"""The dynamic program agrees with an enumeration of all cuts, submeshes and recompute counts, to the last bit.

Costs are small whole numbers of sixty-fourths: no sum rounds, so equal plans have equal estimates.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from oracles.exhaustive import exhaustive

from cost_models.schedules import SCHEDULES, fill_of
from cost_models.staging import NothingFits, Pool, StageCost, StagingProblem, Submesh, evaluate, stage


def instance(rng: random.Random, n_types: int, tight: float) -> StagingProblem:
    """A chain of a few classes of blocks on up to six devices of up to two types."""
    n_blocks = rng.randint(1, 5)
    pools = tuple(Pool(f"t{i}", (rng.randint(1, 4),), rng.randint(20, 60) * tight) for i in range(n_types))
    submeshes = []
    for pool in pools:
        for size in range(1, pool.n_devices + 1):
            if size == 1 or rng.random() < 0.6:
                submeshes += [Submesh(pool.device_type, size, shape) for shape in ("a", "b")[: rng.randint(1, 2)]]
    classes = [rng.randint(0, 2) for _ in range(n_blocks)]
    seed = rng.random()

    def number(low: int, high: int, *key: object) -> float:
        return random.Random(f"{seed} {key}").randint(low * 64, high * 64) / 64

    @cache
    def cost(first: int, last: int, s: Submesh) -> StageCost | None:
        run = tuple(classes[first : last + 1])
        if number(0, 10, run, s, "none") < 0.5:
            return None
        n = len(run)
        act = number(1, 8, run, s, "act") * n
        return StageCost(
            number(1, 4, run, s, "f") * n,
            number(2, 8, run, s, "b") * n,
            number(0, 12, run, s, "step"),
            number(1, 12, run, s, "static") * n,
            act,
            None if number(0, 10, run, s, "no") < 1 else act / 4,
            number(0, 2, run, s, "extra") * n,
        )

    @cache
    def transfer(cut: int, a: Submesh, b: Submesh) -> float:
        return number(0, 2, classes[cut - 1], classes[cut], a, b)

    return StagingProblem(
        n_blocks, pools, tuple(submeshes), cost, transfer, classes, overlap=rng.random() < 0.5,
        all_devices=rng.random() < 0.3, recompute=rng.choice(["never", "stage", "blocks"]),
        max_stages=rng.choice([None, None, 2]),
    )  # fmt: skip


@pytest.mark.parametrize("schedule", [*sorted(SCHEDULES), "interleaved-1f1b:3"])
def test_equal_to_all_ways(schedule: str) -> None:
    rng = random.Random(schedule)
    feasible = several = 0
    for trial in range(60 if schedule == "1f1b" else 30):
        problem = instance(rng, 1 + trial % 2, rng.choice([0.5, 1.0, 4.0]))
        m = rng.choice([1, 2, 4, 8])
        best = exhaustive(problem, m, schedule)
        if not best:
            with pytest.raises(NothingFits):
                stage(problem, m, schedule)
            continue
        feasible += 1
        several += len(best[0].stages) > 1
        n = rng.randint(1, 3)
        found = stage(problem, m, schedule, n_candidates=n)
        exact = fill_of(schedule).bubble in (1, 0.5)  # sixths round
        for a, b in zip(found, best[:n], strict=True):
            assert a.seconds == b.seconds if exact else a.seconds == pytest.approx(b.seconds, rel=1e-12), (trial, a, b)
            again = evaluate(problem, fill_of(schedule), m, [s.choice for s in a.stages])
            assert again.seconds == a.seconds and all(s.needed_bytes <= s.memory_bytes for s in a.stages)
        assert found[0].lower_bound_seconds == pytest.approx(found[0].seconds, rel=1e-12)
    assert feasible >= 15 and several >= 3, "the instances test something"
