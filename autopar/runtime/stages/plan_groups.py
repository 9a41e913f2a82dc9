"""The process groups that a plan needs, and the check that a device mesh is the plan's.

The list is the same on every rank, since it follows from the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.stage_graphs import StageGraph
from autopar.rules.strategy import joinable_axes
from autopar.runtime.parameters.redistribution import hop_axes
from autopar.runtime.ranks.groups import Wanted, blocks, channel, groups_for
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh


def check_device_mesh(device_mesh: DeviceMesh, mesh: Mesh) -> None:
    """Check that the plan's mesh and the device mesh have the same axes.

    Raises:
        MeshError: names or sizes differ.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError("the DeviceMesh has no axis names; make it with mesh_dim_names=('data', ...)")
    have = Mesh((name, device_mesh.size(i)) for i, name in enumerate(names))
    if have != mesh:
        show = [m.shown() for m in (mesh, have)]
        raise MeshError(f"the plan is for mesh {show[0]}, the DeviceMesh is {show[1]}; plan again for this mesh")


def groups_of(
    parts: Sequence[StageGraph], plan: Plan, holders: Iterable[tuple[int, ...]], pairs: Iterable[tuple[int, int]]
) -> list[Wanted]:
    """List all groups of a pipeline, in the order in which they are made.

    One of all ranks, for what is the same everywhere (the loss); of each stage one along each axis of its mesh, and
    over several axes where a parameter is gathered, or rows are exchanged, over them at once; the holders of tied
    parameters; and a channel for each ordered pair of ranks that talks.

    Args:
        holders: the ranks that have the same shard of a tied parameter, for each shard.
        pairs: sender and receiver of every message, of what crosses between stages and of tied parameters.
    """
    wanted = [Wanted(tuple(range(plan.n_devices)))]
    for part in parts:
        stage = plan.stages[part.number]
        wanted += _of_stage(part.graph, stage, stage.devices)
    wanted += [Wanted(ranks) for ranks in holders]
    wanted += [channel(source, target) for source, target in pairs]
    return list(dict.fromkeys(wanted))


def mesh_of_own(graph: Graph, stage: StagePlan, device_type: str, devices: Sequence[int]) -> DeviceMesh:
    """Make a mesh of autopar's own groups, for a model on one mesh; all ranks of ``devices`` call it alike.

    The groups of a caller's mesh are the caller's: what waits in them cannot be aborted without breaking what else they
    are used for. torch makes their communicators only when they are used, so they cost nothing beside these.

    Args:
        devices: ranks, in row-major order of the plan's mesh.

    Raises:
        MeshError: as for :meth:`~autopar.runtime.ranks.groups.Groups.make`.
    """
    groups = groups_for(torch.device(device_type), devices)
    everyone = Wanted(tuple(sorted(devices)))
    groups.make([everyone, *_of_stage(graph, stage, devices)])
    return groups.mesh(stage.mesh, devices)


def group_of_own(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return a group of autopar's own with the ranks of ``group``, which all call it; ``group`` if impossible."""
    ranks = dist.get_process_group_ranks(group)
    groups = groups_for(device, ranks)
    if len(ranks) == 1 or not groups.possible:
        return group
    groups.make([Wanted(groups.ranks)])
    return groups.of(ranks)


def axes_together(graph: Graph, stage: StagePlan) -> list[tuple[int, ...]]:
    """List the sets of several axes of a stage's mesh over which parameters are gathered, or gradients reduced."""
    shapes = {node.target: node.out.shape for _, node in graph.of_kind("param")}
    axes = {a for name, choice in stage.params.items() for a in hop_axes(name, choice, shapes[name], stage.mesh)}
    return sorted(each for each in axes if len(each) > 1)


def _of_stage(graph: Graph, stage: StagePlan, devices: Sequence[int]) -> Iterator[Wanted]:
    names = stage.mesh.names
    exchanges = [tuple(map(names.index, joined)) for joined in joinable_axes(graph, stage.mesh)]
    for axes in [*((axis,) for axis in range(len(stage.mesh))), *axes_together(graph, stage), *exchanges]:
        yield from map(Wanted, blocks(stage.mesh, devices, axes))
