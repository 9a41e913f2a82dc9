"""Pipelined plans in a training script: :func:`autopar.plan` and :func:`autopar.parallelize` with ``stages=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured, capture
from autopar.capture.parts import NotLinear, first_part, numbers_of_parts, resized, rows_of
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.graph import Graph
from autopar.pins import pins_of, plan_pinned
from autopar.pipeline import PipelinePins, PipelinePlan, check_within
from autopar.placements import Mesh, mesh_shapes
from autopar.plan import Plan
from autopar.planfile import pipeline as files
from autopar.planner.inter_op.order import check_name
from autopar.planner.inter_op.stage_pins import check, check_counts, starts_of
from autopar.planner.inter_op.stage_search import PipelineOptions, Planned, plan_pipeline
from autopar.planner.intra_op.mesh_plan import Options
from autopar.runtime.agree import Meeting, Stopped, first_seed, share, together
from autopar.runtime.pipeline import PipelineModule
from cost_models.pipeline import parse
from hardware_profiles import Cluster

DEFAULT_SCHEDULES = PipelineOptions(1).schedules
SIMPLER = 0.001
"""A plan without pipeline and microbatches is preferred if its step is at most this much longer."""


def asked_for(
    stages: int | str | None, schedule: str | Sequence[str] | None, microbatches: int, mesh: Mesh | None,
    options: Options, cuts: Sequence[str] | None = None,
) -> PipelineOptions:  # fmt: skip
    """What a user asks of a pipeline.

    Args:
        stages: groups of devices, or ``"auto"``.
        schedule: a name, several to choose from, or None for the planner's own choice.
        mesh: of every group.
        cuts: what all stages but the first begin with: paths of modules, or operators.

    Raises:
        PlanError: an unknown schedule, fewer than one group or microbatch, cuts that are no list, or recompute.
    """
    names = DEFAULT_SCHEDULES if schedule is None else [schedule] if isinstance(schedule, str) else list(schedule)
    for name in names:
        check_name(name)
    if isinstance(cuts, str) or not all(isinstance(c, str) for c in cuts or ()):
        raise PlanError(f"cuts is {cuts!r}; give a list of what stages begin with, such as ['layers.12']")
    groups = None if stages in (None, "auto") else stages
    if groups is not None and (isinstance(groups, str) or groups < 1):
        raise PlanError(f"stages is {groups!r}; give a number of groups of devices from 1 on, or 'auto'")
    if microbatches < 1:
        raise PlanError(f"microbatches is {microbatches}; give 1 or more")
    return PipelineOptions(microbatches, groups, tuple(names), mesh, tuple(cuts) if cuts else None, options)


def groups_of(mesh: DeviceMesh | None, stages: int | str | None) -> tuple[int | str | None, Mesh | None]:
    """Number of groups and mesh of each, from a DeviceMesh whose first axis is ``pipe``.

    Raises:
        MeshError: there is no such axis, it is not the first, or it contradicts ``stages``.
    """
    if mesh is None:
        return stages, None
    names = mesh.mesh_dim_names or ()
    if names[:1] != ("pipe",):
        raise MeshError(
            f"the DeviceMesh has axes {', '.join(names)}; for a pipeline its first must be 'pipe', or pass the number "
            "of ranks instead of a mesh"
        )
    if stages not in (None, "auto", mesh.size(0)):
        raise MeshError(f"stages is {stages}, the mesh's axis 'pipe' has {mesh.size(0)}; leave one of them out")
    inner = tuple((name, mesh.size(i)) for i, name in enumerate(names) if i)
    return mesh.size(0), inner or (("data", 1),)


def part_of(model: torch.nn.Module, captured: Captured, example: Any, parts: int) -> Captured:
    """One of so many parts of a batch, captured as the whole of it was.

    Args:
        example: ``(args, kwargs)``, or ``(args, kwargs, targets)`` if there is a loss function: the whole batch.
    """
    args, kwargs, *targets = first_part(example, parts)
    loss_fn = captured.example.loss_fn if captured.example is not None else None
    return capture(model, args, kwargs, loss_fn=loss_fn, targets=targets[0] if targets else ())


def planned_in_parts(
    model: torch.nn.Module, captured: Captured, example: Any, cluster: Cluster, n: int, asked: PipelineOptions,
    numbers: Sequence[int] = (), name: str = "", runs: bool = True,
) -> tuple[Captured, Planned]:  # fmt: skip
    """The best pipelined plan of a batch on ``n`` devices, the number of microbatches chosen too.

    Args:
        captured: of the whole batch.
        example: the whole batch, as for :func:`part_of`.
        numbers: to choose from; all that divide the batch if there are none.
        runs: the plan is for a program that is made now. A plan for a file is for the graph that follows from two
            captured ones; whoever runs it captures the model, and a graph that is another one is refused.

    Returns:
        One microbatch, as captured if it runs, and its plan.

    Raises:
        CaptureError: the rows of the batch do not divide, or there are none.
    """
    rows = rows_of(example)
    counts = sorted(set(numbers)) or numbers_of_parts(rows)
    for m in counts:
        first_part(example, m)  # refuses what does not divide before anything takes its time
    known = {1: captured}

    def part(m: int) -> Captured:
        if m not in known:
            known[m] = part_of(model, captured, example, m)
        return known[m]

    second = next((m for m in counts if m > 1), 1)

    def graph(m: int) -> Graph:
        if m in (1, second):
            return part(m).graph
        try:
            return resized(captured.graph, part(second).graph, rows, rows // second, rows // m)
        except NotLinear:
            return part(m).graph

    graphs = {m: graph(m) for m in counts}
    found = planned(graphs, cluster, n, asked, name)
    one = found.plan.microbatches
    chosen = part(one) if runs or one in known else replace(captured, graph=graphs[one], example=None)
    if chosen.graph.fingerprint != found.plan.fingerprint:  # the model treats this size in another way
        found = planned({found.plan.microbatches: chosen.graph}, cluster, n, asked, name)
    notes = found.plan.notes
    if chosen.graph.updates and len(counts) > 1:
        notes = (*notes, "batch statistics are those of a microbatch: with another number of them, training differs")
    free = replace(found.plan.pins, microbatches=None)
    return chosen, replace(found, plan=replace(found.plan, pins=free, notes=notes))


def planned_widely(
    model: torch.nn.Module, captured: Captured, example: Any, cluster: Cluster, n: int, asked: PipelineOptions,
    name: str = "", runs: bool = True,
) -> tuple[Captured, Planned, Plan | None]:  # fmt: skip
    """The best plan of a batch, of all that the planner knows: meshes, groups of devices, schedules, degrees of
    interleaving, numbers of microbatches, recomputation, ways to keep parameters.

    Args, Raises: as for :func:`planned_in_parts`.

    Returns:
        One microbatch and its plan; and, where one mesh is best and gains nothing by microbatches, the plan of the
        whole batch on it without pipeline.
    """
    part, found = planned_in_parts(model, captured, example, cluster, n, asked, (), name, runs)
    if found.plan.schedule.n_ranks == 1 and len(found.plan.stages) == 1:
        try:
            simple = plan_pinned(captured.graph, cluster, found.plan.stages[0].mesh, asked.options, name)
        except InfeasibleError:
            return part, found, None
        if simple.price.seconds <= found.plan.seconds * (1 + SIMPLER):
            return part, found, simple
    return part, found, None


def planned(
    captured: Captured | Mapping[int, Graph], cluster: Cluster, n: int, asked: PipelineOptions, name: str = ""
) -> Planned:
    """The best pipelined plan of a captured microbatch on ``n`` devices of a cluster; or of one of several sizes, by
    the number of microbatches that make up a batch."""
    graphs = captured if isinstance(captured, Mapping) else {asked.microbatches: captured.graph}
    graph = next(iter(graphs.values()))
    if asked.mesh is not None and asked.groups is not None and prod(k for _, k in asked.mesh) * asked.groups != n:
        size = prod(k for _, k in asked.mesh)
        raise MeshError(
            f"{asked.groups} stages on a mesh of {size} devices each need {asked.groups * size} devices, there are {n}"
        )
    if asked.mesh is not None and asked.groups is None and n % (size := prod(k for _, k in asked.mesh)):
        raise MeshError(
            f"a mesh of {size} devices for every group does not divide {n} devices; use one whose size divides {n}"
        )
    if n > cluster.n_devices:
        raise MeshError(f"{n} devices are wanted, cluster '{cluster.name}' has {cluster.n_devices}")
    if graph.loss is None:
        raise PlanError("a pipeline trains a model that returns its loss; give loss_fn= and targets=")
    check(graph, asked.options, asked.mesh)
    counts = [asked.groups] if asked.groups else [g for g in range(1, n + 1) if n % g == 0]
    sizes = [m for g in counts for m in mesh_shapes(max(1, n // g))]
    check_counts(asked.groups, asked.starts or (), n, asked.schedules, asked.mesh, asked.options, sizes)
    starts = starts_of(graph, asked.starts) if asked.starts else None
    found = plan_pipeline(graphs, cluster, n, replace(asked, starts=starts), cluster_name=name)
    return replace(found, plan=replace(found.plan, pins=wishes(asked), notes=(*found.plan.notes, *_others(found))))


def _others(found: Planned) -> list[str]:
    """What came next, for those who read the plan later."""
    best = found.plan.seconds
    others = dict(reversed([t for t in found.tried if t[1] > best * (1 + 1e-9)]))
    ways = sorted(others.items(), key=lambda t: t[1])[:3]
    return [f"next best: {what}, {1e3 * seconds:.4g} ms a step ({seconds / best - 1:+.1%})" for what, seconds in ways]


def wishes(asked: PipelineOptions) -> PipelinePins:
    """What a plan remembers of what was asked."""
    schedules = () if tuple(asked.schedules) == tuple(DEFAULT_SCHEDULES) else tuple(asked.schedules)
    cuts = tuple(asked.starts or ())
    return PipelinePins(asked.groups, cuts, schedules, asked.microbatches, asked.mesh, pins_of(asked.options))


def check_ranks(plan: PipelinePlan, n: int, there: str) -> None:
    """Refuse a plan that names ranks beyond those that are there.

    Raises:
        MeshError: with the stage, the rank, and how many there are.
    """
    check_within([s.devices for s in plan.stages], n, there)


def is_pipeline_file(plan: Any) -> bool:
    """Whether ``plan`` is the path of a pipelined plan."""
    if not isinstance(plan, (str, Path)):
        return False
    try:
        return files.is_pipeline(Path(plan).read_text(encoding="utf-8"))
    except OSError:
        return False


def microbatches_of(plan: PipelinePlan | str | Path) -> int:
    """Of a plan, or a plan file."""
    if isinstance(plan, PipelinePlan):
        return plan.microbatches
    raw = files.read(Path(plan).read_text(encoding="utf-8"), str(plan))
    return parse("\n".join(raw["schedule"])).n_microbatches


def run_on_ranks(
    model: torch.nn.Module, captured: Captured, make: Callable[[], PipelinePlan], device_type: str,
    values: Callable[[str], torch.Tensor] | None = None,
) -> PipelineModule:  # fmt: skip
    """The model on all ranks of the default process group, under the plan that rank 0 makes.

    Raises:
        AutoparError: what fails on one rank, on all of them.
    """
    group = dist.group.WORLD
    text: str | None = None
    error: BaseException | None = None
    try:
        if dist.get_rank() == 0:
            plan = make()
            if plan.n_devices != dist.get_world_size():
                raise MeshError(
                    f"the plan is for {plan.n_devices} ranks, {dist.get_world_size()} are running; start them with "
                    f"torchrun --nproc-per-node {plan.n_devices}, or plan for as many as there are"
                )
            check_ranks(plan, dist.get_world_size(), "ranks are running")
            text = files.dumps(plan, captured.graph)
    except Exception as e:
        error = e
    text = share(group, text, error)
    result: PipelineModule | None = None
    error = None
    decided: PipelinePlan | None = None
    try:
        decided = files.loads(text, captured.graph, where="rank 0's plan")
    except Exception as e:
        error = e
    together(group, error)
    assert decided is not None
    seed = first_seed(group)
    meeting = values if isinstance(values, Meeting) else Meeting(group, torch.device(device_type))
    try:
        try:
            result = PipelineModule(model, captured, decided, device_type, values, seed=seed, meeting=meeting)
        except Stopped:
            raise
        except Exception as e:
            error = e
        meeting.close(error is not None)
    except Stopped:
        pass
    together(group, error)
    assert result is not None
    return result


__all__ = [
    "asked_for", "check_ranks", "groups_of", "is_pipeline_file", "microbatches_of", "part_of", "planned",
    "planned_in_parts", "run_on_ranks", "wishes",
]  # fmt: skip
