"""Which blocks the stages of a plan hold, in the terms in which trainers say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.layouts.stage_starts import blocks_of
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import hot_ops
from autopar.targets.target import ConfigError, Export
from autopar.words.graph import Graph


@dataclass(frozen=True)
class BlocksOfStage:
    """The blocks of a stage, in the order of the model.

    Attributes:
        blocks: their paths, such as ``model.layers.3``.
        is_first, is_last: it holds what comes before the first block (the embedding), or behind the last (head, loss).
        whole: it begins and ends at the boundary of a block; trainers have no other stages.
    """

    blocks: tuple[str, ...]
    is_first: bool
    is_last: bool
    whole: bool


def blocks_of_stages(export: Export) -> list[BlocksOfStage]:
    """Return the blocks of every stage of an export, in the order of the model."""
    return blocks_in(export.priced.plan, export.priced.pinned.graph)


def whole_blocks(export: Export, target: str) -> list[BlocksOfStage]:
    """Return the blocks of every stage of an export to a trainer whose stages hold whole blocks.

    Raises:
        ConfigError: a stage begins or ends inside a block.
    """
    stages = blocks_of_stages(export)
    cut = next((number for number, stage in enumerate(stages) if not stage.whole), None)
    if cut is not None:
        raise ConfigError(
            f"{export.layout.text}: stage {cut} begins or ends inside a block, {target}'s hold whole blocks; plan with "
            f"--for {target}"
        )
    return stages


def blocks_in(plan: Plan, graph: Graph) -> list[BlocksOfStage]:
    """Return the blocks of every stage of a plan; ``graph`` is that of a microbatch."""
    place = {graph.nodes[i].name: p for p, i in enumerate(hot_ops(graph))}
    begins = [0, *(place[stage.first] for stage in plan.stages[1:]), len(place)]
    spans = blocks_of(graph)
    stages = []
    for number in range(len(plan.stages)):
        start, end = begins[number], begins[number + 1]
        inside = [block for block, (first, last) in spans.items() if first >= start and last < end]
        parts = [block for block, (first, last) in spans.items() if first < start <= last or first < end <= last]
        stages.append(BlocksOfStage(tuple(inside), number == 0, number == len(plan.stages) - 1, not parts))
    return stages


def counts(stages: Sequence[BlocksOfStage]) -> list[int]:
    """Return how many blocks each stage has."""
    return [len(stage.blocks) for stage in stages]
