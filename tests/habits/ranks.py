"""Habits on ranks that are processes of their own, through the front door."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.plan import Plan
from autopar.rules.registry import rules_of
from habits import HABITS
from habits.base import BATCHES, batch, loss_fn, made
from habits.training import TWO, Step, differences, eager, module_step, scalar
from hardware_profiles import abstract_cluster


def _whole(tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in tensors.items()}


def train(name: str, seed: int) -> list[Step]:
    """Three batches under a random plan of two ranks; everything is whole."""
    kind = HABITS[name]
    outside, (x, y) = loss_fn(kind), batch(kind, 0)
    args, given = ((x,), {"loss_fn": outside, "targets": (y,)}) if outside else ((x, y), {})
    graph = capture(made(kind), args, **given).graph  # type: ignore[arg-type]
    plan = Plan.alone(random_plan(graph, rules_of(graph), pricer(abstract_cluster({"data": 2}), TWO), seed))
    pm = autopar.parallelize(made(kind), dist.get_world_size(), args, plan=plan, **given)  # type: ignore[arg-type]
    steps = []
    for i in range(BATCHES):
        step = module_step(pm, batch(kind, i), lambda m, *a: scalar(m(*a)))
        steps.append(Step(step.loss, _whole(step.gradients), _whole(step.inputs), _whole(step.buffers)))
    return steps


def outcomes(names: Sequence[str], seed: int) -> list[str]:
    """For every habit ``same``, ``refused`` as expected, or what is wrong, in words."""
    said = []
    for name in names:
        kind = HABITS[name]
        try:
            found = train(name, seed)
            wrong = "" if kind.random else "; ".join(differences(found, eager(kind)))
            said.append(wrong or "same")
        except AutoparError as error:
            expected = kind.refused and re.search(kind.refused, str(error))
            said.append("refused" if expected else f"{type(error).__name__}: {error}")
    return said
