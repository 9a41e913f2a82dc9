"""A batch of a pipeline as runs of its programs: what goes through the stages, and forwards without gradients.

``module`` is the :class:`~autopar.runtime.pipelines.pipeline.PipelineModule`.
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
from autopar.runtime.variants.values import check_values

_Batches = tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]


def ready_runs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], to_do: str | None = None) -> list[Ready]:
    """The runs of a batch, with their programs in place, before the first of them begins.

    Args:
        to_do: what the loss is for; None where there need be none.

    Raises:
        RunError: there is no loss.
    """
    if module._autopar_buckets is not None:
        (args, kwargs), module._autopar_padding = module._autopar_buckets.padded(args, kwargs)
    elif (
        module._autopar_local_batch is not None
        and module._autopar_programs is not None
        and module._autopar_programs.shapes
    ):
        logs = [module._autopar_programs.meeting] if module._autopar_programs.meeting is not None else []
        together = module._autopar_local_batch.put_together(args, kwargs, logs, module._autopar_work.everyone)
        args, kwargs = (args, kwargs) if together is None else together
    ready = []
    for run in _runs(module, args, kwargs):
        callers, batches = _microbatches(module, run)
        if to_do is not None and module._autopar_captured.graph.loss is None:
            raise RunError(
                f"the model has no scalar loss {to_do}; give loss_fn= and targets= when planning, and call it with "
                "targets"
            )
        ready.append(
            Ready(
                run, module._autopar_captured, module._autopar_parts, module._autopar_work, module._autopar_batch,
                module._autopar_reached_by, module._autopar_totals, callers, batches, module._autopar_drawing,
            )
        )  # fmt: skip
    return with_totals_of_batch(
        ready, module._autopar_rows, next(iter(module._autopar_stages.values())).device_mesh, module._autopar_buffer
    )


def _runs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Run]:
    """The runs of a batch."""
    captured, planned = module._autopar_planned
    ranks = module._autopar_rows.ranks if module._autopar_rows is not None else 1
    if module._autopar_local_batch is not None or (
        module._autopar_programs is not None and module._autopar_programs.shapes
    ):
        return runs(captured, module._autopar_signature, planned, args, kwargs, ranks)
    return [Run(ModuleCall(args, kwargs), planned, 1 / planned)]


def _microbatches(module: Any, run: Run) -> _Batches:
    """The whole inputs by name, and those of every microbatch; now and then the ranks compare what they were
    called with. From now on the stages run the program of these shapes."""
    args, kwargs = run.call.args, run.call.kwargs
    if module._autopar_programs is not None:  # the ranks agree on a change
        check_values(module, run.call)
    module._autopar_work = work_of(module, run.microbatches)
    module._autopar_work.spans, module._autopar_work.local_batch = module._autopar_spans, module._autopar_rows

    def take(seen: Seen | None) -> _Batches:
        if module._autopar_programs is None:
            check_values(module, run.call)
        callers = module._autopar_batch.tensors(args, kwargs)
        rows = module._autopar_rows
        if module._autopar_local_batch is not None:
            module._autopar_local_batch.refuse_gradients(callers, module._autopar_batch.shown)
        if seen is not None:
            for name, leaf in callers.items():
                seen.add(module._autopar_batch.shown[name], name, leaf, place=None if rows is None else rows.place)
        if rows is not None:
            return callers, rows.microbatches(callers, run.with_rows, run.microbatches)
        return callers, module._autopar_batch.exactly(callers, run.microbatches)

    return module._autopar_compared.inputs(take, module.named_parameters())


def forwards(module: Any, ready: Sequence[Ready]) -> list[tuple[torch.Tensor, Parts]]:
    """Of each run its part of the loss, float64, and whole outputs of this rank's stages by position, if they are
    other ones."""
    results: list[tuple[torch.Tensor, Parts]] = []
    for each, seeds in zip(ready, seeds_of(module, ready), strict=True):
        parts: Parts = {}
        shares = each.weights
        loss = each.work.forwards(each.batches, shares, seeds, each.batch.shown, module.training, parts)
        results.append((loss, parts))
    return results


def seeds_of(module: Any, ready: Sequence[Ready]) -> list[list[Any]]:
    """Of random operators in each microbatch of each run: by the seed of the batch, which all ranks take, and by where
    its rows are in the batch."""
    graphs = [each.drawing[0 if module.training else 1] for each in ready]
    counts = [each.run.microbatches for each in ready]
    if not any(graph is not None for graph in graphs):
        return [[None] * count for count in counts]
    rows = [rows_of_microbatch(each.captured) for each in ready]
    ranks = module._autopar_rows.ranks if module._autopar_rows is not None else 1
    total, before = sum(n * k for n, k in zip(rows, counts, strict=True)), 0
    of_runs: list[list[Any]] = []
    with module._autopar_seeds.step():
        module._autopar_seeds.of_rows(total)
        for graph, n, count in zip(graphs, rows, counts, strict=True):
            block, of_run = max(1, n // ranks), list[Any]()
            for i in range(count):
                place = PlaceInBatch(before + i * block, block, total // ranks)
                module._autopar_seeds.at(place if sum(counts) > 1 else None)
                of_run.append(None if graph is None else module._autopar_seeds.of_call(graph))
            of_runs.append(of_run)
            before += count * block
    return of_runs


__all__ = ["forwards", "ready_runs", "seeds_of"]
