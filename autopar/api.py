"""The call of a training script, :func:`parallelize`; those without ranks are in :mod:`.plan_calls`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import autopar.rules  # noqa: F401  (registers the rules)
from autopar.capture import Captured, check_products_run, none_narrow
from autopar.capture.in_parts import InputRows, captured_in_parts, no_rows_in
from autopar.capture.microbatches import as_whole, first_part, rows_of
from autopar.comparison.draws_of_eager import check_draws
from autopar.comparison.padding import Padded, of_size, padded_example, proved
from autopar.comparison.parts_of_loss import difference_by_parts
from autopar.comparison.same_model import check_capture, check_same_model
from autopar.errors import PlanError, first_few
from autopar.inference.prepared import made_ready
from autopar.parallelizing import all_ranks, arguments, bucket_plans, replanning
from autopar.parallelizing.bucket_plans import BucketsTogether
from autopar.parallelizing.call_examples import example_of, split_example, split_inputs
from autopar.parallelizing.forward_only import ready_for
from autopar.parallelizing.given_plans import check_axes_of_plan, check_rows, outcome_of, parts_of_batch, policy_of
from autopar.parallelizing.precisions import agreed_on, fastest, request_under, with_note
from autopar.plan_calls import Allowed, ExpertLoad, capture, layouts, plan
from autopar.planner import planning
from autopar.planner.planning import Outcome
from autopar.plans.clusters import get_cluster, profile_of
from autopar.plans.offload_options import OffloadWish
from autopar.plans.plan import Plan
from autopar.plans.plan_options import INFERENCE, MOST_AXES, PLAN_OPTIONS, TRAINING, documented
from autopar.plans.request import PlanRequest, request_of
from autopar.profiling.measured_load import with_measured_load
from autopar.report.decided import say
from autopar.runtime.as_module.parallel_module import ParallelModule, derive
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.one_mesh.left_attributes import begin
from autopar.runtime.parameters.init import Init
from autopar.runtime.ranks.agree import TIMEOUT_SECONDS, ensure_process_group, mesh_group, share
from autopar.runtime.ranks.devices import check_own_gpus
from autopar.runtime.ranks.groups import abort_groups
from autopar.runtime.ranks.presence import alive
from autopar.runtime.variants.buckets import Buckets, Size
from autopar.runtime.variants.program_cache import KEPT, KEPT_IN_INFERENCE, Programs
from autopar.words.meshes import Mesh, mesh_shapes
from autopar.words.precision import Precision, adding_up_in, parse_choice, parse_precision
from hardware_profiles import Cluster


@documented
def parallelize(  # noqa: C901  (one call from arguments to module, in order)
    model: torch.nn.Module,
    mesh: DeviceMesh | Mapping[str, int] | str | Cluster | int | None = None,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    plan: Plan | str | Path | None = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Mapping[str, Mapping[str, str]] | None = None,
    params: Mapping[str, str] | None = None,
    placements: Mapping[str | int, str] | None = None,
    recompute: Sequence[str] | str = (),
    offload: OffloadWish | None = None,
    memory_limit: float | str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    precision: Allowed = None,
    expert_load: ExpertLoad = None,
    microbatches: int | str | Sequence[int] | None = None,
    stages: int | str | None = None,
    schedule: str | Sequence[str] | None = None,
    cuts: Sequence[str] | None = None,
    max_axes: int = MOST_AXES,
    time_limit: float | None = None,
    init: Init | None = None,
    hooks: str = "refuse",
    timeout: float = TIMEOUT_SECONDS,
    profile: str | Path | None = None,
    verify_capture: bool = True,
    on_change: str = "error",
    shapes: str = "any",
    buckets: Sequence[tuple[int, int]] = (),
    gradient_dtype: torch.dtype | None = None,
    batch: str = "global",
    compile: bool | Mapping[str, Any] = False,
    input_rows: InputRows = None,
    random: str = "sharded",
    mode: str = TRAINING,
    cache_length: int | None = None,
) -> Any:
    """Spread a model over a mesh; every rank calls it with the same arguments.

    Rank 0 plans and sends the plan to the others; what fails on one rank is raised on all of them.

    A training loop goes on as it was: ``loss = pm(batch); loss.backward()``. So meshes, recomputation and ways to keep
    parameters are searched, and the whole batch runs at once on one group of devices. ``microbatches="auto"`` cuts it,
    ``stages="auto"`` searches pipelines, too, as :func:`plan` does: such a model trains by
    ``pm.train_step(*batch)``. Where nothing fits without, the error says what would.

    Args:
        model: the model with its weights (rank 0's are used), or on the meta device.
        mesh: a DeviceMesh with named axes, or axes and sizes as for :func:`plan` (``"data=2,tensor=4"``), over all
            ranks in order; or a cluster's name, or the number of ranks, and the shape is chosen. By default all ranks
            that the launcher started (``torchrun``), or the one process. An axis ``pipe``, the first, makes a
            pipeline; its size is the number of groups.
        example_inputs: the batch of a step, as for :func:`plan`.
        example_kwargs: keyword arguments of that call, if it has positional ones too.
        plan: run this plan (or plan file) instead of making one; it says how many microbatches the batch is cut into.
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
            values that they read, so that a flag may be toggled; stages of a pipeline stay where they are.
            All ranks change values alike (:mod:`autopar.runtime.variants.program_cache`).
        shapes: what a call with another number of rows, another length, other plain arguments or without some of them
            does: ``"any"`` captures the model for it and plans it over the same parameters, once for each such call
            (the eight programs used last are kept); ``"fixed"`` refuses it. Stages of a pipeline stay where they are;
            rows that its microbatches do not divide go through in a smaller one of their own. ``"buckets"`` pads every
            call up to one of ``buckets``.
        buckets: ``(rows, length)`` of the shapes that calls are padded to, each in the smallest that takes it: its
            first two dims are those of the first tensor that has two. Labels are padded with what the loss ignores, all
            else with zeros, and outputs are cut back. A model that takes padding for data (a loss over rows, attention
            to all positions without a mask, batch norms) is refused: a part of the example batch is tried with padding
            and without. On one mesh and without microbatches all buckets are planned together
            (:mod:`autopar.parallelizing.bucket_plans`), for steps in the order of this list: name one as often as it
            comes.
        gradient_dtype: the dtype in which gradients are added up over ranks, such as ``torch.float32`` for a model in
            bfloat16; by default the parameters' own. What they get is of their own again. The plan is made, and priced,
            for it; a ``plan`` that is given keeps its price.
        batch: ``"global"``: every rank is called with the whole batch, and takes its slice; ``"local"``: with its own
            rows, as with DistributedDataParallel and DistributedSampler, also in ``example_inputs``; what a call gives
            is its own rows, too, and scalars of the whole batch (:mod:`autopar.runtime.batches.local_batch`). In a
            pipeline the nth ranks of all groups have the same rows.
        compile: whether the programs are compiled, as ``pm.compile()`` does; or the options of ``torch.compile``, such
            as ``{"fullgraph": True}``.
        input_rows: the inputs that have one entry for each row of the batch, by the names or positions of arguments of
            forward; microbatches, and ranks with ``batch="local"``, get parts of these, and all others as they are. By
            default the graph says it: the inputs from whose first dim the rows reach the loss.
        random: who draws random numbers, such as those of dropout. Each call takes a seed from torch's default
            generator, which ``torch.manual_seed``, ``fork_rng`` and ``set_rng_state`` govern as in eager mode.
            ``"sharded"``: each rank draws its part of numbers that follow from that seed and from their place in the
            batch, so neither the mesh nor the number of microbatches changes them; they are not those of eager mode.
            ``"torch"``: the numbers of eager mode on one device, drawn whole by torch's generator on every rank and
            then cut: slower, for comparing losses with a script's from the first step on. What torch draws in a way
            that cannot be followed is refused by name.
        mode: ``"inference"``: the model runs forward alone, in eval mode and without gradients, under a plan that has
            none. Buffers that forward writes and later calls read, such as caches of keys and values, are kept in
            pieces, as the plan cuts them; a call of another shape (a prompt, one token) gets a program of its own over
            the same parameters and the same pieces. A model with a pipeline is called like one without. ``train()``,
            ``train_step`` and inputs that want gradients are refused. A model of ``transformers`` that generates, and
            a plain one with caches, keep a method ``generate`` (:mod:`autopar.inference.prepared`).
        cache_length: tokens of a sequence that the caches of such a model hold, prompt and answer; by default a power
            of two with room for 256 tokens behind the example's.

    The other arguments are those of :func:`plan`.

    Returns:
        The model itself, of a class derived from its own
        (:class:`~autopar.runtime.as_module.parallel_module.ParallelModule`): calls, ``train_step`` and ``evaluate`` run
        the plan, and its attributes, methods and submodules are the model's. Its parameters are new ones, DTensors
        under the same names and in the same dtypes: make the optimizer after this call, or pass it in. The old ones
        have no values, and raise an error where they are used. In a pipeline a rank has the parameters of its stages.
        Copy the model before (``copy.deepcopy``) to have one of eager mode, too.

    Raises:
        InfeasibleError: nothing fits.
        CaptureError: the model cannot be traced, is another one on some rank, or its graph is not what it does in eager
            mode.
        RunError: a parameter or buffer of a model on the meta device gets no value.
        ClusterError, MeshError, PlanError, AutoparError: an argument names what there is not, or cannot be.
    """
    given = dict(locals())
    arguments.check(mode=mode, example_kwargs=example_kwargs)
    ready = made_ready(model, example_inputs, example_kwargs, cache_length) if mode == INFERENCE else None
    encoder = None
    if ready is not None:
        if ready.encoder is not None:
            of_encoder, call = ready.encoder
            options = {**given, "model": of_encoder, "example_inputs": (), "example_kwargs": call}
            try:
                encoder = parallelize(**ready.options_of(of_encoder, options))
            except BaseException:
                of_encoder.put_back()
                raise
        model, example_inputs, example_kwargs = ready.module, ready.args, ready.kwargs
        given = ready.options_of(model, {**given, "model": model})
        given.update(example_inputs=example_inputs, example_kwargs=example_kwargs)
        init = given["init"]
    of_model = model if isinstance(model, torch.nn.Module) else None
    ensure_process_group(timeout if arguments.is_right("timeout", timeout) else TIMEOUT_SECONDS, of_model)
    if mesh is None:
        mesh = given["mesh"] = dist.get_world_size()
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    group = mesh_group(device_mesh) if device_mesh is not None else dist.group.WORLD
    with alive(group, "parallelize", abort_groups), ready_for(model, mode):
        move = arguments.check_call(group, given)
        check_own_gpus(group, device_mesh.device_type if device_mesh is not None else all_ranks.device_type_of(model))
        there, axes = all_ranks.where_of(mesh, dist.get_world_size(group))
        if profile is not None:
            if isinstance(there, DeviceMesh | int):
                cluster = profile_of(profile, cluster)
            else:
                there = profile_of(profile, there)
        allowed = parse_choice(precision)
        if allowed:
            if plan is not None:
                raise PlanError(f"precision={precision!r} is a choice, and plan= was made under one; leave it out")
            given["precision"] = allowed[0]
        if plan is not None and precision is None:
            given["precision"] = policy_of(plan, group)
        request = all_ranks.on_all(group, lambda: replace(_asked(given, axes, device_mesh), input_rows=input_rows))
        if request.pins.precision is not None:
            request.pins.precision.check_runs()
        bare = example_inputs, example_kwargs, targets
        padded: Padded | None = None
        if buckets:
            padded = all_ranks.on_all(group, lambda: padded_example(model, split_example(*bare), buckets))
            example_inputs, example_kwargs, targets = padded.example
        parts_of_rows = 1
        if batch == "local":
            parts_of_rows = all_ranks.on_all(group, lambda: parts_of_batch(plan, request, dist.get_world_size(group)))
        fixed = request.microbatches  # of 1 where it is to be chosen

        def first(microbatches: int, one: Captured | None = None) -> Any:
            """Return the first of `microbatches` parts of the batch: ``(args, kwargs, targets)``."""
            batch_of_step = example_of(model, example_inputs, example_kwargs, targets)
            return first_part(batch_of_step, microbatches, no_rows_in(one) if one is not None else ())

        def taken(policy: Precision | None) -> Captured:
            def one(batch_taken: Any) -> Captured:
                args, kwargs, of_loss = batch_taken
                return capture(
                    model, args, example_kwargs=kwargs, loss_fn=loss_fn, targets=of_loss, precision=policy
                )

            part: Captured = captured_in_parts(one, first(1), fixed, model, input_rows, ranks=parts_of_rows)
            return part

        note = ""
        if allowed:
            seen_by_all = all_ranks.records_of(group, model, there)

            def under(policy: Precision) -> Plan:
                """Plan under one of the policies that are allowed."""
                under_it = request_under(request, policy, gradient_dtype)
                part = taken(under_it.pins.precision)
                check_products_run(part.graph)
                where, n, name = all_ranks.hardware_of(all_ranks.device_type_of(model), there, cluster, seen_by_all)
                return planning.find(model, part, lambda: first(1), where, n, under_it, name).plan

            policy, note = agreed_on(group, lambda: fastest(allowed, under))
            request = request_under(request, policy, gradient_dtype)
        captured = all_ranks.on_all(group, lambda: taken(request.pins.precision))
        check_products_run(captured.graph)
        if dist.get_rank(group) == 0 and (said := none_narrow(captured.graph)):
            warnings.warn(said, stacklevel=2)
        if parts_of_rows > 1:
            local_rows = split_example(example_inputs, example_kwargs, targets)
            example_inputs, example_kwargs, targets = as_whole(local_rows, parts_of_rows, no_rows_in(captured))
        check_same_model(captured, model, group)
        in_buckets: Buckets | None = None
        if padded is not None:
            before_capture = padded
            in_buckets = all_ranks.on_all(group, lambda: proved(before_capture, captured, model, split_example(*bare)))
        if verify_capture:
            args, kwargs = split_inputs(example_inputs, example_kwargs)
            check_capture(
                captured, model, first_part((args, kwargs, targets), fixed, no_rows_in(captured)), group
            )  # fmt: skip

        records = all_ranks.records_of(group, model, there) if plan is None else []

        together: BucketsTogether | None = None

        def in_bucket(size: Size) -> Captured:
            """Return a call of a bucket, captured."""
            assert in_buckets is not None
            rows = parts_of_rows
            shown = split_example(example_inputs, example_kwargs, targets)
            args, kwargs, of_loss = of_size(in_buckets, shown, (rows * size[0], size[1]))
            return capture(
                model, args, example_kwargs=kwargs, loss_fn=loss_fn, targets=of_loss, precision=request.pins.precision
            )  # fmt: skip

        def decide() -> Outcome:
            nonlocal together, request
            if plan is None:
                request = with_measured_load(request, captured, model, first(fixed, captured))
            if plan is None and buckets and request.microbatches == 1 and not request.piped:
                where, n, name = all_ranks.hardware_of(all_ranks.device_type_of(model), there, cluster, records)
                together = bucket_plans.find(captured, buckets, in_bucket, where, n, request, name)
                return together.outcome
            if plan is None:
                where, n, name = all_ranks.hardware_of(all_ranks.device_type_of(model), there, cluster, records)
                outcome = planning.find(model, captured, lambda: first(1), where, n, request, name)
                return replace(outcome, plan=with_note(outcome.plan, note))
            return outcome_of(plan, part, get_cluster(cluster) if cluster is not None else None, mode)

        def part(microbatches: int) -> Captured:
            """Return the capture of one of `microbatches` parts of the batch."""
            if microbatches == fixed:
                return captured
            return planning.part_of(model, captured, first(1), microbatches, input_rows)

        one, decided = all_ranks.agreed(decide, captured, group, part)
        if device_mesh is not None and (len(decided.stages) > 1 or "pipe" in (device_mesh.mesh_dim_names or ())):
            all_ranks.groups_of(axes or Mesh(), None)  # a mesh for stages, of which each takes its part
            device_mesh = None
        if device_mesh is None and axes is not None:
            check_axes_of_plan(decided, request.pins.mesh, request.pins.stages)
        if verify_capture and decided.microbatches > 1 and dist.get_rank(group) == 0:
            said = difference_by_parts(one, model, first(1), decided.microbatches)
            if said:
                warnings.warn(said, stacklevel=2)
        if random == "torch":
            rows = None if decided.microbatches == 1 else rows_of(first(1), no_rows_in(one))
            where = device_mesh.device_type if device_mesh is not None else all_ranks.device_type_of(model)
            all_ranks.on_all(group, lambda: check_draws(one, model, first(1), rows, where))
        device_type = all_ranks.device_type_of(model)
        gradients = [name for name, param in model.named_parameters() if param.grad is not None]
        if gradients and dist.get_rank(group) == 0:
            warnings.warn(
                f"{first_few(gradients)} of the model have gradients, which are dropped: its parameters are replaced "
                "by new ones, and gradients of these begin at zero; call parallelize before backward(), or zero_grad() "
                "before parallelize",
                stacklevel=2,
            )
        run = all_ranks.spread(model, one, decided, group, device_mesh=device_mesh, init=init, random=random)
        run.inference = mode == INFERENCE
        with run.user.restored_on_error():
            run.told_of_statistics = tell_of_statistics([one.graph], decided.microbatches)
            if batch == "local" and dist.get_world_size(group) > 1:
                all_ranks.on_all(group, lambda: check_rows(decided, one, parts_of_rows))
                run.take_local_batch(no_rows_in(one))
            cluster_of_plan = all_ranks.hardware_when_asked(decided, device_type, there, cluster, records)
            prepared = together.by_graph if together is not None else None
            planner: Callable[..., Any] = replanning.planner_of(decided, cluster_of_plan, group, prepared)
            if len(decided.stages) > 1:
                planner = replanning.stage_planner_of(decided, one.graph, cluster_of_plan, group)
            run.programs = Programs(
                model, one.example, run.rank_numbers(), planner,
                replanning.comparer_of(group) if verify_capture else None,
                shapes=shapes != "fixed", values=on_change == "recapture",
                most=KEPT if mode == TRAINING else KEPT_IN_INFERENCE,
            )  # fmt: skip
            run.buckets = in_buckets
            run.layouts_change = bool(share(group, "yes" if together and together.changes else "", None))
            pm: ParallelModule = derive(run)
            if gradient_dtype is not None:
                pm.gradient_dtype = gradient_dtype
            if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:
                say(decided, one.graph, random)
            if compile is not False:
                all_ranks.on_all(group, lambda: ParallelModule.compile(pm, **({} if compile is True else compile)))
            if move is not None:
                move.to(dict(run.named_parameters(remove_duplicate=False)), run.device, group)
        run.user.free(run.device)
        begin(run)
        return pm if ready is None else ready.finished(pm, encoder)


def _asked(given: Mapping[str, Any], axes: Mesh | None, device_mesh: DeviceMesh | None) -> PlanRequest:
    """Return the plan options among the arguments of :func:`parallelize`; axes of ranks say mesh, and maybe stages."""
    wanted = {**given, "mesh": axes, "optimizer": arguments.check_optimizer(given["optimizer"])}
    if axes is not None:
        staged = any(wanted[option.name] is not None for option in PLAN_OPTIONS if option.pipelines)
        if "pipe" in axes.names or (staged and device_mesh is not None):
            wanted["stages"], wanted["mesh"] = all_ranks.groups_of(axes, given["stages"])
        if device_mesh is None:
            all_ranks.check_axes(wanted["mesh"], wanted["stages"] or ("auto" if staged else 1), dist.get_world_size())
    if given["plan"] is not None:  # it says all that there is to say
        wanted["microbatches"] = None
    elif given["gradient_dtype"] is not None:  # so that the bytes of the sums are priced
        wanted["precision"] = adding_up_in(parse_precision(wanted["precision"]), given["gradient_dtype"])
    request = request_of(wanted, whole=True)
    if given["mode"] == TRAINING:
        return request
    request = replace(request, microbatches=1, numbers=None)  # a cache has the rows of the whole batch
    return replace(request, may_recompute=False, pins=replace(request.pins, mode=given["mode"]))


__all__ = ["capture", "get_cluster", "layouts", "mesh_shapes", "parallelize", "plan", "split_inputs"]
