"""The calls of a script that need no ranks: :func:`capture`, :func:`plan`, :func:`layouts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch

import autopar.rules  # noqa: F401  (registers the rules)
from autopar.capture import Captured, none_narrow
from autopar.capture import capture as _capture
from autopar.capture.in_parts import InputRows, captured_in_parts, no_rows_in
from autopar.capture.microbatches import first_part
from autopar.comparison.parts_of_loss import with_notes
from autopar.errors import CaptureError, ClusterError, PlanError
from autopar.parallelizing import arguments
from autopar.parallelizing.call_examples import example_of
from autopar.parallelizing.precisions import fastest, with_note
from autopar.planner import planning
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.plans.clusters import get_cluster, profile_of, reference
from autopar.plans.offload_options import OffloadWish
from autopar.plans.plan import Plan
from autopar.plans.plan_options import MOST_AXES, PLAN_OPTIONS, TRAINING, documented
from autopar.plans.request import request_of
from autopar.profiling.measured_load import with_measured_load
from autopar.rules.experts.expert_load import with_load
from autopar.serving.by_arguments import serving_plan
from autopar.serving.records import ServingPlan
from autopar.words.meshes import Mesh
from autopar.words.precision import Precision, parse_choice, parse_precision
from hardware_profiles import Cluster

MeshLike = Mesh | Mapping[str, int] | str | None
Allowed = str | Precision | Sequence[str | Precision] | None
"""A precision policy, or several to choose from."""
ExpertLoad = str | Path | Sequence[float] | Mapping[str, Sequence[float]] | None


def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    precision: str | Precision | None = None,
) -> Captured:
    """Return what ``model`` computes on ``inputs``, as a graph; see :func:`autopar.capture.capture`.

    Args:
        model: any module; on the meta device nothing is allocated. Its training mode is kept.
        inputs: the batch with its global shapes: a tuple of args, a dict of kwargs, or a tensor.
        example_kwargs: keyword arguments, for a model that takes both.
        loss_fn, targets: ``loss_fn(output, *targets)`` if the model does not return its loss; targets of global shape.
        precision: the policy that :func:`plan` and :func:`parallelize` take; None: as the model is.

    Returns:
        The graph, at global shapes and in the model's dtypes, and what is needed to call it like the model; for
        :func:`plan`, several times over.

    Raises:
        CaptureError: the model cannot be traced, or ``loss_fn`` returns no scalar with a gradient; the message names
            the source line and what to change.
        AutoparError: an argument is not what it must be.
    """
    arguments.check_model(model)
    arguments.check(example_kwargs=example_kwargs, loss_fn=loss_fn, targets=targets)
    args, kwargs, targets = example_of(model, inputs, example_kwargs, targets)
    try:
        policy = parse_precision(precision)
        captured = _capture(model, args, kwargs, loss_fn=loss_fn, targets=targets, precision=policy)
    except CaptureError as error:
        if kwargs or len(args) != 2 or not isinstance(args[0], (tuple, list)) or not isinstance(args[1], Mapping):
            raise
        raise CaptureError(
            f"{error}\n  a pair (args, kwargs) is two positional arguments; pass args as the example inputs, and "
            "example_kwargs=kwargs beside them"
        ) from error
    if loss_fn is not None:
        arguments.check_loss(captured)
    return captured


@overload
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
    captured: Captured | None = None,
    profile: str | Path | None = None,
    input_rows: InputRows = None,
    like: str | None = None,
    mode: Literal["training"] = "training",
) -> Plan: ...


@overload
def plan(
    model: torch.nn.Module,
    cluster: str | Path | Cluster,
    inputs: Any,
    *,
    mode: Literal["inference"],
    input_tokens: int,
    output_tokens: int,
    prefix_tokens: int | None = None,
    first_token_seconds: float | None = None,
    token_seconds: float | None = None,
    requests_per_second: float | None = None,
    engine: str | None = None,
    cache_precision: str | None = None,
    devices: int | None = None,
    cost_per_hour: float | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str | Precision | None = None,
    like: str | None = None,
) -> ServingPlan: ...


@documented
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
    captured: Captured | None = None,
    profile: str | Path | None = None,
    input_rows: InputRows = None,
    like: str | None = None,
    mode: str = TRAINING,
    **serving: Any,
) -> Plan | ServingPlan:
    """Plan a model on a cluster. Needs no process group and no accelerator.

    Everything that is not said is searched, as by ``autopar plan``: meshes, stages, schedules, numbers of microbatches,
    recomputation, ways to keep parameters. ``stages=1``, ``microbatches=1``, ``recompute="none"`` and ``mesh=`` (one
    group of devices and one microbatch, unless these are given too) restrict it. Ctrl-C ends it with the best plan so
    far, and a note in the plan.

    Args:
        model: any module; on the meta device nothing is allocated.
        cluster: name of a hardware profile, path of one, or a :class:`~hardware_profiles.Cluster`.
        inputs: the batch of a step with its global shapes: a tuple of args, a dict of kwargs, or a tensor.
        example_kwargs: keyword arguments beside positional ``inputs``.
        loss_fn, targets: ``loss_fn(output, *targets)`` if the model does not return its loss.
        {wishes}
        captured: what :func:`capture` gave of the batch, to plan several meshes without capturing again.
        profile: what ``autopar profile`` measured; ``cluster`` may then be None, or is checked to be the one measured.
        input_rows: as for :func:`parallelize`.
        like: a layout in people's words, such as ``"tp=8,dp=8,sp,zero=1"``: its plan, with nothing searched
            (:mod:`autopar.planner.layouts.layout_words`). The words say all but ``memory_limit``, ``optimizer``,
            ``precision`` and ``expert_load``. :func:`layouts` prices layouts that do not fit, too.
        mode: ``training``, or ``inference`` for a deployment that serves requests, which is returned as a
            :class:`~autopar.serving.records.ServingPlan`.
        serving: with ``mode="inference"``: ``input_tokens``, ``output_tokens``, ``prefix_tokens``, limits
            ``first_token_seconds`` and ``token_seconds``, ``requests_per_second``, ``engine``, ``cache_precision``,
            ``devices`` and ``cost_per_hour``; of the other arguments ``precision`` and ``like`` mean something.

    Returns:
        The fastest plan that fits, by its price (``plan.seconds`` of a step, ``plan.memory_bytes`` of the fullest
        device). :func:`parallelize` runs it, :func:`autopar.planfile.save` writes it to a file.

    Raises:
        InfeasibleError: nothing fits; it says what was tried, by how much the nearest misses, and what would do.
        CaptureError: the model cannot be traced.
        ClusterError, MeshError, PlanError, AutoparError: an argument names what there is not, or cannot be.
    """
    given = dict(locals())
    if not isinstance(mode, str):
        arguments.check(mode=mode)
    del given["mode"], given["serving"]
    if mode != TRAINING or serving:
        return serving_plan(given, mode, serving)
    arguments.check(**given)
    if allowed := parse_choice(precision):
        if captured is not None:
            raise PlanError(f"precision={precision!r} is a choice, and captured= was captured under one; leave it out")
        _, chosen, note = fastest(allowed, lambda policy: plan(**{**given, "precision": policy}))
        return with_note(chosen, note)
    assert precision is None or isinstance(precision, (str, Precision))
    if profile is not None:
        cluster = profile_of(profile, cluster)
    if cluster is None:
        raise ClusterError("plan needs a cluster, or profile= with the file that autopar profile wrote")
    if like is not None:
        priced = layouts(
            model, inputs, example_kwargs=example_kwargs, loss_fn=loss_fn, targets=targets, memory_limit=memory_limit,
            optimizer=optimizer, precision=precision, expert_load=expert_load, captured=captured, input_rows=input_rows,
            others=given,
        ).price(cluster, like)  # fmt: skip
        priced.check_fits()
        batch = example_of(model, inputs, example_kwargs, targets)
        found = with_notes(priced.plan, priced.captured, model, batch)
        return replace(found, graph=priced.captured.graph)
    request = request_of({**given, "optimizer": arguments.check_optimizer(optimizer)})
    batch = example_of(model, inputs, example_kwargs, targets)
    request = replace(request, input_rows=input_rows)
    if captured is None or request.microbatches > 1:
        captured = captured_in_parts(
            lambda part: capture(
                model, part[0], example_kwargs=part[1], loss_fn=loss_fn, targets=part[2],
                precision=request.pins.precision,
            ),
            batch, request.microbatches, model, input_rows,
        )  # fmt: skip
    one = first_part(batch, request.microbatches, no_rows_in(captured))
    request = with_measured_load(request, captured, model, one)
    where = get_cluster(cluster)
    outcome = planning.find(
        model, captured, lambda: batch, where, where.n_devices, request, reference(cluster), runs=False
    )
    found = with_note(with_notes(outcome.plan, outcome.captured, model, batch), none_narrow(outcome.captured.graph))
    return replace(found, graph=outcome.captured.graph)


def layouts(
    model: torch.nn.Module,
    inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    memory_limit: float | str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    precision: str | Precision | None = None,
    expert_load: ExpertLoad = None,
    captured: Captured | None = None,
    input_rows: InputRows = None,
    others: Mapping[str, Any] | None = None,
) -> PricedLayouts:
    """Capture a model once, to price layouts of it in people's words; nothing is searched.

    >>> of_model = autopar.layouts(model, {"input_ids": ids, "labels": ids}, precision="bf16-mixed")
    >>> row = of_model.price("dgx-h100-x8", "tp=8,dp=8,sp,zero=1")
    >>> row.seconds, row.memory_bytes, row.fits                  # whether it fits or not; row.plan is its plan

    Args:
        inputs: the batch of a step with its global shapes, as for :func:`plan`, whose other arguments these are.
        others: further arguments of :func:`plan`, which are refused where they say what a layout says.

    Returns:
        :class:`~autopar.planner.layouts.pricing.PricedLayouts`, whose ``price(cluster, words)`` takes at most some
        seconds. Words are listed in :mod:`autopar.planner.layouts.layout_words`.

    Raises:
        CaptureError: the model cannot be traced.
        AutoparError: an argument names what there is not, or cannot be.
    """
    given = {
        **(others or {}), "memory_limit": memory_limit, "optimizer": arguments.check_optimizer(optimizer),
        "precision": precision, "expert_load": expert_load,
    }  # fmt: skip
    arguments.check(**given)
    options = [option for option in PLAN_OPTIONS if option.name in given and option.name not in BESIDE_LAYOUTS]
    said = [option.name for option in options if given[option.name] != option.default]
    if said:
        raise PlanError(f"like= says {', '.join(said)}, too; leave {'these' if len(said) > 1 else 'it'} out, or like=")
    request = request_of(given)
    batch = example_of(model, inputs, example_kwargs, targets)
    if captured is None:
        captured = capture(
            model, inputs, example_kwargs=example_kwargs, loss_fn=loss_fn, targets=targets,
            precision=request.pins.precision,
        )  # fmt: skip
    request = with_measured_load(request, captured, model, batch)
    captured = replace(captured, graph=with_load(captured.graph, request.pins.expert_load))
    return PricedLayouts(model, captured, batch, planning.options_of(request), input_rows)


BESIDE_LAYOUTS = ("memory_limit", "offload", "optimizer", "precision", "expert_load", "max_axes", "time_limit")
"""Arguments of :func:`plan` that a layout leaves open."""
