"""A plan on all ranks, and the module that runs it: what every rank does alike, and fails at together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import planfile
from autopar.capture import Captured
from autopar.errors import MeshError, first_few
from autopar.planner.planning import Outcome
from autopar.plans.clusters import check_mesh, get_cluster, is_axes, reference
from autopar.plans.detection import RankRecord, check_nodes, cluster_of_ranks, dumps, loads, record_here
from autopar.plans.device_groups import check_within
from autopar.plans.plan import Plan
from autopar.runtime.one_mesh.mesh_step import MeshRun
from autopar.runtime.parameters.init import Init, MadeInTurn, MetaValues, is_meta
from autopar.runtime.pipelines.pipeline import PipelineRun
from autopar.runtime.ranks.agree import FirstRankValues, Meeting, Stopped, seeded_alike, share, together
from autopar.runtime.ranks.groups import backend_for, backends
from autopar.runtime.ranks.store_meeting import from_all
from autopar.runtime.stages.plan_groups import check_device_mesh, group_of_own, mesh_of_own
from autopar.words.meshes import Mesh
from autopar.words.texts import mesh_of
from hardware_profiles import Cluster, ProfileError

T = TypeVar("T")
Where = DeviceMesh | str | Cluster | int
"""The ranks that a model runs on: the mesh that ``parallelize`` is given, and how many ranks axes in words need."""


def on_all(group: Any, make: Callable[[], T]) -> T:
    """Return what each rank of ``group`` makes; what fails on one of them is raised on all."""
    error: BaseException | None = None
    results: list[T] = []
    try:
        results.append(make())
    except Exception as e:
        error = e
    together(group, error)
    return results[0]


# --- where -----------------------------------------------------------------------------------------------------------


def groups_of(mesh: Mesh, stages: int | str | None) -> tuple[int, Mesh]:
    """Return number of groups and mesh of each, from a mesh whose first axis is ``pipe``.

    Raises:
        MeshError: there is no such axis, it is not the first, or it contradicts ``stages``.
    """
    if mesh.names[:1] != ("pipe",):
        raise MeshError(
            f"the mesh has axes {', '.join(mesh.names)}; for a pipeline its first must be 'pipe', or pass the number "
            "of ranks instead of a mesh"
        )
    if stages not in (None, "auto", mesh.size(0)):
        raise MeshError(f"stages is {stages}, the mesh's axis 'pipe' has {mesh.size(0)}; leave one of them out")
    return mesh.size(0), mesh.inner(1) or Mesh.of(data=1)


def check_axes(mesh: Mesh, stages: int | str, ranks: int) -> None:
    """Refuse axes and sizes of another number of ranks than run, in ``stages`` groups; in any number of them if "auto".

    Raises:
        MeshError: with both numbers.
    """
    groups = stages if isinstance(stages, int) else max(ranks // max(mesh.n_devices, 1), 1)
    need = mesh.n_devices * groups
    if need != ranks:
        plural, in_groups = "s" if need != 1 else "", f" in {groups} groups" if groups > 1 else ""
        raise MeshError(
            f"the mesh {mesh.shown()}{in_groups} is of {need} rank{plural}, {ranks} {'are' if ranks > 1 else 'is'} "
            "running; give sizes that make as many, start as many with torchrun --nproc-per-node, or leave mesh out"
        )


def hardware_of(
    device_type: str, mesh: Where, cluster: str | Path | Cluster | None, records: Sequence[RankRecord] = ()
) -> tuple[Cluster, int, str]:
    """Return the cluster, the number of ranks, and the name that the plan keeps.

    Args:
        device_type: the device type of the model (:func:`device_type_of`), where the mesh does not say it.
        records: what the ranks said of themselves (:func:`records_of`).

    Raises:
        MeshError: the mesh has no names, or nothing is known of devices like these; ClusterError: there is none such.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is None:
            raise MeshError("the DeviceMesh has no axis names; make it with mesh_dim_names=('data', ...)")
        n = mesh.size()
    elif isinstance(mesh, int):
        n = mesh
        if n < 1:
            raise MeshError(f"mesh is {n}; give a number of ranks from 1 on")
    else:
        where = get_cluster(mesh)
        return where, where.n_devices, reference(mesh)
    named = cluster
    if cluster is None:
        cluster = _default_cluster(n, mesh.device_type if isinstance(mesh, DeviceMesh) else device_type, records)
    where = get_cluster(cluster)
    if named is not None and records and (difference := check_nodes(where, where.name, records)):
        warnings.warn(f"{difference}: the plan is priced for machines that these are not", stacklevel=3)
    if isinstance(mesh, DeviceMesh):
        check_mesh(_axes_of_device_mesh(mesh), where)
    return where, n, reference(cluster)


