"""Pipelined plans in a training script: :func:`autopar.plan` and :func:`autopar.parallelize` with ``stages=``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.errors import MeshError, PlanError
from autopar.pipeline import PipelinePlan
from autopar.placements import Mesh
from autopar.planfile import pipeline as files
from autopar.planner.pipeline import PipelineOptions, Planned, plan_pipeline
from autopar.planner.search import Options
from autopar.runtime.agree import share, together
from autopar.runtime.pipeline import PipelineModule
from cost_models.pipeline import SCHEDULES
from hardware_profiles import Cluster

DEFAULT_SCHEDULES = PipelineOptions(1).schedules


def asked_for(
    stages: int | str | None, schedule: str | Sequence[str] | None, microbatches: int, mesh: Mesh | None,
    options: Options, cuts: Sequence[str] | None = None,
) -> PipelineOptions:  # fmt: skip
    """What a user asks of a pipeline.

    Args:
        stages: groups of devices, or ``"auto"``.
        schedule: a name, several to choose from, or None for the planner's own choice.
        mesh: of every group.
        cuts: first operators of all stages but the first.

    Raises:
        PlanError: an unknown schedule, fewer than one group or microbatch, or recompute.
    """
    names = DEFAULT_SCHEDULES if schedule is None else [schedule] if isinstance(schedule, str) else list(schedule)
    for name in names:
        if name not in SCHEDULES:
            raise PlanError(f"no schedule '{name}'; use {', '.join(SCHEDULES)}")
    groups = None if stages in (None, "auto") else stages
    if groups is not None and (isinstance(groups, str) or groups < 1):
        raise PlanError(f"stages is {groups!r}; give a number of groups of devices from 1 on, or 'auto'")
    if microbatches < 1:
        raise PlanError(f"microbatches is {microbatches}; give 1 or more")
    if options.recompute:
        raise PlanError("recompute is not planned for pipelines; plan without stages, or without recompute")
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


def planned(captured: Captured, cluster: Cluster, n: int, asked: PipelineOptions, name: str = "") -> Planned:
    """The best pipelined plan of a captured microbatch on ``n`` devices of a cluster."""
    if asked.mesh is not None and asked.groups is not None and prod(k for _, k in asked.mesh) * asked.groups != n:
        size = prod(k for _, k in asked.mesh)
        raise MeshError(
            f"{asked.groups} stages on a mesh of {size} devices each need {asked.groups * size} devices, there are {n}"
        )
    if n > cluster.n_devices:
        raise MeshError(f"{n} devices are wanted, cluster '{cluster.name}' has {cluster.n_devices}")
    if captured.graph.loss is None:
        raise PlanError("a pipeline trains a model that returns its loss; give loss_fn= and targets=")
    return plan_pipeline(captured.graph, cluster, n, asked, cluster_name=name)


def is_pipeline_file(plan: Any) -> bool:
    """Whether ``plan`` is the path of a pipelined plan."""
    if not isinstance(plan, (str, Path)):
        return False
    try:
        return files.is_pipeline(Path(plan).read_text(encoding="utf-8"))
    except OSError:
        return False


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
    try:
        result = PipelineModule(model, captured, decided, device_type, values)
    except Exception as e:
        error = e
    together(group, error)
    assert result is not None
    return result


__all__ = ["asked_for", "groups_of", "is_pipeline_file", "planned", "run_on_ranks"]
