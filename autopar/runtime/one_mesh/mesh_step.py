"""A training step in microbatches on one mesh: gradients add up, and are reduced in the last one.

Each loss counts by its part of the rows; what it divides by beside them, such as how many labels count, is that of the
whole batch (:mod:`~autopar.runtime.batches.totals_ahead`).

Rows that do not divide into as few microbatches as the planned size allows go through in two parts, as in a pipeline
(:mod:`~autopar.runtime.batches.runs`): whole microbatches, and a last one with the rows that are left, which has a
program of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.in_parts import no_rows_in
from autopar.capture.microbatches import rows_of
from autopar.errors import CaptureError, RunError
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.batches.calls import leaves_of
from autopar.runtime.batches.equal_rows import check_equal_rows
from autopar.runtime.batches.local_batch import Call, rows_in
from autopar.runtime.batches.module_calls import ModuleCall, batch_rows, parts_of
from autopar.runtime.batches.runs import Run, rows_of_microbatch, runs, sizes
from autopar.runtime.batches.totals_ahead import TotalsAhead, check_in_parts, computed_ahead
from autopar.runtime.gradients.step_gradients import has_hooks
from autopar.runtime.one_mesh.direct import stand_ins
from autopar.runtime.one_mesh.executor import MeshCalls
from autopar.runtime.optimizers import grad_scaler
from autopar.runtime.stages.seeds import PlaceInBatch, places_of
from autopar.torch_private import pytree
from autopar.words.autocasting import without_autocast
from autopar.words.trees import PyTree


class MeshRun(MeshCalls):
    """A model that is spread over one mesh, with its training steps."""

    def rebuilt(self, model: torch.nn.Module, values: Callable[[str], torch.Tensor]) -> MeshRun:
        """Return a run like this one of a copy of the model, with given whole values by name; all ranks call it."""
        seeds = self.seeds
        return MeshRun(model, self.captured, self.plan, self.device_mesh, values, alike=seeds.alike, random=seeds.mode)

    def train_step(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, optimizers: Sequence[torch.optim.Optimizer] = (),
        microbatches: int | None = None, scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a training step; arguments as of ``ParallelModule.train_step``."""
        if self.buckets is not None:
            (args, kwargs), _ = self.buckets.padded(args, kwargs)
        of_step, ranks = self.runs_of_step(args, kwargs, microbatches)
        loss = self._train_runs(of_step, ranks, grad_scaler.scale_of(scaler, self.device))
        if optimizers:
            with self.fails_everywhere(f"the optimizer's step after call {self.calls}"):
                grad_scaler.step(optimizers, scaler)
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss

    def check_step(self, call: ModuleCall) -> None:
        """Check a call before a step begins: within it, another program would be refused."""
        with self.all_in_step(f"the step of call {self.calls + 1}"):
            self.check_values(call)

    def runs_of_step(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], microbatches: int | None
    ) -> tuple[list[Run], int]:  # fmt: skip
        """Return the runs of a step, before the first of them begins, and how many ranks have rows of their own.

        Every rank calls it.

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
            if together is not None:
                args, kwargs = together
            elif rows_in(args, kwargs, self.local_batch.without) is not None:
                return self._of_local_batch(args, kwargs, count, self.local_batch.ranks), self.local_batch.ranks
        uneven = self._uneven(args, kwargs, count)
        return uneven or [Run(ModuleCall(args, kwargs, in_parts=True, parts=count), count or 0, 0.0)], 1

    def _of_local_batch(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], count: int | None, ranks: int
    ) -> list[Run]:  # fmt: skip
        """Return the runs of a batch of which every rank has equally many rows."""
        rows = rows_of((args, kwargs), no_rows_in(self.planned))
        most = max(1, batch_rows(self.planned) // ranks if count is None else -(-rows // count))
        if len(sizes(rows, most)) > 1 and not self._may_be_uneven():
            most = rows // parts_of(rows, most)
        return runs(self.planned, self.signature, self.plan.microbatches, args, kwargs, ranks, most)

    def _may_be_uneven(self) -> bool:
        """Check whether a step may have runs of several shapes; hooks on parameters see the sums of a run."""
        follows = self.programs is not None and self.programs.shapes
        is_replicated = self.buckets is None and not self.batch.pieces
        return follows and is_replicated and not any(has_hooks(param) for param in self.parameters())

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

    def _train_runs(self, of_step: Sequence[Run], ranks: int, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Run forward and backward of all runs of a step.

        The parameters have their gradients then, or, where it breaks, those that they had.

        Args:
            ranks: how many ranks have rows of their own.
            scale: the scale by which the gradients are multiplied.

        Returns:
            The loss of the batch, a tensor of shape [] and of the loss's dtype.

        Raises:
            RunError: the model has no scalar loss, is in eval mode, or the shapes are not those of whole microbatches.
        """
        with self.seeds.step():
            return self._train_runs_of_seed(of_step, ranks, scale)

    def _train_runs_of_seed(self, of_step: Sequence[Run], ranks: int, scale: torch.Tensor | None) -> torch.Tensor:
        of_runs: list[list[Call]] = []
        wholes: list[dict[str, torch.Tensor]] = []
        totals: list[TotalsAhead | None] = []
        rows: list[int] = []
        for run in of_step:
            self.check_step(run.call)
            self.check_trains()
            self._loss_of()
            of_runs.append(calls := self._calls_of(run, ranks))
            rows.append(rows_of_microbatch(self.captured))
            ahead = self.totals
            totals += [ahead] * len(calls)
            with self.fails_everywhere(f"gathering what the losses from call {self.calls + 1} on divide by"):
                wholes += [{} if ahead is None else self.whole_inputs(ahead, *call) for call in calls]
        counts = [len(calls) for calls in of_runs]
        places = places_of(rows, counts, ranks)
        self.seeds.of_rows(sum(n * count for n, count in zip(rows, counts, strict=True)))
        if len(totals) > 1:
            check_in_parts(self.captured)
        shares = [run.share or 1 / count for run, count in zip(of_step, counts, strict=True) for _ in range(count)]
        weights = [
            share if each is None else each.totals.weight(share) for each, share in zip(totals, shares, strict=True)
        ]  # fmt: skip
        with self.fails_everywhere(f"summing what the losses from call {self.calls + 1} on divide by"):
            given = computed_ahead(totals, wholes, shares, self.buffer)
        if len(of_step) == 1:
            return self.backwards(of_runs[0], weights, self._loss_of(), len(shares), given, scale, places[0])
        losses = []
        begin = 0
        with self._gradients_stay_where_it_breaks():
            for run, calls, of_rows in zip(of_step, of_runs, places, strict=True):
                self.check_step(run.call)
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

    def _calls_of(self, run: Run, ranks: int) -> list[Call]:
        """Return the microbatches of a run whose program is in place."""
        args, kwargs = run.call.args, dict(run.call.kwargs)
        tensors = self.batch.tensors(args, kwargs)
        if ranks > 1 and self.local_batch is not None:
            rows, mesh, inputs = self.local_batch, self.device_mesh, self.stage.inputs
            pieces = [
                {name: rows.joined(leaf, inputs[name].shape, mesh) for name, leaf in piece.items()}
                for piece in rows.microbatches(tensors, run.with_rows, run.microbatches)
            ]
        elif run.call.of_several or run.call.one is not None:
            pieces = self.batch.exactly(tensors, run.microbatches)
        else:
            pieces = self.batch.microbatches(tensors, run.call.parts, self.stage.part_shape)
        return [self.batch.call(piece, args, kwargs) for piece in pieces]

    @contextlib.contextmanager
    def _gradients_stay_where_it_breaks(self) -> Iterator[None]:
        """Restore the gradients from before a step of several runs if a later one fails."""
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