def where_of(mesh: Where | Mapping[str, int], ranks: int) -> tuple[Where, Mesh | None]:
    """Return what is given as a mesh, the number of `ranks` for axes and sizes in words; and its axes, if any."""
    if isinstance(mesh, DeviceMesh):
        return mesh, _axes_of_device_mesh(mesh)
    if isinstance(mesh, (int, Path, Cluster)) or (isinstance(mesh, str) and not is_axes(mesh)):
        return mesh, None
    return ranks, mesh_of(mesh)


def _axes_of_device_mesh(mesh: DeviceMesh) -> Mesh:
    return Mesh((name, mesh.size(i)) for i, name in enumerate(mesh.mesh_dim_names or ()))


def records_of(group: Any, model: torch.nn.Module, mesh: Where) -> list[RankRecord]:
    """Return what all ranks of a mesh are and where, in the mesh's order; every rank of ``group`` calls it.

    None are gathered on processors, and for a cluster that is named in place of a mesh.
    """
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else device_type_of(model)
    if device_type != "cuda" or not isinstance(mesh, DeviceMesh | int):
        return []
    records = [loads(text) for text in from_all(group, dumps(record_here()))]
    if not isinstance(mesh, DeviceMesh):
        return records
    position = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    return [records[position[int(rank)]] for rank in mesh.mesh.flatten()]


def hardware_when_asked(
    plan: Plan, device_type: str, mesh: Where, cluster: str | Path | Cluster | None, records: Sequence[RankRecord] = ()
) -> Callable[[], Cluster]:
    """Return what gives the hardware for which a plan was made, or that on which it runs.

    Most runs never ask, and large clusters take long to describe.

    Args:
        device_type, mesh, cluster, records: as for :func:`hardware_of`.
    """

    def hardware() -> Cluster:
        try:
            return get_cluster(plan.cluster)
        except (ProfileError, MeshError, OSError, ValueError):
            return hardware_of(device_type, mesh, cluster, records)[0]

    return hardware


def _default_cluster(n: int, device_type: str, records: Sequence[RankRecord]) -> str:
    if device_type == "cpu":
        return f"local-x{n}"
    if device_type != "cuda":
        raise MeshError(f"no built-in cluster has devices of type {device_type}; pass cluster= with a profile of yours")
    return cluster_of_ranks(records or [record_here()] * n)


def device_type_of(model: torch.nn.Module) -> str:
    """Return the device type of a model's parameters; of a meta model, GPUs where the ranks can talk there."""
    kinds = {t.device.type for t in model.parameters()}
    if kinds - {"meta"}:
        return sorted(kinds - {"meta"})[0]
    on_gpus = torch.cuda.is_available() and (not dist.is_initialized() or "cuda" in backends())
    return "cuda" if on_gpus else "cpu"


# --- one plan --------------------------------------------------------------------------------------------------------


def agreed(
    decide: Callable[[], Outcome], captured: Captured, group: Any, part: Callable[[int], Captured] | None = None
) -> tuple[Captured, Plan]:
    """Return the plan of rank 0 on all ranks of ``group``, and what it is for.

    Args:
        decide: makes the plan; called on rank 0 alone. The others get it as the text of a plan file.
        captured: the capture of a microbatch.
        part: if the batch was captured and the plan says into how many microbatches it is cut: gives, for that
            number, the capture of one of them.

    Raises:
        AutoparError: what fails on one rank, on all of them.
    """
    first = dist.get_rank(group) == 0
    decided: Outcome | None = None
    text: str | None = None
    error: BaseException | None = None
    try:
        if first:
            decided = decide()
            check_size(decided.plan, dist.get_world_size(group))
            text = planfile.dumps(decided.plan, decided.captured.graph) if dist.get_world_size(group) > 1 else ""
    except Exception as e:
        error = e
    text = share(group, text, error)

    def read() -> tuple[Captured, Plan]:
        if decided is not None:
            return decided.captured, decided.plan
        document = planfile.parse(text, "rank 0's plan")
        one = captured if part is None else part(document.microbatches)
        return one, planfile.bind(document, one.graph)

    return on_all(group, read)


