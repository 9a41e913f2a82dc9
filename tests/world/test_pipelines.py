"""Pipelines up to 16 ranks in one process give the numbers of one device: random cuts, meshes and stage plans."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from procs.in_turn import marked
from procs.pipelines import MODELS, ONE, SCHEDULES, THREE, Config, by_three, make_plan, microbatches_from, size
from zoo import ZOO

from autopar.capture import Captured, capture
from autopar.comparison import program_vs_eager as V
from autopar.errors import RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import cut
from autopar.words.meshes import Mesh
from cost_models.schedules import build, parse

PAIR, SQUARE, EIGHT = Mesh.of(data=2), Mesh.of(data=2, tensor=2), Mesh.of(data=2, tensor=4)
GROUPS = {
    "2": (ONE, ONE), "2+1": (PAIR, ONE), "3+1": (THREE, ONE), "4": (PAIR, PAIR), "2+1+1": (PAIR, ONE, ONE),
    "2+4": (PAIR, SQUARE), "1+2+4": (ONE, PAIR, SQUARE), "8": (PAIR,) * 4, "16": (SQUARE,) * 4, "8+8": (EIGHT, EIGHT),
}  # fmt: skip


def pieces(batch: dict[str, torch.Tensor], k: int) -> list[dict[str, torch.Tensor]]:
    return [{n: x.chunk(k, 0)[i] for n, x in batch.items()} for i in range(k)]


class Prepared(NamedTuple):
    """A model, what it begins with, its microbatches, and how it trains whole on one device."""

    captured: Captured
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batches: list[dict[str, torch.Tensor]]
    reference: V.Trained


@functools.lru_cache(maxsize=4)
def prepared(name: str, microbatches: int, steps: int, zoo: frozenset[tuple[str, float]]) -> Prepared:
    case = ZOO[name](**dict(zoo))
    first = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.chunk(microbatches, 0)[0], (case.args, case.kwargs)
    )
    captured = V.promoted(capture(case.model, *first))
    weights, buffers = V.state_of(captured, case.model)
    weights, buffers = V.doubled(weights), V.doubled(buffers)
    batches = pieces(V.doubled(V.inputs_of(captured, case.args, case.kwargs)), microbatches)
    alone = V.one_device(cut(captured.graph, [])[0].graph)
    whole = Plan(captured.graph.fingerprint, "", (alone,), build("1f1b", 1, 1, microbatches))
    reference = V.train_pipeline(captured, whole, weights, buffers, batches, steps)
    return Prepared(captured, weights, buffers, batches, reference)


def check(
    name: str, groups: str, schedule: str, microbatches: int, seed: int, *, even: bool = False, steps: int = 2,
    **zoo: float,
) -> None:  # fmt: skip
    meshes = GROUPS[groups]
    if THREE in meshes:
        zoo = {**by_three(name, microbatches), **zoo}
    known = prepared(name, microbatches, steps, frozenset(zoo.items()))
    stages = len(meshes) * SCHEDULES[schedule]
    config = Config(name, schedule, meshes, microbatches, stages, seed, cuts=seed, even=even)
    plan = make_plan(known.captured, config)
    mine = V.train_pipeline(known.captured, plan, known.weights, known.buffers, known.batches, steps)
    found = V.compare("", mine, known.reference)
    assert found.worst < 1e-9, (config, found)


@pytest.mark.parametrize("name", marked(MODELS, ("t5", "llama", "vit", "unet", "resnet")))
def test_two_unequal_groups(name: str) -> None:
    check(name, "2+1", "1f1b", 2, 0)


@pytest.mark.parametrize("schedule", marked(SCHEDULES, ("gpipe", "interleaved-1f1b:3", "zb-h1:2", "zb-v")))
def test_schedules(schedule: str) -> None:
    check("gpt2", "2+1", schedule, 4, 1, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_sixteen_ranks(name: str) -> None:
    check(name, "16", "1f1b", 2, 1, even=True)


@pytest.mark.slow
def test_groups_of_three_and_one() -> None:
    check("gpt2", "3+1", "zb-v", 2, 2, steps=1)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "transformer_encoder"])
def test_dropout_does_not_depend_on_the_cut(name: str) -> None:
    check(name, "2+1", "1f1b", 2, 3, dropout=0.1)


@pytest.mark.slow
def test_both_ways_of_a_branch_on_a_random_number() -> None:
    """Stages that read one draw agree on it, forward and backward, in every microbatch."""
    check("opt", "2+1", "1f1b", 4, 3, layerdrop=0.5)


def test_rows_that_wait_for_each_other_are_named() -> None:
    case = ZOO["mlp"]()
    captured = capture(case.model, case.args, case.kwargs)
    plan = make_plan(captured, Config("mlp", "1f1b", (ONE, ONE), 2))
    rows = ("rank 0 holds 0: 0F0 0B0 0F1 0B1", "rank 1 holds 1: 1F1 1B1 1F0 1B0")
    stuck = parse("\n".join(("schedule stuck stages 2 microbatches 2", *rows)))
    weights, buffers = V.state_of(captured, case.model)
    batch = V.inputs_of(captured, case.args, case.kwargs)
    with pytest.raises(RunError, match="wait for each other, at 0B0, 1F1"):
        V.train_pipeline(captured, replace(plan, schedule=stuck), weights, buffers, [batch, batch])


def _cases() -> list[tuple[str, str, str, int]]:
    found = []
    for n, name in enumerate(MODELS):
        for g, (groups, meshes) in enumerate(GROUPS.items()):
            for s, schedule in enumerate(SCHEDULES):
                wanted = (1, 2, 4, 8)[(n + g + s) % 4]
                k = microbatches_from(schedule, len(meshes), wanted)
                if sum(map(size, meshes)) <= 8 or k <= 4 or schedule == "dualpipe-v":
                    found.append((name, groups, schedule, k))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "groups", "schedule", "microbatches"), _cases())
def test_sweep(name: str, groups: str, schedule: str, microbatches: int) -> None:
    """All models, groups and schedules; every other plan has stages of even numbers of operators."""
    seed = len(groups) + len(schedule) + microbatches
    rows = {} if 8 % microbatches == 0 else {"rows": 2 * microbatches}
    check(name, groups, schedule, microbatches, seed, even=seed % 2 == 0, **rows)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_numbers_of_microbatches(microbatches: int, schedule: str) -> None:
    name = MODELS[(microbatches + list(SCHEDULES).index(schedule)) % len(MODELS)]
    if microbatches_from(schedule, 2, microbatches) != microbatches:
        pytest.skip(f"{schedule} of two groups has no step of {microbatches} microbatches")
    check(name, "2+1", schedule, microbatches, microbatches, rows=2 * microbatches)
