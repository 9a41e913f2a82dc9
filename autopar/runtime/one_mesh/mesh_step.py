"""A training step in microbatches on one mesh: gradients add up, and are reduced in the last one.

Each loss counts by its part of the rows; what it divides by beside them, such as how many labels count, is that of the
whole batch (:mod:`.totals_ahead`).

Rows that do not divide into as few microbatches as the planned size allows go through in two parts, as in a pipeline
(:mod:`.runs`): whole microbatches, and a last one with the rows that are left, which has a program of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.in_parts import no_rows_in
from autopar.capture.microbatches import have_rows, rows_of
from autopar.errors import CaptureError, RunError
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.batches.calls import leaves_of
from autopar.runtime.batches.equal_rows import check_equal_rows
from autopar.runtime.batches.local_batch import Call
from autopar.runtime.batches.runs import Run, rows_of_microbatch, runs, sizes
from autopar.runtime.batches.totals_ahead import TotalsAhead, check_in_parts, computed_ahead
from autopar.runtime.gradients.step_gradients import has_hooks
from autopar.runtime.one_mesh.direct import stand_ins
from autopar.runtime.parameters.state import as_dtensor
from autopar.runtime.stages.seeds import PlaceInBatch
from autopar.runtime.variants.module_calls import ModuleCall, batch_rows, parts_of
from autopar.torch_private import pytree
from autopar.words.autocasting import without_autocast
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class StepPart:
    """Microbatches of a step that have one shape.

    Attributes:
        call: the call for whose shapes there is to be a program.
        share: the fraction of the batch's rows.
        calls: one for each microbatch; None if they are cut from ``call``.
        places: for each microbatch, where its rows are in the batch; only if ranks have rows of their own.
    """

    call: ModuleCall
    share: float = 1.0
    calls: Sequence[Call] | None = None
    places: Sequence[PlaceInBatch] | None = None


def parts_of_step(
    pm: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], microbatches: int | None
) -> list[StepPart]:  # fmt: skip
    """Return the parts of a step, before the first of them begins; every rank calls it.

    Args:
        pm: the module.
        args, kwargs: the batch, where each rank has rows of its own this one's.
        microbatches: how many the caller wants; None for as many as the rows say.

    Raises:
        RunError: ranks are called with what makes no batch.
    """
    count = microbatches
    if count is not None and count < 1:
        raise RunError(f"microbatches is {count}; give 1 or more, or None for as many as the rows say")
    if not pm.batch.pieces:
        check_equal_rows(pm.planned, pm.signature, args, kwargs)
    if pm.local_batch is not None:
        with pm.all_in_step("the rows of the ranks"):
            together = pm.rows_of_all(args, kwargs)
        if together is None:
            return _of_local_batch(pm, args, kwargs, count)
        args, kwargs = together
    uneven = _uneven(pm, args, kwargs, count)
    if uneven is None:
        return [StepPart(ModuleCall(args, kwargs, in_parts=True, parts=count))]
    return [StepPart(run.call, run.share * run.microbatches) for run in uneven]


def _may_be_uneven(pm: Any) -> bool:
    """Check whether a step may have parts of several shapes; hooks on parameters see the sums of a part."""
    follows = pm.programs is not None and pm.programs.shapes
    is_replicated = pm.buckets is None and not pm.batch.pieces
    return follows and is_replicated and not any(has_hooks(param) for param in pm.parameters())


def _of_local_batch(pm: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], count: int | None) -> list[StepPart]:
    """Return the parts of a step of which every rank has equally many rows."""
    assert pm.local_batch is not None
    without = no_rows_in(pm.planned)
    rows = rows_of((args, kwargs), without)
    planned = batch_rows(pm.planned) // pm.local_batch.ranks
    most = max(1, planned if count is None else -(-rows // count))
    of_parts = sizes(rows, most) if count is None or rows % count else [(count, rows // count)]
    if len(of_parts) > 1 and not _may_be_uneven(pm):
        of_parts = [(each := parts_of(rows, most), rows // each)]
    parts, begin = [], 0
    for number, each in of_parts:
        some = _rows_between((args, kwargs), rows, begin, number * each, without)
        calls = pm.local_batch.parts(*some, number)
        first_args, first_kwargs = calls[0]
        of_first = ModuleCall(first_args, first_kwargs, parts=number, of_several=len(of_parts) > 1)
        places = [PlaceInBatch(begin + k * each, max(1, each), rows) for k in range(number)]
        parts.append(StepPart(of_first, number * each / max(1, rows), calls, places))
        begin += number * each
    return parts


def _rows_between(batch: Call, rows: int, begin: int, length: int, without: Collection[str]) -> Call:
    """Return `length` rows of a batch from `begin` on; inputs without batch rows are unchanged."""
    if length == rows:
        return batch

    leaves, spec = pytree.tree_flatten(batch)
    cut = have_rows(batch, rows, without)
    some = [leaf.narrow(0, begin, length) if c else leaf for leaf, c in zip(leaves, cut, strict=True)]
    positional, by_name = pytree.tree_unflatten(some, spec)
    return positional, by_name


def _uneven(pm: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], count: int | None) -> list[Run] | None:
    """Return the runs of a batch whose rows do not divide; None if they do, or it cannot be known what has rows."""
    planned = pm.planned
    try:
        rows = rows_of((args, kwargs), no_rows_in(planned))
    except CaptureError:
        return None
    if planned.example is None or not rows:
        return None
    whole = batch_rows(planned)
    most = whole if count is None else -(-rows // count)
    if (len(sizes(rows, most)) == 1 if count is None else rows % count == 0) or not _may_be_uneven(pm):
        return None
    leaves = leaves_of(planned, pm.signature, args, kwargs)
    if leaves is None:
        return None
    for leaf, number in zip(leaves, planned.inputs, strict=True):
        if number is None:
            continue
        shape = planned.graph.nodes[number].out.shape
        cut = isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) and shape[:1] == (whole,)
        if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor) or not (cut or leaf.shape == shape):
            return None
    return runs(planned, pm.signature, pm.plan.microbatches, args, kwargs, most=most)


def trained(pm: Any, parts: Sequence[StepPart], scale: torch.Tensor | None = None) -> torch.Tensor:
    """Run forward and backward of all parts of a step.

    The parameters have their gradients then, or, where it breaks, those that they had.

    Args:
        scale: the scale by which the gradients are multiplied.

    Returns:
        The loss of the batch, a tensor of shape [] and of the loss's dtype.

    Raises:
        RunError: the model has no scalar loss, is in eval mode, or the shapes are not those of whole microbatches.
    """
    with pm.seeds.step():
        return _trained(pm, parts, scale)


def _trained(pm: Any, parts: Sequence[StepPart], scale: torch.Tensor | None) -> torch.Tensor:
    of_parts: list[Sequence[Call]] = []
    wholes: list[dict[str, torch.Tensor]] = []
    totals: list[TotalsAhead | None] = []
    places: list[Sequence[PlaceInBatch]] = []
    rows_before = 0
    for part in parts:
        pm.check_step(part.call)
        pm.check_trains()
        _loss_of(pm)
        of_parts.append(calls := _calls_of(pm, part, len(parts) > 1))
        rows = rows_of_microbatch(pm.captured)
        places.append(part.places or [PlaceInBatch(rows_before + k * rows, rows, rows) for k in range(len(calls))])
        rows_before += rows * len(calls)
        ahead = pm.totals
        totals += [ahead] * len(calls)
        with pm.fails_everywhere(f"gathering what the losses from call {pm.calls + 1} on divide by"):
            wholes += [{} if ahead is None else whole_inputs(pm, ahead, *call) for call in calls]
    pm.seeds.of_rows(rows_before)
    if len(totals) > 1:
        check_in_parts(pm.captured)
    shares = [part.share / len(calls) for part, calls in zip(parts, of_parts, strict=True) for _ in calls]
    weights = [
        share if each is None else each.totals.weight(share) for each, share in zip(totals, shares, strict=True)
    ]  # fmt: skip
    with pm.fails_everywhere(f"summing what the losses from call {pm.calls + 1} on divide by"):
        given = computed_ahead(totals, wholes, shares, pm.buffer)
    if len(parts) == 1:
        return backwards(pm, of_parts[0], weights, _loss_of(pm), len(shares), given, scale, places[0])
    losses = []
    begin = 0
    with _gradients_stay_where_it_breaks(pm):
        for part, calls, of_rows in zip(parts, of_parts, places, strict=True):
            pm.check_step(part.call)
            these = slice(begin, begin := begin + len(calls))
            losses.append(backwards(pm, calls, weights[these], _loss_of(pm), len(shares), given[these], scale, of_rows))
    return sum(losses[1:], losses[0])


def _loss_of(pm: Any) -> int:
    """Return the number of the loss among the outputs of the program that runs now.

    Raises:
        RunError: there is none.
    """
    if pm.captured.graph.loss is None:
        raise RunError("the model has no scalar loss; pass loss_fn= and targets=, or call loss.backward() yourself")
    return pm.captured.graph.loss


def _calls_of(pm: Any, part: StepPart, of_several: bool) -> Sequence[Call]:
    """Return the microbatches of a part whose program is in place."""
    if part.calls is not None:
        return part.calls
    args, kwargs = part.call.args, dict(part.call.kwargs)
    tensors = pm.batch.tensors(args, kwargs)
    if of_several or part.call.one is not None:
        pieces = pm.batch.exactly(tensors, part.call.parts)
    else:
        pieces = pm.batch.microbatches(tensors, part.call.parts, pm.stage.part_shape)
    return [pm.batch.call(piece, args, kwargs) for piece in pieces]


@contextlib.contextmanager
def _gradients_stay_where_it_breaks(pm: Any) -> Iterator[None]:
    """Restore the gradients from before a step of several parts if a later part fails."""
    params = list(pm.parameters())
    before = [None if param.grad is None else param.grad.detach().clone() for param in params]
    try:
        yield
    except BaseException:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
        raise


def backwards(
    pm: Any, calls: Sequence[Call], weights: Sequence[float], number: int, of_step: int,
    ahead: Sequence[Mapping[str, torch.Tensor]], scale: torch.Tensor | None = None,
    places: Sequence[PlaceInBatch] = (),
) -> torch.Tensor:  # fmt: skip
    """Run forward and backward of every microbatch; the parameters have their gradients then.

    Args:
        pm: the module; it runs the program of these calls.
        calls: the calls of the model, one for each microbatch.
        weights: by what their losses count in that of the batch.
        number: the number of the loss among the model's outputs.
        of_step: microbatches of the step, of which these may be a part.
        ahead: inputs of each that were computed ahead of the step.
        scale: the scale by which the gradients are multiplied.
        places: for each microbatch, where its rows are in the batch of the step.

    Returns:
        What they add to the loss of the batch, a tensor of shape [] and of the loss's dtype.
    """
    stage = pm.stage
    if not pm.told_of_statistics:
        pm.told_of_statistics = tell_of_statistics([stage.graph], of_step, stacklevel=5)
    gradients = stage.gradients
    stage.bind()
    total: torch.Tensor | None = None
    try:
        with stand_ins(stage.param_slots, stage.template) if stage.direct else contextlib.nullcontext():
            for i, (positional, by_name) in enumerate(calls):
                gradients.defer, gradients.accumulating = i < len(calls) - 1, i > 0
                pm.given_ahead = ahead[i]
                pm.seeds.at(places[i] if of_step > 1 else None)
                loss = pytree.tree_leaves(pm.run_call(positional, by_name, of_step=True))[number]
                if of_step > 1:
                    loss = loss * weights[i]
                with without_autocast():
                    loss.backward(None if scale is None else scale.to(loss.dtype))
                total = loss.detach() if total is None else total + loss.detach()
    except BaseException:
        gradients.drop()
        raise
    finally:
        gradients.defer = gradients.accumulating = False
        pm.given_ahead = None
    assert total is not None, "a step has microbatches"
    return total


def whole_inputs(
    pm: Any, ahead: TotalsAhead, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> dict[str, torch.Tensor]:
    """Return the inputs from which totals of the batch follow, whole: ranks may be called with their pieces."""
    tensors = pm.batch_of(args, kwargs)
    whole = {}
    for name, shape in ahead.inputs.items():
        leaf = tensors[name].detach()
        if not isinstance(leaf, DTensor) and tuple(leaf.shape) != shape:
            leaf = as_dtensor(leaf, pm.stage.inputs[name].state, shape, pm.device_mesh)
        whole[name] = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return whole
