"""A batch of a pipeline as runs of its programs: what goes through the stages, and forwards without gradients.

``module`` is the :class:`~autopar.runtime.pipelines.pipeline.PipelineModule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.batches.loss_counts import Shares
from autopar.runtime.batches.runs import Run, runs
from autopar.runtime.batches.same_batch import Seen
from autopar.runtime.pipelines.pipeline_outputs import Parts
from autopar.runtime.pipelines.pipeline_programs import work_of
from autopar.runtime.pipelines.ready_runs import Ready, shares_of
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
    if module.buckets is not None:
        (args, kwargs), module._padding = module.buckets.padded(args, kwargs)
    elif module._own_rows is not None and module._programs is not None and module._programs.shapes:
        logs = [module._programs.meeting] if module._programs.meeting is not None else []
        together = module._own_rows.put_together(args, kwargs, logs, module._work.everyone)
        args, kwargs = (args, kwargs) if together is None else together
    ready = []
    for run in _runs(module, args, kwargs):
        callers, batches = _microbatches(module, run)
        if to_do is not None and module._captured.graph.loss is None:
            raise RunError(
                f"the model has no scalar loss {to_do}; give loss_fn= and targets= when planning, and call it with "
                "targets"
            )
        ready.append(
            Ready(
                run, module._captured, module._parts, module._work, module._batch, module._reached_by, module._count,
                callers, batches,
            )
        )  # fmt: skip
    return ready


def _runs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Run]:
    """The runs of a batch."""
    captured, planned = module._planned
    ranks = module._rows.ranks if module._rows is not None else 1
    if module._own_rows is not None or (module._programs is not None and module._programs.shapes):
        return runs(captured, module._signature, planned, args, kwargs, ranks)
    return [Run(ModuleCall(args, kwargs), planned, 1 / planned)]


def _microbatches(module: Any, run: Run) -> _Batches:
    """The whole inputs by name, and those of every microbatch; now and then the ranks compare what they were
    called with. From now on the stages run the program of these shapes."""
    args, kwargs = run.call.args, run.call.kwargs
    if module._programs is not None:  # the ranks agree on a change
        check_values(module, run.call)
    module._work = work_of(module, run.microbatches)
    module._work.spans, module._work.own_rows = module._spans, module._rows

    def take(seen: Seen | None) -> _Batches:
        if module._programs is None:
            check_values(module, run.call)
        callers = module._batch.tensors(args, kwargs)
        rows = module._rows
        if module._own_rows is not None:
            module._own_rows.refuse_gradients(callers, module._batch.shown)
        if seen is not None:
            for name, leaf in callers.items():
                seen.add(module._batch.shown[name], name, leaf, place=None if rows is None else rows.place)
        if rows is not None:
            return callers, rows.microbatches(callers, run.with_rows, run.microbatches)
        return callers, module._batch.exactly(callers, run.microbatches)

    return module._compared.inputs(take, module.named_parameters())


def shares_in_loss(module: Any, ready: Sequence[Ready]) -> list[Shares]:
    """By what part each microbatch of each run counts in the loss of the batch."""
    return shares_of(ready, module._rows, next(iter(module._stages.values())).device_mesh)


def forwards(module: Any, ready: Sequence[Ready]) -> list[tuple[torch.Tensor, Parts]]:
    """Of each run its part of the loss, float64, and whole outputs of this rank's stages by position, if they are
    other ones."""
    results: list[tuple[torch.Tensor, Parts]] = []
    drawn = 0
    for each, shares in zip(ready, shares_in_loss(module, ready), strict=True):
        parts: Parts = {}
        seeds = module._seeds(drawn, each.run.microbatches)
        loss = each.work.forwards(each.batches, shares, seeds, each.batch.shown, module.training, parts)
        results.append((loss, parts))
        drawn += each.run.microbatches
    if module.training:
        module._drawn += drawn
    return results


__all__ = ["forwards", "ready_runs", "shares_in_loss"]
