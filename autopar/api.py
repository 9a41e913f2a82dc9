"""The three calls of a training script: :func:`capture`, :func:`plan`, :func:`parallelize`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import autopar.rules  # noqa: F401  (registers the rules)
from autopar import again, arguments, pipelines, planfile
from autopar.capture import Captured, on_meta
from autopar.capture import capture as _capture
from autopar.capture.parts import first_part
from autopar.clusters import check_mesh, get_cluster, profile_of, reference
from autopar.comparison import compare_with_eager
from autopar.errors import AutoparError, CaptureError, ClusterError, InfeasibleError, MeshError
from autopar.pins import parse_kept, plan_pinned
from autopar.pipeline import PipelinePlan
from autopar.placements import Mesh, mesh_shapes, mesh_text, n_devices, parse_state
from autopar.plan import Plan
from autopar.planner.intra_op.mesh_plan import Options
from autopar.runtime.agree import (
    TIMEOUT_SECONDS,
    FirstRankValues,
    Stopped,
    ensure_process_group,
    first_seed,
    mesh_group,
    share,
    together,
)
from autopar.runtime.executor import ParallelModule, check_device_mesh
from autopar.runtime.init import Init, MetaValues, is_meta
from autopar.runtime.optimizers import Move, replaced
from autopar.runtime.original import Original
from autopar.runtime.programs import Programs
from hardware_profiles import Cluster, ProfileError, list_clusters, load_cluster

MeshLike = Mesh | Mapping[str, int] | str | None


def split_inputs(
    inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as ``(args, kwargs)``: a tuple of args, a dict of kwargs, or one tensor.

    Args:
        example_kwargs: keyword arguments beside positional ones.
    """
    kwargs = dict(example_kwargs or {})
    if isinstance(inputs, torch.Tensor):
        return (inputs,), kwargs
    if isinstance(inputs, Mapping):
        if example_kwargs is not None:
            raise AutoparError(
                f"example inputs are a dict of {len(inputs)} keyword arguments, and example_kwargs has {len(kwargs)} "
                "more; give one dict, or positional arguments as a tuple beside example_kwargs"
            )
        if not all(isinstance(key, str) for key in inputs):
            raise AutoparError("example inputs are a dict, but its keys are not all names of arguments")
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), kwargs
    raise AutoparError(
        f"example inputs must be a tensor, a tuple of positional arguments or a dict of keyword arguments, got "
        f"{type(inputs).__name__}"
    )


def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
) -> Captured:
    """What ``model`` computes on ``inputs``, as a graph; see :func:`autopar.capture.capture`.

    Args:
        inputs: a tuple of args, a dict of kwargs, or a tensor.
        example_kwargs: keyword arguments, for a model that takes both.
    """
    arguments.check_model(model)
    arguments.check(example_kwargs=example_kwargs, loss_fn=loss_fn, targets=targets)
    args, kwargs, targets = _example(model, inputs, example_kwargs, targets)
    try:
        found = _capture(model, args, kwargs, loss_fn=loss_fn, targets=targets)
    except CaptureError as error:
        if kwargs or len(args) != 2 or not isinstance(args[0], (tuple, list)) or not isinstance(args[1], Mapping):
            raise
        raise CaptureError(
            f"{error}\n  a pair (args, kwargs) is two positional arguments; pass args as the example inputs, and "
            "example_kwargs=kwargs beside them"
        ) from error
    if loss_fn is not None:
        arguments.check_loss(found)
    return found


