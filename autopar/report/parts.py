"""Top-level parts of a model with several lists of blocks, and how each is laid out: encoder, projector, decoder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.plans.plan import Plan, StagePlan
from autopar.report.axes_in_words import AxisUse
from autopar.report.block_names import lists_of
from autopar.report.plan_in_words import mesh_by_mesh, stages_in_words
from autopar.words.graph import Graph


@dataclass(frozen=True)
class ModelPart:
    """One part of a model.

    Attributes:
        name: its module path.
        parameters: elements of its parameters.
        share: its part of the floating-point operations of the model's products and attention.
        stages: the stages that compute it, ``stages 0 to 3``; empty in a plan of one stage.
        layout: how it is laid out, in the terms of trainers.
    """

    name: str
    parameters: int
    share: float
    stages: str
    layout: str


def parts_of(graph: Graph) -> list[str]:
    """Return the module paths of the parts of a model in execution order; none of a model with one list of blocks.

    Parts are the modules that hold the lists of blocks, and those next to them: of ``model.vision_tower.layers.0``,
    ``model.projector`` and ``model.language_model.layers.0`` the three modules in ``model``.
    """
    lists = [path.split(".") for path in lists_of(graph)]
    if len(lists) < 2:
        return []
    common = 0
    while all(len(p) > common + 1 and p[common] == lists[0][common] for p in lists):
        common += 1
    holders = {".".join(p[: common + 1]) for p in lists}
    if len({re.sub(r"\d+", "", path) for path in holders}) < 2:  # layer1, layer2, ..: one list in several attributes
        return []
    root = lists[0][:common]
    parts: dict[str, None] = {}
    for _, node in graph.of_kind("op"):
        path = node.module.split(".")
        inside = path[:common] == root and len(path) > common
        if inside or (path[0] and path[: len(path)] != root[: len(path)]):
            parts[".".join(path[: common + 1] if inside else path[:1])] = None
    return list(parts)


def layout_of_parts(graph: Graph, plan: Plan, use: AxisUse) -> list[ModelPart]:
    """Return the parts of a model that compute or have parameters; none of a model with one list of blocks.

    Args:
        graph: the whole model's, of one microbatch.
        plan: a plan of it.
        use: what its axes shard.
    """
    whole = sum(use.flops(node.name) for _, node in graph.of_kind("op")) or 1.0
    parts = []
    for part in parts_of(graph):
        ops = {node.name for _, node in graph.of_kind("op") if _within(node.module, part)}
        params = {node.target: prod(node.out.shape) for _, node in graph.of_kind("param") if _within(node.target, part)}
        share = sum(map(use.flops, ops)) / whole
        if not share and not params:
            continue
        stages = [k for k, stage in enumerate(plan.stages) if not ops.isdisjoint(stage.ops)]
        where = stages_in_words(stages) if len(plan.stages) > 1 else ""
        of_part: Sequence[StagePlan] = [plan.stages[k] for k in stages]
        parts.append(ModelPart(part, sum(params.values()), share, where, mesh_by_mesh(use, of_part, ops, params)))
    return parts


def _within(path: str, part: str) -> bool:
    """Return True for a module or parameter of a part."""
    return path == part or path.startswith(part + ".")
