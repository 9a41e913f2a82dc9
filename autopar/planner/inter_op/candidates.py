"""Options of a search over stages, and the layouts that its estimates propose for exact plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from autopar.planner.inter_op.estimating.estimates import EstimatedCut
from autopar.planner.intra_op.mesh_plan import Options
from autopar.plans.plan_options import MOST_AXES
from autopar.words.meshes import Mesh
from cost_models.schedules import usual


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a user for a pipeline.

    Attributes:
        microbatches: their number in a step; the graph is that of one.
        groups: groups of devices; None tries every number that divides the devices, 1 included.
        schedules: names to choose from; ``interleaved-1f1b:4`` is one with a degree of interleaving.
        mesh: the mesh of every group; None tries every shape.
        starts: names of the first operators of all stages but the first; None lets the planner cut.
        options: the options for the plan of each stage.
        may_recompute: blocks may be recomputed, where memory is short or it saves time. Where ``options.recompute`` or
            the model itself (activation checkpointing) decides what is recomputed, nothing else is.
        top: the number of different layouts that are planned exactly: the best one, and the next best of those that
            its search came across.
        max_axes: the most axes of a group's mesh, if every shape is tried.
    """

    microbatches: int
    groups: int | None = None
    schedules: Sequence[str] = field(default_factory=usual)
    mesh: Mesh | None = None
    starts: Sequence[str] | None = None
    options: Options = field(default_factory=Options)
    may_recompute: bool = True
    top: int = 1
    max_axes: int = MOST_AXES


@dataclass(frozen=True)
class Candidate:
    """A layout: positions of the stages' first operators, the groups of devices, and an estimate of the step.

    Attributes:
        n_bytes: estimates of each stage's persistent bytes and of what it keeps of a microbatch; empty if not known.
        estimate: has the stages' times; None if not known.
        once_bytes: for each stage, bytes that are there only while it works; ``n_bytes`` have a part of them for each
            stage of the group.
    """

    meshes: tuple[Mesh, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: str
    bounds: tuple[int, ...]
    seconds: float
    n_bytes: tuple[tuple[float, float], ...] = ()
    estimate: EstimatedCut | None = field(default=None, compare=False, repr=False)
    once_bytes: tuple[float, ...] = ()

    @property
    def groups(self) -> int:
        """Number of groups of devices."""
        return len(self.meshes)

    def __str__(self) -> str:
        shapes = [mesh.shown() for mesh in self.meshes]
        runs = [(shape, len(list(run))) for shape, run in groupby(shapes)]
        return ", ".join(f"{n} group{'s' if n > 1 else ''} of {shape}" for shape, n in runs)
