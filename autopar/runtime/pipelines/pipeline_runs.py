"""A batch of a pipeline as runs of its programs: what goes through the stages, and forwards without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.batches.local_batch import RowsOfRanks
from autopar.runtime.batches.module_calls import ModuleCall
from autopar.runtime.batches.runs import Run, rows_of_microbatch, runs
from autopar.runtime.batches.same_batch import Seen
from autopar.runtime.pipelines.pipeline_outputs import Parts
from autopar.runtime.pipelines.pipeline_programs import PipelinePrograms
from autopar.runtime.pipelines.rank_actions import Span, Work
from autopar.runtime.pipelines.ready_runs import Ready, with_totals_of_batch
from autopar.runtime.stages.seeds import places_of
from autopar.runtime.variants.buckets import Padding
from autopar.words.trees import PyTree

_Batches = tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]


class PipelineBatches(PipelinePrograms):
    """The batches of a pipeline.

    Attributes:
        work: what this rank does with the run that is prepared or under way.
        padding: how the last call was padded to its bucket.
        spans: where the times of actions are recorded; None if they are not.
        planned_microbatches: how many of a step were planned first.
    """

    work: Work
    padding: Padding
    spans: list[Span] | None
    planned_microbatches: int

    @property
    def rows(self) -> RowsOfRanks | None:
        """How this step's rows lie on the ranks; None if each of them has all of them."""
        rows = self.local_batch
        return rows if rows is not None and rows.counts is None else None

    def ready_runs(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], to_do: str | None = None
    ) -> list[Ready]:  # fmt: skip
        """Return the runs of a batch, with their programs in place, before the first of them begins.

        Args:
            to_do: what the loss is for; None if there need be none.

        Raises:
            RunError: there is no loss.
        """
        if self.buckets is not None:
            (args, kwargs), self.padding = self.buckets.padded(args, kwargs)
        elif (together := self.rows_of_all(args, kwargs)) is not None:
            args, kwargs = together
        ready = []
        for run in self._runs(args, kwargs):
            callers, batches = self._microbatches(run)
            if to_do is not None and self.captured.graph.loss is None:
                raise RunError(
                    f"the model has no scalar loss {to_do}; give loss_fn= and targets= when planning, and call it with "
                    "targets"
                )
            ready.append(
                Ready(
                    run, self.captured, self.parts, self.work, self.batch,
                    self.reached_by, self.totals, callers, batches, self.drawing,
                )
            )  # fmt: skip
        return with_totals_of_batch(ready, self.rows, next(iter(self.stages.values())).device_mesh, self.buffer)

    def _runs(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[Run]:
        """Return the runs of a batch."""
        planned = self.planned_microbatches
        ranks = self.rows.ranks if self.rows is not None else 1
        if self.local_batch is not None or (self.programs is not None and self.programs.shapes):
            return runs(self.planned, self.signature, planned, args, kwargs, ranks)
        return [Run(ModuleCall(args, kwargs), planned, 1 / planned)]

    def _microbatches(self, run: Run) -> _Batches:
        """Return the whole inputs by name, and those of every microbatch.

        Now and then the ranks compare what they were called with. From now on the stages run the program of these
        shapes.
        """
        args, kwargs = run.call.args, run.call.kwargs
        if self.programs is not None:  # the ranks agree on a change
            self.check_values(run.call)
        self.work = self.work_of(run.microbatches)
        self.work.spans, self.work.local_batch = self.spans, self.rows

        def take(seen: Seen | None) -> _Batches:
            if self.programs is None:
                self.check_values(run.call)
            callers = self.batch.tensors(args, kwargs)
            rows = self.rows
            if self.local_batch is not None:
                self.local_batch.refuse_gradients(callers, self.batch.shown)
            if seen is not None:
                for name, leaf in callers.items():
                    seen.add(self.batch.shown[name], name, leaf, place=None if rows is None else rows.place)
            if rows is not None:
                return callers, rows.microbatches(callers, run.with_rows, run.microbatches)
            return callers, self.batch.exactly(callers, run.microbatches)

        return self.compared.inputs(take, self.named_parameters())

    def forwards(self, ready: Sequence[Ready]) -> list[tuple[torch.Tensor, Parts]]:
        """Return of each run its part of the loss, float64, and whole other outputs of this rank's stages."""
        results: list[tuple[torch.Tensor, Parts]] = []
        for each, seeds in zip(ready, self.seeds_of(ready), strict=True):
            parts: Parts = {}
            shares = each.weights
            loss = each.work.forwards(each.batches, shares, seeds, each.batch.shown, self.training, parts)
            results.append((loss, parts))
        return results

    def seeds_of(self, ready: Sequence[Ready]) -> list[list[Any]]:
        """Return the seeds of random operators in each microbatch of each run.

        They follow from the seed of the batch, which all ranks take, and from where its rows are in the batch.
        """
        graphs = [each.drawing[0 if self.training else 1] for each in ready]
        counts = [each.run.microbatches for each in ready]
        if not any(graph is not None for graph in graphs):
            return [[None] * count for count in counts]
        rows = [rows_of_microbatch(each.captured) for each in ready]
        ranks = self.rows.ranks if self.rows is not None else 1
        of_runs: list[list[Any]] = []
        with self.seeds.step():
            self.seeds.of_rows(sum(n * k for n, k in zip(rows, counts, strict=True)))
            for graph, places in zip(graphs, places_of(rows, counts, ranks), strict=True):
                of_run: list[Any] = []
                for place in places:
                    self.seeds.at(place if sum(counts) > 1 else None)
                    of_run.append(None if graph is None else self.seeds.of_call(graph))
                of_runs.append(of_run)
        return of_runs
