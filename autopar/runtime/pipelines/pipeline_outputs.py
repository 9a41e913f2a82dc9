"""What a forward of a pipeline gives, on every rank: the outputs of all microbatches, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.batches.local_batch import RowsOfRanks
from autopar.runtime.batches.runs import rows_of_microbatch
from autopar.runtime.pipelines.ready_runs import Ready
from autopar.runtime.ranks.collectives import as_sent
from autopar.words.graph import Ref

Parts = dict[int, list[torch.Tensor]]
"""Whole outputs of this rank's stages by position, of every microbatch."""


def of_run(ready: Ready, loss: torch.Tensor, parts: Parts) -> list[Any]:
    """Return the outputs of a run; all ranks call it.

    Args:
        loss: the run's part of the loss.
        parts: what was made here.

    Returns:
        the model's outputs in their order; where ranks have rows of their own, this rank's of what has rows. Scalars
        are float64, and the run's part of their mean over the rows.
    """
    graph, run, work = ready.captured.graph, ready.run, ready.work
    makers = {position: stage.number for stage in ready.stages for position in stage.outputs}
    outputs: list[Any] = []
    for position, out in enumerate(graph.outputs):
        if position == graph.loss or not isinstance(out, Ref):
            outputs.append(loss if position == graph.loss else out)
            continue
        spec, here = graph.spec(out), parts.get(position)
        shape = (run.microbatches * spec.shape[0], *spec.shape[1:]) if spec.shape else ()
        dtype = getattr(torch, spec.dtype) if spec.shape else torch.float64
        value = torch.empty(shape, dtype=dtype, device=work.device)
        if here is not None:
            value.copy_(torch.cat(here) if spec.shape else torch.stack(here).to(torch.float64).sum() * run.share)
        dist.broadcast(as_sent(value), src=work.plan.stages[makers[position]].devices[0], group=work.everyone)
        rows = work.local_batch
        cut = rows is not None and _has_rows(ready, out)
        outputs.append(rows.rows_of(value, run.microbatches) if rows is not None and cut else value)
    return outputs


def _has_rows(ready: Ready, out: Ref) -> bool:
    return ready.captured.graph.spec(out).shape[:1] == (rows_of_microbatch(ready.captured),)


def of_batch(ready: Ready, of_runs: Sequence[Sequence[Any]], local_batch: RowsOfRanks | None = None) -> list[Any]:
    """Return the outputs of a batch, from those of its runs, of which ``ready`` is any.

    Args:
        local_batch: where each rank has its own; where these are not equally many, the runs have them all.
    """
    graph = ready.captured.graph
    outputs: list[Any] = []
    for out, values in zip(graph.outputs, zip(*of_runs, strict=True), strict=True):
        if not isinstance(out, Ref):
            outputs.append(out)
        elif graph.spec(out).shape:
            joined = torch.cat(values) if len(values) > 1 else values[0]
            uneven = local_batch is not None and local_batch.counts is not None and _has_rows(ready, out)
            outputs.append(local_batch.of_uneven(joined) if local_batch is not None and uneven else joined)
        else:
            outputs.append(sum(values[1:], values[0]).to(getattr(torch, graph.spec(out).dtype)))
    return outputs