def _example(
    model: torch.nn.Module, inputs: Any, example_kwargs: Mapping[str, Any] | None, targets: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """``(args, kwargs, targets)`` on the meta device if the model is there."""
    args, kwargs = split_inputs(inputs, example_kwargs)
    found = args, kwargs, (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    if isinstance(model, torch.nn.Module) and is_meta(model):
        found = pytree.tree_map_only(torch.Tensor, on_meta, found)
    return found


def parse_mesh(mesh: MeshLike) -> Mesh | None:
    """A mesh from ``{"data": 2}``, ``"data=2,tensor=4"`` or pairs.

    Raises:
        MeshError: the text is malformed.
    """
    if mesh is None:
        return None
    if isinstance(mesh, str):
        pairs = []
        for part in mesh.split(","):
            name, eq, size = part.strip().partition("=")
            if not eq or not name.isidentifier() or not size.strip().isdigit():
                raise MeshError(f"mesh '{mesh}': '{part.strip()}' is no axis; write name=size, such as data=2,tensor=4")
            pairs.append((name, int(size)))
        return tuple(pairs)
    if isinstance(mesh, Mapping):
        return tuple((str(name), int(size)) for name, size in mesh.items())
    if not isinstance(mesh, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in mesh
    ):
        raise MeshError(f"mesh is {mesh!r}; give axes and their sizes, such as 'data=2,tensor=4' or {{'data': 8}}")
    return tuple((str(name), int(size)) for name, size in mesh)


def parse_bytes(value: float | str | None) -> float | None:
    """Bytes from a number or from text such as ``"40GiB"``, ``"16 GB"``."""
    if value is None or isinstance(value, (int, float)):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", value.lower())
    if not match:
        raise AutoparError(f"memory limit '{value}' is no size; write bytes, or such as '40GiB' or '16GB'")
    base = 1024 if match[3] else 1000
    return float(match[1]) * base ** ("kmgt".index(match[2]) + 1 if match[2] else 0)


def plan_captured(
    captured: Captured, cluster: Cluster, mesh: Mesh | None, options: Options, *, max_axes: int = 2,
    n: int | None = None, name: str = "",
) -> Plan:  # fmt: skip
    """The cheapest plan of a captured model on one mesh, or on the best mesh shape of ``n`` devices.

    Args:
        name: by which the plan finds the cluster again; by default the cluster's own.
    """
    name = name or cluster.name
    if mesh is not None:
        return plan_pinned(captured.graph, cluster, mesh, options, name)
    shapes = mesh_shapes(n or cluster.n_devices, max_axes)
    if max_axes < 1:
        raise MeshError(f"max_axes is {max_axes}; give 1 or more")
    named = {axis for axes in (options.constraints or {}).values() for axis in axes}
    states: list[Sequence[str]] = [*(options.inputs or {}).values(), *(options.outputs or {}).values()]
    states += [how.split(",") for how in (options.params or {}).values() if how != "replicate"]
    shapes = [s for s in shapes if named <= {a for a, _ in s} and all(len(state) == len(s) for state in states)]
    if not shapes:
        raise MeshError(
            f"no mesh shape of {n or cluster.n_devices} devices has the axes that the constraints name "
            f"({', '.join(sorted(named))}); pass mesh= with the shape that you mean"
        )
    best: Plan | None = None
    infeasible: InfeasibleError | None = None
    for shape in shapes:
        try:
            plan = plan_pinned(captured.graph, cluster, shape, options, name)
        except InfeasibleError as error:
            infeasible = infeasible or error
            continue
        if best is None or plan.price.seconds < best.price.seconds * (1 - 1e-6):
            best = plan
    if best is None:
        assert infeasible is not None
        raise infeasible
    return best


def plan(
    model: torch.nn.Module,
    cluster: str | Path | Cluster | None,
    inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    mesh: MeshLike = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    constraints: Mapping[str, Mapping[str, str]] | None = None,
    params: Mapping[str, str] | None = None,
    placements: Mapping[str | int, str] | None = None,
    recompute: Sequence[str] = (),
    memory_limit: float | str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    microbatches: int | str | Sequence[int] = 1,
    stages: int | str | None = None,
    schedule: str | Sequence[str] | None = None,
    cuts: Sequence[str] | None = None,
    max_axes: int = 2,
    time_limit: float = 120.0,
    captured: Captured | None = None,
    profile: str | Path | None = None,
) -> Plan | PipelinePlan:
    """Plan a model on a cluster. Needs no process group and no accelerator.

    Args:
        model: any module; on the meta device nothing is allocated.
        cluster: name of a hardware profile, path of one, or a :class:`~hardware_profiles.Cluster`.
        inputs: one batch (or microbatch) with its global shapes: a tuple of args, a dict of kwargs, or a tensor.
        example_kwargs: keyword arguments beside positional ``inputs``.
        mesh: ``{"data": 2, "tensor": 4}`` or ``"data=2,tensor=4"``; None tries every shape of up to ``max_axes`` axes.
        loss_fn, targets: ``loss_fn(output, *targets)`` if the model does not return its loss.
        constraints: ``{module pattern: {axis: factor}}`` pins how ops are cut.
        params: ``{parameter pattern: how}`` pins how parameters are stored: ``"replicate"``, placements ``"S0,I"``, or
            placements with the lifetime of the gathered copy, ``"S0,I step"`` (ZeRO-1/2) or ``"S0,I use"`` (ZeRO-3).
        placements: ``{input name or output number: placements}``, such as ``{"x": "S0,R"}``.
        recompute: patterns of module paths, such as ``["layers.*"]``; each module that matches keeps only its inputs
            for the backward, and runs again there (activation checkpointing).
        memory_limit: per device, in bytes or as ``"40GiB"``; None for nine tenths of the device's memory.
        optimizer: ``adamw``, ``sgd`` or ``sgd_momentum``, for the bytes of its state; or an optimizer, whose class
            says which.
        microbatches: how often the batch is run per optimizer step. For a pipeline also ``"auto"``, or several numbers
            to choose from: ``inputs`` are then the batch of a step, which is cut into the best number of microbatches.
        stages: pipeline over so many groups of devices (``"auto"``: the best number); ``mesh`` is then that of a group,
            ``inputs`` are one microbatch, and the plan is a :class:`~autopar.pipeline.PipelinePlan`.
        schedule: the pipeline's: ``gpipe``, ``1f1b``, ``interleaved-1f1b``, ``zb-h1``, ``zb-v``, ``dualpipe-v``,
            ``searched`` (an order found for the stages' own times, within the memory), or several to choose from.
        cuts: where the pipeline is cut: what all stages but the first begin with, such as ``["layers.12"]`` (the path
            of a module, or an operator as ``module:op``); by default the planner cuts.
        captured: what :func:`capture` gave, to plan several meshes without capturing again.
        profile: what ``autopar profile`` measured; ``cluster`` may then be None, or is checked to be the one measured.
    """
    arguments.check(**locals())
    if profile is not None:
        cluster = profile_of(profile, cluster)
    if cluster is None:
        raise ClusterError("plan needs a cluster, or profile= with the file that autopar profile wrote")
    piped = stages is not None or schedule is not None or cuts is not None
    one, numbers = _microbatches(microbatches, piped)
    found = captured or capture(model, inputs, example_kwargs=example_kwargs, loss_fn=loss_fn, targets=targets)
    where = get_cluster(cluster)
    shape = parse_mesh(mesh)
    asked = _options(constraints, params, placements, recompute, memory_limit, optimizer, one, time_limit, shape)
    if piped:
        wanted = pipelines.asked_for(stages, schedule, one, shape, asked, cuts)
        if numbers is not None:
            example = _example(model, inputs, example_kwargs, targets)
            return pipelines.planned_in_parts(
                model, found, example, where, where.n_devices, wanted, numbers, reference(cluster), runs=False
            )[1].plan
        return pipelines.planned(found, where, where.n_devices, wanted, reference(cluster)).plan
    return plan_captured(found, where, shape, asked, max_axes=max_axes, name=reference(cluster))


def _microbatches(asked: Any, piped: bool) -> tuple[int, tuple[int, ...] | None]:
    """The number of microbatches; and where it is to be chosen, from which (none for all that divide the batch)."""
    if isinstance(asked, int):
        return asked, None
    several = isinstance(asked, (list, tuple)) and asked and all(isinstance(m, int) and m > 0 for m in asked)
    if asked != "auto" and not several:
        raise AutoparError(
            f"microbatches is {asked!r}; give a whole number of 1 or more, several to choose from, or 'auto'"
        )
    if not piped:
        raise AutoparError(f"microbatches={asked!r} is for pipelines: give stages= too, or one number")
    return 1, () if asked == "auto" else tuple(asked)


def _options(
    constraints: Any, params: Mapping[str, str] | None, placements: Mapping[str | int, str] | None,
    recompute: Sequence[str], memory_limit: float | str | None, optimizer: str | torch.optim.Optimizer,
    microbatches: int, time_limit: float, mesh: Mesh | None,
) -> Options:  # fmt: skip
    optimizer = arguments.check_optimizer(optimizer)
    if not isinstance(microbatches, int) or microbatches < 1:
        raise AutoparError(f"microbatches is {microbatches}; give a whole number of 1 or more")
    if time_limit <= 0:
        raise AutoparError(f"time_limit is {time_limit:g} s; give more than 0")
    limit = parse_bytes(memory_limit)
    if limit is not None and limit <= 0:
        raise AutoparError(f"memory_limit is {memory_limit}; give more than 0 bytes, or None for what the device has")
    if isinstance(recompute, str) or not all(isinstance(pattern, str) for pattern in recompute):
        raise AutoparError(f"recompute is {recompute!r}; give a list of patterns of module paths, such as ['layers.*']")
    _check_tables(constraints, params, placements)
    if placements and mesh is None:
        raise MeshError("placements name one placement per mesh axis; pass mesh= with them")
    states = {k: parse_state(v, mesh or (), f"placements[{k!r}]") for k, v in (placements or {}).items()}
    kept = {k: parse_kept(v, mesh, f"params[{k!r}]") for k, v in (params or {}).items()}
    return Options(
        constraints=constraints, params=kept or None,
        inputs={k: v for k, v in states.items() if isinstance(k, str)} or None,
        outputs={k: v for k, v in states.items() if isinstance(k, int)} or None,
        memory_limit_bytes=limit, optimizer="adamw" if optimizer == "adam" else optimizer,
        microbatches=microbatches, time_limit_seconds=time_limit, recompute=tuple(recompute),
    )  # fmt: skip


def _check_tables(constraints: Any, params: Any, placements: Any) -> None:
    """Refuse pins that are no tables of text."""
    for name, table, example in (
        ("constraints", constraints, {"layers.*.up": {"tensor": "n"}}), ("params", params, {"*.weight": "S0,I"}),
        ("placements", placements, {"x": "S0,R"}),
    ):  # fmt: skip
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise AutoparError(f"{name} is {table!r}; give a dict such as {example}")
        for key, value in table.items():
            texts = value.values() if name == "constraints" and isinstance(value, Mapping) else [value]
            if (name == "constraints") != isinstance(value, Mapping) or not all(isinstance(t, str) for t in texts):
                raise AutoparError(f"{name}[{key!r}] is {value!r}; give it like {example}")


def parallelize(
    model: torch.nn.Module,
    mesh: DeviceMesh | str | Cluster | int,
    example_inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    plan: Plan | PipelinePlan | str | Path | None = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Mapping[str, Mapping[str, str]] | None = None,
    params: Mapping[str, str] | None = None,
    placements: Mapping[str | int, str] | None = None,
    recompute: Sequence[str] = (),
    memory_limit: float | str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    microbatches: int | str | Sequence[int] = 1,
    stages: int | str | None = None,
    schedule: str | Sequence[str] | None = None,
    cuts: Sequence[str] | None = None,
    max_axes: int = 2,
    time_limit: float = 120.0,
    init: Init | None = None,
    hooks: str = "refuse",
    timeout: float = TIMEOUT_SECONDS,
    profile: str | Path | None = None,
    verify_capture: bool = True,
    on_change: str = "error",
) -> Any:
    """Spread a model over a mesh; every rank calls it with the same arguments.

    Rank 0 plans and sends the plan to the others; what fails on one rank is raised on all of them.

    Returns a :class:`~autopar.runtime.executor.ParallelModule`; with ``stages``, or a pipelined plan, a
    :class:`~autopar.runtime.pipeline.PipelineModule`.

    Args:
        model: with its weights (rank 0's are used), or on the meta device.
        mesh: a DeviceMesh with named axes; or a cluster's name, or the number of ranks, and the shape is chosen. In a
            DeviceMesh, an axis ``pipe``, the first, makes a pipeline of so many groups.
        example_inputs: one batch, or one microbatch of :meth:`ParallelModule.train_step`, as for :func:`plan`.
        example_kwargs: keyword arguments of that call, if it has positional ones too.
        plan: run this plan (or plan file) instead of making one.
        cluster: hardware profile of a DeviceMesh or rank count; on the CPU ``local-x<ranks>`` by default.
        optimizer: an optimizer of the model's parameters goes on with those of the result: its groups, options and
            state are kept, so learning rate schedulers that hold it work on. Or its name, as for :func:`plan`.
        init: for a meta model: ``init(module)`` sets the parameters and buffers that one module owns.
        hooks: ``"trace"`` for a model with forward hooks that only compute with tensors: they run once, while it is
            traced, and what they compute is part of the program. By default a model with hooks is refused, because
            what hooks do beside that would be lost (:mod:`autopar.capture.module_hooks`).
        timeout: seconds to wait for other ranks, if the process group is made here.
        profile: what ``autopar profile`` measured, which then is the cluster.
        verify_capture: compare what was captured with the model itself: loss, gradients and buffers of the example
            batch, once, on rank 0. A model without values, or one whose forward takes more than some seconds, is not
            compared.
        on_change: what a call does when a plain value that ``forward`` reads (a number, flag or name on a module, in a
            config, in a global) is not what it was: ``"error"`` names it; ``"recapture"`` captures the model again, and
            plans again where another graph needs another plan, with parameters where they are. Programs are kept by the
            values that they read, so that a flag may be toggled; of a pipeline only numbers of the graph may change.
            All ranks change values alike (:mod:`autopar.runtime.programs`).

    The other arguments are those of :func:`plan`.
    """
    given = dict(locals())
    ensure_process_group(timeout if arguments.is_right("timeout", timeout) else TIMEOUT_SECONDS)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    group = mesh_group(device_mesh) if device_mesh is not None else dist.group.WORLD
    move = arguments.check_call(group, given)
    if profile is not None:
        if isinstance(mesh, DeviceMesh | int):
            cluster = profile_of(profile, cluster)
        else:
            mesh = profile_of(profile, mesh)
    captured: Captured | None = None
    error: BaseException | None = None
    try:
        captured = capture(model, example_inputs, example_kwargs=example_kwargs, loss_fn=loss_fn, targets=targets)
    except Exception as e:
        error = e
    together(group, error)
    assert captured is not None
    _same_model(captured, model, group)
    if verify_capture:
        _compare(captured, model, split_inputs(example_inputs, example_kwargs), targets, group)
    piped = device_mesh is not None and "pipe" in (device_mesh.mesh_dim_names or ())
    asked = stages is not None or schedule is not None or cuts is not None or piped
    asked = asked or pipelines.is_pipeline_file(plan)
    one, numbers = _microbatches(microbatches, asked or isinstance(plan, PipelinePlan))
    if asked or isinstance(plan, PipelinePlan):
        known, batch = captured, _example(model, example_inputs, example_kwargs, targets)

        def wanted(captured: Captured) -> tuple[Captured, PipelinePlan]:
            where, shape, n, name = _where(model, mesh, cluster)
            options = _options(
                constraints, params, placements, recompute, memory_limit, optimizer, one, time_limit, shape
            )
            groups, shape = pipelines.groups_of(device_mesh, stages)
            want = pipelines.asked_for(groups, schedule, one, shape, options, cuts)
            if numbers is None:
                return captured, pipelines.planned(captured, where, n, want, name).plan
            part, found = pipelines.planned_in_parts(model, captured, batch, where, n, want, numbers, name)
            return part, found.plan

        given = plan
        if numbers is not None:
            known, given = _in_parts(model, captured, batch, plan, wanted, group)

        def make() -> PipelinePlan:
            if isinstance(given, PipelinePlan):
                return given
            if given is not None and not isinstance(given, Plan):
                return pipelines.files.load(given, known.graph, get_cluster(cluster) if cluster is not None else None)
            return wanted(known)[1]

        values = _values(model, group, None, init)
        piped_model = pipelines.run_on_ranks(model, known, make, _device_type(model), values)
        if on_change == "recapture":
            if numbers is not None:
                batch = first_part(batch, piped_model.plan.microbatches)
            compare = again.comparer_of(batch[0], batch[1], batch[2], group) if verify_capture else None
            piped_model.follow_values(Programs(model, list(range(dist.get_world_size())), None, compare))
        return _replacing(model, piped_model, move, group)
    text: str | None = None
    try:
        if dist.get_rank(group) == 0:
            if isinstance(plan, (str, Path)):
                plan = planfile.load(plan, captured.graph, get_cluster(cluster) if cluster is not None else None)
            if plan is None:
                where, shape, n, name = _where(model, mesh, cluster)
                options = _options(
                    constraints, params, placements, recompute, memory_limit, optimizer, one, time_limit, shape
                )
                plan = plan_captured(captured, where, shape, options, max_axes=max_axes, n=n, name=name)
            _check_size(plan.mesh, group)
            text = planfile.dumps(plan, captured.graph)
    except Exception as e:
        error = e
    text = share(group, text, error)
    result: ParallelModule | None = None
    try:
        decided = planfile.loads(text, captured.graph, where="rank 0's plan")
        if device_mesh is not None:
            check_device_mesh(device_mesh, decided.mesh)
    except Exception as e:
        error = e
    together(group, error)
    if device_mesh is None:
        device_mesh = init_device_mesh(
            _device_type(model), tuple(size for _, size in decided.mesh),
            mesh_dim_names=tuple(name for name, _ in decided.mesh),
        )  # fmt: skip
    seed, values = first_seed(group), _values(model, group, device_mesh, init)
    try:  # in here ranks meet nowhere but in values
        try:
            result = ParallelModule(model, captured, decided, device_mesh, values, seed=seed)
        except Stopped:
            raise
        except Exception as e:
            error = e
        if isinstance(values, FirstRankValues):
            values.close(error is not None)
    except Stopped:
        pass
    together(group, error)
    assert result is not None
    if on_change == "recapture":
        compare = again.comparer_of(*_example(model, example_inputs, example_kwargs, targets), group)
        planner = again.planner_of(decided, _cluster_of(decided, model, mesh, cluster), group)
        ranks = [int(r) for r in device_mesh.mesh.flatten()]
        result.follow_values(Programs(model, ranks, planner, compare if verify_capture else None))
    return _replacing(model, result, move, group)


def _replacing(model: torch.nn.Module, pm: torch.nn.Module, move: Move | None, group: Any) -> Any:
    """``pm``, once the optimizer that was given holds its parameters and the model's own are known as replaced."""
    if move is not None:
        move.to(pm, group)
    replaced(dict(model.named_parameters(remove_duplicate=False)))
    object.__setattr__(pm, "_original", Original(model, pm))
    return pm


def _in_parts(
    model: torch.nn.Module, captured: Captured, batch: tuple[Any, ...], plan: Any,
    decide: Callable[[Captured], tuple[Captured, PipelinePlan]], group: Any,
) -> tuple[Captured, Any]:  # fmt: skip
    """One microbatch as captured, on all ranks, and the plan that rank 0 has for it: the given one, or its own."""
    part: Captured | None = None
    number: str | None = None
    error: BaseException | None = None
    try:
        if dist.get_rank(group) == 0:
            if plan is None or isinstance(plan, Plan):
                part, plan = decide(captured)
            number = str(pipelines.microbatches_of(plan))
    except Exception as e:
        error = e
    number = share(group, number, error)
    try:
        part = part or pipelines.part_of(model, captured, batch, int(number))
    except Exception as e:
        error = e
    together(group, error)
    assert part is not None
    return part, plan


def _same_model(captured: Captured, model: torch.nn.Module, group: Any) -> None:
    """Refuse ranks that have captured different models, or of which only some are on the meta device."""
    mine = f"{captured.graph.fingerprint} {'with' if is_meta(model) else 'without'} parameters on the meta device"
    first = share(group, mine, None)
    problem = (
        f"this rank has captured another model than rank 0: fingerprint {mine}, rank 0 has {first}; build the same "
        "model, and give inputs of the same shapes, on every rank"
    )
    together(group, CaptureError(problem) if mine != first else None)


def _compare(captured: Captured, model: torch.nn.Module, call: Any, targets: Any, group: Any) -> None:
    """Refuse a graph that is not what the model does in eager mode; rank 0's values are those that count."""
    error: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            given = (targets,) if isinstance(targets, torch.Tensor) else targets
            note = compare_with_eager(captured, model, call[0], call[1], given).note
            if note and not is_meta(model):
                warnings.warn(f"what was captured was not compared with the model: {note}", stacklevel=3)
        except Exception as e:
            error = e
    together(group, error)


def _where(
    model: torch.nn.Module, mesh: DeviceMesh | str | Cluster | int, cluster: str | Path | Cluster | None
) -> tuple[Cluster, Mesh | None, int, str]:
    """The cluster, the mesh's shape if it is given, the number of ranks, and the name that the plan keeps."""
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is None:
            raise MeshError("the DeviceMesh has no axis names; make it with mesh_dim_names=('data', ...)")
        shape: Mesh | None = tuple((name, mesh.size(i)) for i, name in enumerate(mesh.mesh_dim_names))
        n = mesh.size()
    elif isinstance(mesh, bool) or not isinstance(mesh, (int, str, Cluster)):
        raise MeshError(f"mesh is {mesh!r}; give a DeviceMesh, the name of a cluster, or a number of ranks")
    elif isinstance(mesh, int):
        shape, n = None, mesh
        if n < 1:
            raise MeshError(f"mesh is {n}; give a number of ranks from 1 on")
    else:
        where = get_cluster(mesh)
        return where, None, where.n_devices, reference(mesh)
    if cluster is None:
        cluster = _default_cluster(n, mesh.device_type if isinstance(mesh, DeviceMesh) else _device_type(model))
    where = get_cluster(cluster)
    if shape is not None:
        check_mesh(shape, where)
    return where, shape, n, reference(cluster)


def _cluster_of(
    plan: Plan, model: torch.nn.Module, mesh: DeviceMesh | str | Cluster | int, cluster: str | Path | Cluster | None
) -> Cluster:
    """The hardware for which a plan was made, or that on which it runs."""
    try:
        return get_cluster(plan.cluster)
    except (ProfileError, ClusterError, OSError):
        return _where(model, mesh, cluster)[0]


def _default_cluster(n: int, device_type: str) -> str:
    if device_type == "cpu":
        return f"local-x{n}"
    name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for known in list_clusters():
        try:
            found = load_cluster(known)
        except ProfileError:
            continue
        short = re.sub(r"[^a-z0-9]", "", found.device(0).name.lower().split("-")[0])
        if short and short in key and found.n_devices >= n:
            return known
    raise MeshError(
        f"no built-in cluster has {n} devices like '{name}'; pass cluster= with a name "
        f"({', '.join(list_clusters())}) or the path of a profile"
    )


def _device_type(model: torch.nn.Module) -> str:
    kinds = {t.device.type for t in model.parameters()}
    if kinds - {"meta"}:
        return sorted(kinds - {"meta"})[0]
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_size(mesh: Mesh, group: Any) -> None:
    need, have = n_devices(mesh), dist.get_world_size(group)
    if need != have:
        shape = mesh_text(mesh)
        raise MeshError(
            f"the mesh {shape} needs {need} ranks, {have} {'are' if have > 1 else 'is'} running; start them with "
            f"torchrun --nproc-per-node {need}, or pass the mesh that you have"
        )


def _values(
    model: torch.nn.Module, group: Any, device_mesh: DeviceMesh | None, init: Init | None
) -> Callable[[str], torch.Tensor] | None:
    if is_meta(model):
        seed = int(share(group, str(torch.initial_seed()), None))
        return MetaValues(model, init, seed)
    if dist.get_world_size(group) == 1:
        return None
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    first = int(device_mesh.mesh.flatten()[0]) if device_mesh is not None else 0
    return FirstRankValues(named, group, first)


__all__ = ["capture", "get_cluster", "mesh_shapes", "parallelize", "parse_bytes", "parse_mesh", "plan", "split_inputs"]
