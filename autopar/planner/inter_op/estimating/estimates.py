"""Cuts over groups of devices with their estimates, whichever search they come from.

The estimate is that of :mod:`cost_models.staging.estimate`, of stages that are filled with what blocks can cost
(:mod:`.filling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.estimating.filling import Filled
from autopar.words.meshes import Mesh
from cost_models.costs import costs_of
from cost_models.schedules import Fill
from cost_models.staging.estimate import StageLoad, estimated_seconds
from hardware_profiles import Cluster


@dataclass(frozen=True, order=True)
class Group:
    """Devices in row-major order of a mesh."""

    mesh: Mesh
    devices: tuple[int, ...]


@dataclass(frozen=True)
class EstimatedCut:
    """A cut with its estimate.

    Attributes:
        bounds: the first block of every stage but the first.
        stages: times of every stage, and ``stage_edge`` the seconds of a transfer over every bound; both empty where
            they are not known.
    """

    groups: tuple[Group, ...]
    schedule: Fill
    bounds: tuple[int, ...]
    stages: tuple[Filled, ...]
    stage_edge: tuple[float, ...]
    seconds: float


def stage_edge_seconds(cluster: Cluster, block: Block, source: Group, target: Group, size: int) -> float:
    """Return the seconds of a block's input from another group, of which each of ``size`` devices sends its part."""
    return costs_of(cluster).transfer(source.devices[0], target.devices[0], block.stage_edge_bytes / size)


def estimated(
    groups: Sequence[Group], fill: Fill, stages: Sequence[tuple[int, Filled]], microbatches: int,
    transfer: Callable[[int, Group, Group], float],
) -> EstimatedCut:  # fmt: skip
    """Return the cut of stages, each with its first block.

    ``transfer`` gives the seconds of the transfer before a block, by its number and the groups on both sides.
    """
    stages_of = fill.kind.placement(len(stages), len(groups))
    owner = {s: g for g, of_group in enumerate(stages_of) for s in of_group}
    stage_edge = [
        transfer(first, groups[owner[s]], groups[owner[s + 1]]) if owner[s] != owner[s + 1] else 0.0
        for s, (first, _) in enumerate(stages[1:])
    ]  # fmt: skip
    filled = tuple(s for _, s in stages)
    loads = [
        StageLoad(
            sum(filled[s].seconds for s in of_group), sum(filled[s].backward_seconds for s in of_group),
            sum(filled[s].reduction_seconds for s in of_group),
            sum(stage_edge[s] for s in of_group if s < len(stage_edge)),
        )
        for of_group in stages_of
    ]  # fmt: skip
    again = any(s.recomputed for s in filled)  # a backward that recomputes is not split
    bubble = fill.whole_bubble if again else fill.bubble
    seconds = estimated_seconds(bubble, fill.drain, microbatches, loads)
    # However few microbatches there are, the first goes all the way and back; only weight gradients may wait.
    apart = not again and fill.kind.splits
    way = sum(s.seconds - (s.weight_seconds if apart else 0.0) for s in filled) + 2 * sum(stage_edge)
    seconds = max(seconds, way + loads[0].once_seconds)
    seconds += sum(filled[s].gather_seconds for s in stages_of[0])
    seconds += max(sum(filled[s].optimizer_seconds for s in of_group) for of_group in stages_of)
    firsts = tuple(first for first, _ in stages[1:])
    return EstimatedCut(tuple(groups), fill, firsts, filled, tuple(stage_edge), seconds)
