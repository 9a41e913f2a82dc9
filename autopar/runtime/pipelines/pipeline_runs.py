"""A batch of a pipeline as runs of its programs: what goes through the stages, and forwards without gradients.

``module`` is the :class:`~autopar.runtime.pipelines.pipeline.PipelineRun`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.batches.runs import Run, rows_of_microbatch, runs
from autopar.runtime.batches.same_batch import Seen
from autopar.runtime.pipelines.pipeline_outputs import Parts
from autopar.runtime.pipelines.pipeline_programs import work_of
from autopar.runtime.pipelines.ready_runs import Ready, with_totals_of_batch
from autopar.runtime.stages.seeds import PlaceInBatch
from autopar.runtime.variants.module_calls import ModuleCall
from autopar.runtime.variants.program_cache import check_values
from autopar.words.trees import PyTree

_Batches = tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]


def ready_runs(
    module: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], to_do: str | None = None
) -> list[Ready]:  # fmt: skip
    """Return the runs of a batch, with their programs in place, before the first of them begins.

    Args:
        to_do: what the loss is for; None if there need be none.

    Raises:
        RunError: there is no loss.
    """
    if module.buckets is not None:
        (args, kwargs), module.padding = module.buckets.padded(args, kwargs)
    elif (
        module.local_batch is not None
        and module.programs is not None
        and module.programs.shapes
    ):
        logs = [module.programs.meeting] if module.programs.meeting is not None else []
        together = module.local_batch.put_together(args, kwargs, logs, module.work.everyone)
        args, kwargs = (args, kwargs) if together is None else together
    ready = []
    for run in _runs(module, args, kwargs):
        callers, batches = _microbatches(module, run)
        if to_do is not None and module.captured.graph.loss is None:
            raise RunError(
                f"the model has no scalar loss {to_do}; give loss_fn= and targets= when planning, and call it with "
                "targets"
            )
        ready.append(
            Ready(
                run, module.captured, module.parts, module.work, module.batch,
                module.reached_by, module.totals, callers, batches, module.drawing,
            )
        )  # fmt: skip
    return with_totals_of_batch(
        ready, module.rows, next(iter(module.stages.values())).device_mesh, module.buffer
    )


def _runs(module: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[Run]:
    """Return the runs of a batch."""
    captured, planned = module.planned
    ranks = module.rows.ranks if module.rows is not None else 1
    if module.local_batch is not None or (
        module.programs is not None and module.programs.shapes
    ):
        return runs(captured, module.signature, planned, args, kwargs, ranks)
    return [Run(ModuleCall(args, kwargs), planned, 1 / planned)]


def _microbatches(module: Any, run: Run) -> _Batches:
    """Return the whole inputs by name, and those of every microbatch.

    Now and then the ranks compare what they were called with. From now on the stages run the program of these shapes.
    """
    args, kwargs = run.call.args, run.call.kwargs
    if module.programs is not None:  # the ranks agree on a change
        check_values(module, run.call)
    module.work = work_of(module, run.microbatches)
    module.work.spans, module.work.local_batch = module.spans, module.rows

    def take(seen: Seen | None) -> _Batches:
        if module.programs is None:
            check_values(module, run.call)
        callers = module.batch.tensors(args, kwargs)
        rows = module.rows
        if module.local_batch is not None:
            module.local_batch.refuse_gradients(callers, module.batch.shown)
        if seen is not None:
            for name, leaf in callers.items():
                seen.add(module.batch.shown[name], name, leaf, place=None if rows is None else rows.place)
        if rows is not None:
            return callers, rows.microbatches(callers, run.with_rows, run.microbatches)
        return callers, module.batch.exactly(callers, run.microbatches)

    return module.compared.inputs(take, module.named_parameters())


def forwards(module: Any, ready: Sequence[Ready]) -> list[tuple[torch.Tensor, Parts]]:
    """Return of each run its part of the loss, float64, and other outputs of this rank's stages by position, whole."""
    results: list[tuple[torch.Tensor, Parts]] = []
    for each, seeds in zip(ready, seeds_of(module, ready), strict=True):
        parts: Parts = {}
        shares = each.weights
        loss = each.work.forwards(each.batches, shares, seeds, each.batch.shown, module.training, parts)
        results.append((loss, parts))
    return results


def seeds_of(module: Any, ready: Sequence[Ready]) -> list[list[Any]]:
    """Return the seeds of random operators in each microbatch of each run.

    They follow from the seed of the batch, which all ranks take, and from where its rows are in the batch.
    """
    graphs = [each.drawing[0 if module.training else 1] for each in ready]
    counts = [each.run.microbatches for each in ready]
    if not any(graph is not None for graph in graphs):
        return [[None] * count for count in counts]
    rows = [rows_of_microbatch(each.captured) for each in ready]
    ranks = module.rows.ranks if module.rows is not None else 1
    total, before = sum(n * k for n, k in zip(rows, counts, strict=True)), 0
    of_runs: list[list[Any]] = []
    with module.seeds.step():
        module.seeds.of_rows(total)
        for graph, n, count in zip(graphs, rows, counts, strict=True):
            block, of_run = max(1, n // ranks), list[Any]()
            for i in range(count):
                place = PlaceInBatch(before + i * block, block, total // ranks)
                module.seeds.at(place if sum(counts) > 1 else None)
                of_run.append(None if graph is None else module.seeds.of_call(graph))
            of_runs.append(of_run)
            before += count * block
    return of_runs
