"""A training step in microbatches on one mesh: gradients add up, and are reduced in the last one.

Each loss counts by its part of the rows; what it divides by beside them, such as how many labels count, is that of the
whole batch (:mod:`~autopar.runtime.batches.totals_ahead`).

Rows that do not divide into as few microbatches as the planned size allows go through in two parts, as in a pipeline
(:mod:`~autopar.runtime.batches.runs`): whole microbatches, and a last one with the rows that are left, which has a
program of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.in_parts import no_rows_in
from autopar.capture.microbatches import have_rows, rows_of
from autopar.errors import CaptureError, RunError
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.batches.calls import leaves_of
from autopar.runtime.batches.equal_rows import check_equal_rows
from autopar.runtime.batches.local_batch import Call
from autopar.runtime.batches.module_calls import ModuleCall, batch_rows, parts_of
from autopar.runtime.batches.runs import Run, rows_of_microbatch, runs, sizes
from autopar.runtime.batches.totals_ahead import TotalsAhead, check_in_parts, computed_ahead
from autopar.runtime.gradients.step_gradients import has_hooks
from autopar.runtime.one_mesh.direct import stand_ins
from autopar.runtime.one_mesh.executor import MeshCalls
from autopar.runtime.optimizers import grad_scaler
from autopar.runtime.stages.seeds import PlaceInBatch
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


class MeshRun(MeshCalls):
    """A model that is spread over one mesh, with its training steps."""

    def rebuilt(self, model: torch.nn.Module, values: Callable[[str], torch.Tensor]) -> MeshRun:
        """Return a run like this one of a copy of the model, with given whole values by name; all ranks call it."""
        seeds = self.seeds
        return MeshRun(model, self.captured, self.plan, self.device_mesh, values, alike=seeds.alike, random=seeds.mode)

    def train_step(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, optimizer: torch.optim.Optimizer | None = None,
        microbatches: int | None = None, scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a training step; arguments as of ``ParallelModule.train_step``."""
        if self.buckets is not None:
            (args, kwargs), _ = self.buckets.padded(args, kwargs)
        parts = self.parts_of_step(args, kwargs, microbatches)
        loss = self._train_parts(parts, grad_scaler.scale_of(scaler, self.device))
        if optimizer is not None:
            with self.fails_everywhere(f"the optimizer's step after call {self.calls}"):
                grad_scaler.step(optimizer, scaler)
            optimizer.zero_grad()
        return loss

    def check_step(self, call: ModuleCall) -> None:
        """Check a call before a step begins: within it, another program would be refused."""
        with self.all_in_step(f"the step of call {self.calls + 1}"):
            self.check_values(call)

    def parts_of_step(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], microbatches: int | None
    ) -> list[StepPart]:  # fmt: skip
        """Return the parts of a step, before the first of them begins; every rank calls it.

        Args:
            args, kwargs: the batch, where each rank has rows of its own this one's.
            microbatches: how many the caller wants; None for as many as the rows say.

        Raises:
            RunError: ranks are called with what makes no batch.
        """
        count = microbatches
        if count is not None and count < 1:
            raise RunError(f"microbatches is {count}; give 1 or more, or None for as many as the rows say")
        if not self.batch.pieces:
            check_equal_rows(self.planned, self.signature, args, kwargs)
        if self.local_batch is not None:
            with self.all_in_step(f"the rows of the ranks of call {self.calls + 1}"):
                together = self.rows_of_all(args, kwargs)
            if together is None:
                return self._of_local_batch(args, kwargs, count)
            args, kwargs = together
        uneven = self._uneven(args, kwargs, count)
        if uneven is None:
            return [StepPart(ModuleCall(args, kwargs, in_parts=True, parts=count))]
        return [StepPart(run.call, run.share * run.microbatches) for run in uneven]

    def _may_be_uneven(self) -> bool:
        """Check whether a step may have parts of several shapes; hooks on parameters see the sums of a part."""
        follows = self.programs is not None and self.programs.shapes
        is_replicated = self.buckets is None and not self.batch.pieces
        return follows and is_replicated and not any(has_hooks(param) for param in self.parameters())

    def _of_local_batch(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], count: int | None) -> list[StepPart]:
        """Return the parts of a step of which every rank has equally many rows."""
        assert self.local_batch is not None
        without = no_rows_in(self.planned)
        rows = rows_of((args, kwargs), without)
        planned = batch_rows(self.planned) // self.local_batch.ranks
        most = max(1, planned if count is None else -(-rows // count))
        of_parts = sizes(rows, most) if count is None or rows % count else [(count, rows // count)]
        if len(of_parts) > 1 and not self._may_be_uneven():
            of_parts = [(each := parts_of(rows, most), rows // each)]
        parts, begin = [], 0
        for number, each in of_parts:
            some = _rows_between((args, kwargs), rows, begin, number * each, without)
            calls = self.local_batch.parts(*some, number, self.device_mesh)
            first_args, first_kwargs = calls[0]
            of_first = ModuleCall(first_args, first_kwargs, parts=number, of_several=len(of_parts) > 1)
            places = [PlaceInBatch(begin + k * each, max(1, each), rows) for k in range(number)]
            parts.append(StepPart(of_first, number * each / max(1, rows), calls, places))
            begin += number * each
        return parts

    def _uneven(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], count: int | None) -> list[Run] | None:
        """Return the runs of a batch whose rows do not divide; None if they do, or it cannot be known what has rows."""
        planned = self.planned
        try:
            rows = rows_of((args, kwargs), no_rows_in(planned))
        except CaptureError:
            return None
        if planned.example is None or not rows:
            return None
        whole = batch_rows(planned)
        most = whole if count is None else -(-rows // count)
        if (len(sizes(rows, most)) == 1 if count is None else rows % count == 0) or not self._may_be_uneven():
            return None
        leaves = leaves_of(planned, self.signature, args, kwargs)
        if leaves is None:
            return None
        for leaf, number in zip(leaves, planned.inputs, strict=True):
            if number is None:
                continue
            shape = planned.graph.nodes[number].out.shape
            cut = isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) and shape[:1] == (whole,)
            if isinstance(leaf, DTensor) or not isinstance(leaf, torch.Tensor) or not (cut or leaf.shape == shape):
                return None
        return runs(planned, self.signature, self.plan.microbatches, args, kwargs, most=most)

    def _train_parts(self, parts: Sequence[StepPart], scale: torch.Tensor | None = None) -> torch.Tensor:
        """Run forward and backward of all parts of a step.

        The parameters have their gradients then, or, where it breaks, those that they had.

        Args:
            scale: the scale by which the gradients are multiplied.

        Returns:
            The loss of the batch, a tensor of shape [] and of the loss's dtype.

        Raises:
            RunError: the model has no scalar loss, is in eval mode, or the shapes are not those of whole microbatches.
        """
        with self.seeds.step():
            return self._train_parts_of_seed(parts, scale)

    def _train_parts_of_seed(self, parts: Sequence[StepPart], scale: torch.Tensor | None) -> torch.Tensor:
        of_parts: list[Sequence[Call]] = []
        wholes: list[dict[str, torch.Tensor]] = []
        totals: list[TotalsAhead | None] = []
        places: list[Sequence[PlaceInBatch]] = []
        rows_before = 0
        for part in parts:
            self.check_step(part.call)
            self.check_trains()
            self._loss_of()
            of_parts.append(calls := self._calls_of(part, len(parts) > 1))
            rows = rows_of_microbatch(self.captured)
            places.append(part.places or [PlaceInBatch(rows_before + k * rows, rows, rows) for k in range(len(calls))])
            rows_before += rows * len(calls)
            ahead = self.totals
            totals += [ahead] * len(calls)
            with self.fails_everywhere(f"gathering what the losses from call {self.calls + 1} on divide by"):
                wholes += [{} if ahead is None else self.whole_inputs(ahead, *call) for call in calls]
        self.seeds.of_rows(rows_before)
        if len(totals) > 1:
            check_in_parts(self.captured)
        shares = [part.share / len(calls) for part, calls in zip(parts, of_parts, strict=True) for _ in calls]
        weights = [
            share if each is None else each.totals.weight(share) for each, share in zip(totals, shares, strict=True)
        ]  # fmt: skip
        with self.fails_everywhere(f"summing what the losses from call {self.calls + 1} on divide by"):
            given = computed_ahead(totals, wholes, shares, self.buffer)
        if len(parts) == 1:
            return self.backwards(of_parts[0], weights, self._loss_of(), len(shares), given, scale, places[0])
        losses = []
        begin = 0
        with self._gradients_stay_where_it_breaks():
            for part, calls, of_rows in zip(parts, of_parts, places, strict=True):
                self.check_step(part.call)
                these = slice(begin, begin := begin + len(calls))
                losses.append(
                    self.backwards(calls, weights[these], self._loss_of(), len(shares), given[these], scale, of_rows)
                )
        return sum(losses[1:], losses[0])

    def _loss_of(self) -> int:
        """Return the number of the loss among the outputs of the program that runs now.

        Raises:
            RunError: there is none.
        """
        if self.captured.graph.loss is None:
            raise RunError("the model has no scalar loss; pass loss_fn= and targets=, or call loss.backward() yourself")
        return self.captured.graph.loss

    def _calls_of(self, part: StepPart, of_several: bool) -> Sequence[Call]:
        """Return the microbatches of a part whose program is in place."""
        if part.calls is not None:
            return part.calls
        args, kwargs = part.call.args, dict(part.call.kwargs)
        tensors = self.batch.tensors(args, kwargs)
        if of_several or part.call.one is not None:
            assert part.call.parts is not None, "a part of several says how many microbatches it has"
            pieces = self.batch.exactly(tensors, part.call.parts)
        else:
            pieces = self.batch.microbatches(tensors, part.call.parts, self.stage.part_shape)
        return [self.batch.call(piece, args, kwargs) for piece in pieces]

    @contextlib.contextmanager
    def _gradients_stay_where_it_breaks(self) -> Iterator[None]:
        """Restore the gradients from before a step of several parts if a later part fails."""
        params = list(self.parameters())
        before = [None if param.grad is None else param.grad.detach().clone() for param in params]
        try:
            yield
        except BaseException:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad
            raise

    def backwards(
        self, calls: Sequence[Call], weights: Sequence[float], number: int, of_step: int,
        ahead: Sequence[Mapping[str, torch.Tensor]], scale: torch.Tensor | None = None,
        places: Sequence[PlaceInBatch] = (),
    ) -> torch.Tensor:  # fmt: skip
        """Run forward and backward of every microbatch; the parameters have their gradients then.

        Args:
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
        stage = self.stage
        if not self.told_of_statistics:
            self.told_of_statistics = tell_of_statistics([stage.graph], of_step, stacklevel=5)
        gradients = stage.gradients
        stage.bind()
        total: torch.Tensor | None = None
        try:
            with stand_ins(stage.param_slots, stage.template) if stage.direct else contextlib.nullcontext():
                for i, (positional, by_name) in enumerate(calls):
                    gradients.defer, gradients.accumulating = i < len(calls) - 1, i > 0
                    self.given_ahead = ahead[i]
                    self.seeds.at(places[i] if of_step > 1 else None)
                    loss = pytree.tree_leaves(self.run_call(positional, by_name, of_step=True))[number]
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
            self.given_ahead = None
        assert total is not None, "a step has microbatches"
        return total


def _rows_between(batch: Call, rows: int, begin: int, length: int, without: Collection[str]) -> Call:
    """Return `length` rows of a batch from `begin` on; inputs without batch rows are unchanged."""
    if length == rows:
        return batch

    leaves, spec = pytree.tree_flatten(batch)
    cut = have_rows(batch, rows, without)
    some = [leaf.narrow(0, begin, length) if c else leaf for leaf, c in zip(leaves, cut, strict=True)]
    positional, by_name = pytree.tree_unflatten(some, spec)
    return positional, by_name