def check_size(plan: Plan, have: int) -> None:
    """Refuse a plan for another number of ranks than run."""
    need = plan.n_devices
    if need != have:
        shape = f" ({plan.mesh.shown()})" if len(plan.stages) == 1 else ""
        raise MeshError(
            f"the plan is for {need} ranks{shape}, {have} {'are' if have > 1 else 'is'} running; start them with "
            f"torchrun --nproc-per-node {need}, or plan for as many as there are"
        )
    check_within([stage.devices for stage in plan.stages], have, "ranks are running")


# --- the module ------------------------------------------------------------------------------------------------------


def spread(
    model: torch.nn.Module, captured: Captured, plan: Plan, group: Any, *, device_mesh: DeviceMesh | None = None,
    init: Init | None = None, random: str = "sharded",
) -> MeshRun | PipelineRun:  # fmt: skip
    """Return the model on the ranks of ``group``, as the plan says; every rank calls it with the same arguments.

    Args:
        device_mesh: the mesh of a plan of one stage; by default one is made of all ranks.
        init, random: as for :func:`autopar.parallelize`.

    Raises:
        AutoparError: what fails on one rank, on all of them.
    """
    device_type = device_mesh.device_type if device_mesh is not None else device_type_of(model)
    on_all(group, lambda: backend_for(device_type))
    if dist.get_rank(group) == 0:
        tell_of_idle_gpus(device_type)
        tell_of_extra_state(model)
    one = len(plan.stages) == 1
    if one and device_mesh is None:
        device_mesh = mesh_of_own(captured.graph, plan.only(), device_type, range(dist.get_world_size()))
    on_all(group, lambda: check_device_mesh(device_mesh, plan.mesh) if one and device_mesh is not None else None)
    device = torch.device(device_type)
    alike, of_own = seeded_alike(group), group_of_own(group, device)
    values = _values(model, of_own, device_mesh if one else None, init, device)
    if isinstance(values, Meeting):
        meeting: Meeting | None = values
    else:
        meeting = None if one else Meeting(of_own, device)

    def make() -> MeshRun | PipelineRun:
        if one:
            assert device_mesh is not None
            return MeshRun(model, captured, plan, device_mesh, values, alike=alike, random=random)
        return PipelineRun(model, captured, plan, device_type, values, alike=alike, meeting=meeting, random=random)

    run: MeshRun | PipelineRun | None = None
    error: BaseException | None = None
    try:  # in here ranks meet nowhere but in the meeting
        try:
            run = make()
        except Stopped:
            raise
        except Exception as e:
            error = e
        if meeting is not None:
            meeting.close(error is not None)
    except Stopped:
        pass
    try:
        together(group, error)
    except BaseException:
        if run is not None:
            run.user.restore()
        raise
    assert run is not None
    if captured.graph.precision is not None:
        run.gradient_dtype = captured.graph.precision.reduced_in
    return run


def tell_of_idle_gpus(device_type: str) -> None:
    """Warn that a model trains on the CPU of a machine with GPUs."""
    if device_type == "cpu" and torch.cuda.is_available():
        warnings.warn(
            f"the model is on the CPU and trains there, on a machine with {torch.cuda.device_count()} GPUs: call "
            "model.cuda() before parallelize to use them",
            stacklevel=4,
        )


def tell_of_extra_state(model: torch.nn.Module) -> None:
    """Warn of what a module has beside its tensors, which states of parallel modules do not have."""
    own = [
        path or type(module).__name__ for path, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]  # fmt: skip
    if own:
        warnings.warn(
            f"{first_few(own)} of the model has an extra state (get_extra_state), which is not in state_dict(), "
            "full_state_dict() or a checkpoint of the parallel module, nor loaded by them: keep it in buffers, or save "
            "it beside",
            stacklevel=4,
        )


def _values(
    model: torch.nn.Module, group: Any, device_mesh: DeviceMesh | None, init: Init | None, device: torch.device
) -> Callable[[str], torch.Tensor] | None:
    if is_meta(model):
        values = MetaValues(model, init, int(share(group, str(torch.initial_seed()), None)))
        return values if dist.get_world_size(group) == 1 else MadeInTurn(values, group, device)
    if dist.get_world_size(group) == 1:
        return None
    named: Mapping[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))
    }  # fmt: skip
    first = int(device_mesh.mesh.flatten()[0]) if device_mesh is not None else 0
    return FirstRankValues(named, group, first, device)
