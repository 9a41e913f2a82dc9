"""A pipelined plan: stages, each with a plan of its own, and the schedule that orders their work.

The schedule's ranks are *groups* of devices: all stages of a group run on the same devices, and groups share none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import MeshError, PlanError
from autopar.placements import Mesh, n_devices
from autopar.plan import Crossing, Pins, StagePlan
from cost_models.pipeline.actions import Schedule


@dataclass(frozen=True)
class PipelinePins:
    """What the user asked of a pipeline; what is empty or None was left to the planner.

    Attributes:
        cuts: as they were given, one for every stage but the first: module paths or operators.
        mesh: of every group.
        plan: wishes about operators, parameters, inputs, outputs and memory, by the names of the whole model.
    """

    stages: int | None = None
    cuts: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    microbatches: int | None = None
    mesh: Mesh | None = None
    plan: Pins = field(default_factory=Pins)


@dataclass(frozen=True)
class PipelinePlan:
    """Decisions for one model on several groups of devices.

    Attributes:
        fingerprint: of the whole graph, at the size of one microbatch.
        schedule: what each group does in which order; its number of microbatches is that of a step.
        crossings: what stages take from each other.
        seconds: of a training step, simulated.
        pins: what the user asked for, so that stages can be solved again with the same wishes.
    """

    fingerprint: str
    cluster: str
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    crossings: tuple[Crossing, ...] = ()
    optimizer: str = "adamw"
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    pins: PipelinePins = field(default_factory=PipelinePins)

    @property
    def microbatches(self) -> int:
        return self.schedule.n_microbatches

    @property
    def starts(self) -> tuple[str, ...]:
        """First operators of all stages but the first, as :func:`autopar.staging.cut` takes them."""
        return tuple(s.first for s in self.stages[1:])

    @property
    def n_devices(self) -> int:
        return len({d for s in self.stages for d in s.devices})

    def of_graphs(self, fingerprint: str, of_stages: Sequence[str]) -> PipelinePlan:
        """The same decisions for a model with the same operators, such as one in another precision.

        Args:
            of_stages: fingerprints of the stages' graphs.
        """
        stages = (replace(stage, fingerprint=own) for stage, own in zip(self.stages, of_stages, strict=True))
        return replace(self, fingerprint=fingerprint, stages=tuple(stages))

    def validate(self) -> PipelinePlan:
        """Itself.

        Raises:
            PlanError: stages and schedule do not agree, a mesh does not have as many devices as it names or names one
                twice, stages of a group are on different devices, or groups share a device.
        """
        check_places(self.schedule, [s.mesh for s in self.stages], [s.devices for s in self.stages])
        return self


def check_places(schedule: Schedule, meshes: Sequence[Mesh], devices: Sequence[Sequence[int]]) -> None:
    """Refuse places of stages that cannot be; both lists are by stage.

    Raises:
        PlanError: as for :meth:`PipelinePlan.validate`.
    """
    if schedule.n_stages != len(meshes):
        raise PlanError(f"the schedule has {schedule.n_stages} stages, the plan {len(meshes)}")
    for number, (mesh, own) in enumerate(zip(meshes, devices, strict=True)):
        n = n_devices(mesh)
        if n != len(own):
            raise PlanError(f"stage {number} is planned for {n} devices and placed on {len(own)}")
        if len({*own}) != len(own):
            raise PlanError(f"stage {number} names a device twice: {', '.join(map(str, own))}")
    owner: dict[int, int] = {}
    for group, held in enumerate(schedule.stages_of_rank):
        sets = {frozenset(devices[s]) for s in held}
        if len(sets) > 1:
            raise PlanError(f"stages {list(held)} belong together in the schedule but are on different devices")
        for device in next(iter(sets), frozenset()):
            if owner.setdefault(device, group) != group:
                raise PlanError(f"device {device} is in group {owner[device]} and in group {group}")


def check_within(devices: Sequence[Sequence[int]], n: int, there: str) -> None:
    """Refuse stages on ranks beyond those that are there; devices are by stage.

    Raises:
        MeshError: with the stage, the rank, and how many there are.
    """
    for number, own in enumerate(devices):
        if max(own, default=0) >= n:
            raise MeshError(f"stage {number} is on rank {max(own)}, {n} {there}: 0 to {n - 1}")


__all__ = ["PipelinePins", "PipelinePlan", "check_places", "check_within"]
