"""A training step in microbatches on one mesh: gradients add up, and are reduced in the last one.

Each loss counts by its part of what the loss of the batch is the mean of (:mod:`.loss_counts`): of its rows, which are
as many in every microbatch, or of the labels that count.

Rows that do not divide into as few microbatches as the planned size allows go through in two parts, as in a pipeline
(:mod:`.runs`): whole microbatches, and a last one with the rows that are left, which has a program of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.microbatches import rows_of
from autopar.errors import CaptureError, RunError
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.batches.calls import leaves_of
from autopar.runtime.batches.loss_counts import Count, Shares, shares_by_count
from autopar.runtime.batches.own_rows import Call
from autopar.runtime.batches.runs import Run, rows_of_microbatch, runs, sizes
from autopar.runtime.gradients.step_gradients import has_hooks
from autopar.runtime.one_mesh.direct import stand_ins
from autopar.runtime.parameters.state import as_dtensor
from autopar.runtime.stages.seeds import PlaceInBatch
from autopar.runtime.variants.module_calls import ModuleCall, batch_rows, parts_of
from autopar.torch_private import pytree
from autopar.words.autocasting import without_autocast


@dataclass(frozen=True)
class StepPart:
    """Microbatches of a step that have one shape.

    Attributes:
        call: for whose shapes there is to be a program.
        share: of the rows of the batch.
        calls: of the microbatches; None where they are cut from ``call``.
        places: of the rows of each in the batch, where ranks have rows of their own.
    """

    call: ModuleCall
    share: float = 1.0
    calls: Sequence[Call] | None = None
    places: Sequence[PlaceInBatch] | None = None


def parts_of_step(pm: Any, args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int | None) -> list[StepPart]:
    """The parts of a step, before the first of them begins; every rank calls it.

    Args:
        pm: the module.
        args, kwargs: the batch, where each rank has rows of its own this one's.
        microbatches: how many the caller wants; None or 0 for as many as the rows say.

    Raises:
        RunError: ranks are called with what makes no batch.
    """
    count = microbatches or None
    if count is not None and count < 1:
        raise RunError(f"microbatches is {count}; give 1 or more")
    if pm._autopar_own_rows is not None:
        with pm._autopar_all_in_step("the rows of the ranks"):
            together = pm._autopar_rows_of_all(args, kwargs)
        if together is None:
            return _of_own_rows(pm, args, kwargs, count)
        args, kwargs = together
    uneven = _uneven(pm, args, kwargs, count)
    if uneven is None:
        return [StepPart(ModuleCall(args, kwargs, in_parts=True, parts=count))]
    return [StepPart(run.call, run.share * run.microbatches) for run in uneven]


def _may_be_uneven(pm: Any) -> bool:
    """Whether a step may have parts of several shapes. Hooks on parameters see the sums of a part, not of the step."""
    follows = pm._autopar_programs is not None and pm._autopar_programs.shapes
    is_whole = pm._autopar_buckets is None and not pm._autopar_batch.pieces
    return follows and is_whole and not any(has_hooks(param) for param in pm.parameters())


def _of_own_rows(pm: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int | None) -> list[StepPart]:
    """The parts of a step of which every rank has equally many rows."""
    rows = rows_of((args, kwargs))
    planned = batch_rows(pm._autopar_planned) // pm._autopar_own_rows.ranks
    most = max(1, planned if count is None else -(-rows // count))
    of_parts = sizes(rows, most) if count is None or rows % count else [(count, rows // count)]
    if len(of_parts) > 1 and not _may_be_uneven(pm):
        of_parts = [(each := parts_of(rows, most), rows // each)]
    parts, begin = [], 0
    for number, each in of_parts:
        some = _rows_between((args, kwargs), rows, begin, number * each)
        calls = pm._autopar_own_rows.parts(*some, number)
        first_args, first_kwargs = calls[0]
        of_first = ModuleCall(first_args, first_kwargs, parts=number)
        places = [PlaceInBatch(begin + k * each, max(1, each), rows) for k in range(number)]
        parts.append(StepPart(of_first, number * each / max(1, rows), calls, places))
        begin += number * each
    return parts


def _rows_between(batch: Call, rows: int, begin: int, length: int) -> Call:
    """Some of the rows of a batch; what does not have its rows stays as it is."""
    if length == rows:
        return batch

    def some(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        return leaf.narrow(0, begin, length) if has_rows else leaf

    positional, by_name = pytree.tree_map(some, batch)
    return positional, by_name


def _uneven(pm: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int | None) -> list[Run] | None:
    """The runs of a batch whose rows do not divide; None where they do, or it cannot be known what has rows."""
    planned = pm._autopar_planned
    try:
        rows = rows_of((args, kwargs))
    except CaptureError:
        return None
    if planned.example is None or not rows:
        return None
    whole = batch_rows(planned)
    most = whole if count is None else -(-rows // count)
    if (len(sizes(rows, most)) == 1 if count is None else rows % count == 0) or not _may_be_uneven(pm):
        return None
    leaves = leaves_of(planned, pm._autopar_signature, args, kwargs)
    if leaves is None:
        return None
    for leaf, number in zip(leaves, planned.inputs, strict=True):
        if number is None:
            continue
        shape = planned.graph.nodes[number].out.shape
        cut = isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) and shape[:1] == (whole,)
        if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor) or not (cut or leaf.shape == shape):
            return None
    return runs(planned, pm._autopar_signature, pm.plan.microbatches, args, kwargs, most=most)


def trained(pm: Any, parts: Sequence[StepPart], scale: torch.Tensor | None = None) -> torch.Tensor:
    """Forward and backward of all parts of a step; the parameters have their gradients then, or, where it breaks, those
    that they had.

    Args:
        scale: by which the gradients are multiplied.

    Returns:
        The loss of the batch, a tensor of shape [] and of the loss's dtype.

    Raises:
        RunError: the model has no scalar loss, is in eval mode, or the shapes are not those of whole microbatches.
    """
    with pm._autopar_seeds.step():
        return _trained(pm, parts, scale)


def _trained(pm: Any, parts: Sequence[StepPart], scale: torch.Tensor | None) -> torch.Tensor:
    of_parts: list[Sequence[Call]] = []
    places: list[Sequence[PlaceInBatch]] = []
    rows_before = 0
    counts: list[Count | None] = []
    of_labels: list[torch.Tensor] = []
    for part in parts:
        pm._autopar_check_step(part.call)
        pm._autopar_check_trains()
        if pm._autopar_captured.graph.loss is None:
            raise RunError(
                "the model has no scalar loss; pass loss_fn= and targets=, or call loss.backward() yourself"
            )
        of_parts.append(calls := _calls_of(pm, part, len(parts) > 1))
        rows = rows_of_microbatch(pm._autopar_captured)
        places.append(part.places or [PlaceInBatch(rows_before + k * rows, rows, rows) for k in range(len(calls))])
        rows_before += rows * len(calls)
        if len(parts) == len(calls) == 1:
            continue
        count = pm._autopar_count
        counts.append(count)
        if count is not None:
            first = pm._autopar_calls + 1
            with pm._autopar_fails_everywhere(f"counting what the losses from call {first} on are means of"):
                of_labels.append(torch.stack([count(_whole_inputs(pm, count, *call)) for call in calls]))
    pm._autopar_seeds.of_rows(rows_before)
    shares = shares_of_parts(parts, of_parts, counts, of_labels)
    if len(parts) == 1:
        loss = pm._autopar_captured.graph.loss
        return backwards(pm, of_parts[0], shares[0], loss, len(of_parts[0]), scale, places[0])
    losses = []
    with _gradients_stay_where_it_breaks(pm):
        for part, calls, of_part, of_rows in zip(parts, of_parts, shares, places, strict=True):
            pm._autopar_check_step(part.call)
            loss = pm._autopar_captured.graph.loss
            losses.append(backwards(pm, calls, of_part, loss, sum(map(len, of_parts)), scale, of_rows))
    return sum(losses[1:], losses[0])


def _calls_of(pm: Any, part: StepPart, of_several: bool) -> Sequence[Call]:
    """The microbatches of a part whose program is in place."""
    if part.calls is not None:
        return part.calls
    args, kwargs = part.call.args, dict(part.call.kwargs)
    tensors = pm._autopar_batch.tensors(args, kwargs)
    if of_several or part.call.one is not None:
        pieces = pm._autopar_batch.exactly(tensors, part.call.parts)
    else:
        pieces = pm._autopar_batch.microbatches(tensors, part.call.parts, pm._autopar_stage.part_shape)
    return [pm._autopar_batch.call(piece, args, kwargs) for piece in pieces]


def shares_of_parts(
    parts: Sequence[StepPart], of_parts: Sequence[Sequence[Call]], counts: Sequence[Count | None],
    of_labels: Sequence[torch.Tensor],
) -> list[Shares]:  # fmt: skip
    """By what part each microbatch of each part counts in the loss of the batch.

    Args:
        of_parts: the microbatches of each.
        counts: what the losses of each are means of; empty where there is one microbatch in all.
        of_labels: of how many things, float64 [microbatches] for each part that has a count.
    """
    of_rows: list[Shares] = [
        [part.share / len(calls)] * len(calls) for part, calls in zip(parts, of_parts, strict=True)
    ]
    counted = [count for count in counts if count is not None]
    if not counts or len(counted) < len(parts):
        return of_rows
    labels = torch.cat(list(of_labels))
    rows = torch.cat([
        torch.full((len(calls),), part.share / len(calls), dtype=labels.dtype, device=labels.device)
        for part, calls in zip(parts, of_parts, strict=True)
    ])  # fmt: skip
    shares = shares_by_count(counted, labels, rows)
    if shares is None:
        return of_rows
    return [each.tolist() if each.device.type == "cpu" else each for each in shares.split([len(c) for c in of_parts])]


@contextlib.contextmanager
def _gradients_stay_where_it_breaks(pm: Any) -> Iterator[None]:
    """A step of several parts that breaks in a later one leaves the gradients as they were."""
    params = list(pm.parameters())
    before = [None if param.grad is None else param.grad.detach().clone() for param in params]
    try:
        yield
    except BaseException:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
        raise


def backwards(
    pm: Any, calls: Sequence[Call], shares: Shares, number: int, of_step: int, scale: torch.Tensor | None = None,
    places: Sequence[PlaceInBatch] = (),
) -> torch.Tensor:  # fmt: skip
    """Forward and backward of every microbatch; the parameters have their gradients then.

    A microbatch in which nothing counts has a loss that is no number, and no gradient: it only runs forward, for
    whatever a forward changes.

    Args:
        pm: the module; it runs the program of these calls.
        calls: of the microbatches.
        shares: of their losses in that of the batch.
        number: of the loss among the model's outputs.
        of_step: microbatches of the step, of which these may be a part.
        scale: by which the gradients are multiplied.
        places: of the rows of each in the batch of the step.

    Returns:
        What they add to the loss of the batch, a tensor of shape [] and of the loss's dtype.
    """
    stage = pm._autopar_stage
    if not pm._autopar_told_of_statistics:
        pm._autopar_told_of_statistics = tell_of_statistics([stage.graph], of_step, stacklevel=5)
    gradients = stage.gradients
    stage.bind()
    counting = [i for i in range(len(calls)) if isinstance(shares, torch.Tensor) or shares[i] != 0.0]
    total: torch.Tensor | None = None
    try:
        with stand_ins(stage.param_slots, stage.template) if stage.direct else contextlib.nullcontext():
            for i, (positional, by_name) in enumerate(calls):
                if counting:
                    gradients.defer, gradients.accumulating = i < counting[-1], counting[0] < i <= counting[-1]
                pm._autopar_seeds.at(places[i] if of_step > 1 else None)
                loss = pytree.tree_leaves(pm._autopar_run_call(positional, by_name, of_step=True))[number]
                if i not in counting:
                    nothing = torch.zeros_like(loss.detach())
                    continue
                if of_step > 1:
                    share = shares[i]
                    loss = loss * (share.to(loss.dtype) if isinstance(share, torch.Tensor) else share)
                with without_autocast():
                    loss.backward(None if scale is None else scale.to(loss.dtype))
                total = loss.detach() if total is None else total + loss.detach()
    except BaseException:
        gradients.drop()
        raise
    finally:
        gradients.defer = gradients.accumulating = False
    return nothing if total is None else total


def _whole_inputs(pm: Any, count: Count, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs from which the count of a microbatch follows, whole: ranks may be called with their pieces."""
    tensors = pm._autopar_batch_of(args, kwargs)
    whole = {}
    for name, shape in count.inputs.items():
        leaf = tensors[name].detach()
        if not isinstance(leaf, DTensor) and tuple(leaf.shape) != shape:
            leaf = as_dtensor(leaf, pm._autopar_stage.inputs[name].state, shape, pm.device_mesh)
        whole[name] = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return whole


__all__ = ["StepPart", "backwards", "parts_of_step", "shares_of_parts", "trained"]
