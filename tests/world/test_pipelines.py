"""Pipelines up to 16 ranks in one process give the numbers of one device: random cuts, meshes and stage plans."""

from __future__ import annotations

import random

import pytest
import torch
from zoo import ZOO

from autopar import verify as V
from autopar.capture import capture
from autopar.errors import PlanError
from autopar.pipeline import PipelinePlan, StageChoice
from autopar.planner.draw import random_plan
from autopar.planner.price import pricer
from autopar.rules.registry import rules_of
from autopar.staging import cut, hot_ops
from cost_models.pipeline.builders import build
from hardware_profiles import load_cluster

A, B, C, D = (("data", 1),), (("data", 2),), (("data", 2), ("tensor", 2)), (("data", 2), ("tensor", 4))
GROUPS = {
    "2": (A, A), "2+1": (B, A), "4": (B, B), "2+4": (B, C), "1+2+4": (A, B, C), "8": (B, B, B, B), "16": (C, C, C, C),
    "8+8": (D, D),
}  # fmt: skip
MODELS = ["gpt2", "llama", "t5", "unet", "resnet", "vit"]


def pieces(batch: dict[str, torch.Tensor], k: int) -> list[dict[str, torch.Tensor]]:
    return [{n: x.chunk(k, 0)[i] for n, x in batch.items()} for i in range(k)]


def _first(k: int, x: torch.Tensor) -> torch.Tensor:
    return x.chunk(k, 0)[0]


def check(name: str, groups: str, microbatches: int, seed: int, **zoo: float) -> None:
    case = ZOO[name](**zoo)
    first = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.chunk(microbatches, 0)[0], (case.args, case.kwargs)
    )
    captured = V.promoted(capture(case.model, *first))
    graph = captured.graph
    weights, buffers = V.state_of(captured, case.model)
    weights, buffers = V.doubled(weights), V.doubled(buffers)
    batches = pieces(V.doubled(V.inputs_of(captured, case.args, case.kwargs)), microbatches)
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    meshes = GROUPS[groups]

    def plan(starts: list[str], meshes: tuple, seed: int | None) -> PipelinePlan:  # type: ignore[type-arg]
        graphs = cut(graph, starts)
        choices, at = [], 0
        for number, (stage, mesh) in enumerate(zip(graphs, meshes, strict=True)):
            own = V.one_device(stage.graph)
            if seed is not None:
                priced = pricer(load_cluster("dgx-h100"), mesh)
                own = random_plan(stage.graph, rules_of(stage.graph), priced, seed + number)
            choices.append(StageChoice([ops[0], *starts][number], tuple(range(at, at + own.n_devices)), own))
            at += own.n_devices
        schedule = build("1f1b", len(meshes), len(meshes), microbatches)
        return PipelinePlan(graph.fingerprint, "", tuple(choices), schedule)

    reference = V.train_pipeline(captured, plan([], (A,), None), weights, buffers, batches)
    rng = random.Random(f"{name} {groups} {seed}")
    for _ in range(20):
        starts = [ops[p] for p in sorted(rng.sample(range(1, len(ops)), len(meshes) - 1))]
        try:
            mine = V.train_pipeline(captured, plan(starts, meshes, seed), weights, buffers, batches)
        except PlanError as error:
            if "is changed in stage" in str(error):
                continue
            raise
        found = V.compare("", mine, reference)
        assert found.worst < 1e-9, (starts, found)
        return
    raise AssertionError("no cut found")


@pytest.mark.parametrize("name", MODELS)
def test_two_unequal_groups(name: str) -> None:
    check(name, "2+1", 2, 0)


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_sixteen_ranks(name: str) -> None:
    check(name, "16", 2, 1)


@pytest.mark.parametrize("name", ["gpt2", "transformer_encoder"])
def test_dropout_does_not_depend_on_the_cut(name: str) -> None:
    check(name, "2+1", 2, 3, dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize("name", MODELS)
def test_sweep(name: str, groups: str, microbatches: int) -> None:
    for seed in range(3):
        check(name, groups, microbatches, 10 * seed)
