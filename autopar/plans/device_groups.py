"""Devices of a plan's stages, as many as their meshes have, each group on its own; and what a group's stages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import MeshError, PlanError
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from cost_models.schedules.actions import Schedule


def check_places(schedule: Schedule, meshes: Sequence[Mesh], devices: Sequence[Sequence[int]]) -> None:
    """Refuse places of stages that cannot be; both lists are by stage.

    Raises:
        PlanError: as for :meth:`autopar.plans.plan.Plan.validate`.
    """
    if schedule.n_stages != len(meshes):
        raise PlanError(f"the schedule has {schedule.n_stages} stages, the plan {len(meshes)}")
    for number, (mesh, ranks) in enumerate(zip(meshes, devices, strict=True)):
        if mesh.n_devices != len(ranks):
            raise PlanError(f"stage {number} is planned for {mesh.n_devices} devices and placed on {len(ranks)}")
        if len({*ranks}) != len(ranks):
            raise PlanError(f"stage {number} names a device twice: {', '.join(map(str, ranks))}")
    owner: dict[int, int] = {}
    for group, of_group in enumerate(schedule.stages_of_rank):
        sets = {frozenset(devices[s]) for s in of_group}
        if len(sets) > 1:
            raise PlanError(f"stages {list(of_group)} belong together in the schedule but are on different devices")
        for device in next(iter(sets), frozenset()):
            if owner.setdefault(device, group) != group:
                raise PlanError(f"device {device} is in group {owner[device]} and in group {group}")


def check_within(devices: Sequence[Sequence[int]], n: int, there: str) -> None:
    """Refuse stages on ranks beyond those that are there; devices are by stage.

    Raises:
        MeshError: with the stage, the rank, and how many there are.
    """
    for number, ranks in enumerate(devices):
        if max(ranks, default=0) >= n:
            raise MeshError(f"stage {number} is on rank {max(ranks)}, {n} {there}: 0 to {n - 1}")


def stored_differently(stages: Sequence[tuple[Mesh, Mapping[str, State]]]) -> list[str]:
    """Return the names of tensors that stages of one group of devices store in more than one placement.

    A rank has one tensor for all stages that it runs. A tensor that nothing cuts is the same one on any mesh. Each
    stage is its mesh and the placements of what it stores, by name.
    """
    placements: dict[str, set[tuple[Mesh, State] | None]] = {}
    for mesh, states in stages:
        for name, state in states.items():
            placements.setdefault(name, set()).add((mesh, state) if state.is_cut else None)
    return [name for name, different in placements.items() if len(different) > 1]
