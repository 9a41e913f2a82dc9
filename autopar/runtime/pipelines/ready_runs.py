"""Runs of a pipeline whose programs are in place, and by what part their microbatches count in the loss of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.plans.stage_graphs import StageGraph
from autopar.runtime.batches.batch import Batch
from autopar.runtime.batches.loss_counts import Count, Shares, shares_by_count
from autopar.runtime.batches.own_rows_in_stages import RowsInStages
from autopar.runtime.batches.runs import Run
from autopar.runtime.gradients.reached import Reached, ReachedBy
from autopar.runtime.pipelines.rank_actions import Work
from autopar.words.graph import Graph


@dataclass(frozen=True)
class Ready:
    """A run, and what goes through the stages.

    Attributes:
        captured, stages, batch: the program that takes it.
        callers: the caller's tensors, by input name.
        batches: whole inputs of every microbatch.
        count: of how many things the loss of a microbatch is the mean; None where that is its rows.
        drawing: the graphs of training and of eval mode, where these have random operators.
    """

    run: Run
    captured: Captured
    stages: Sequence[StageGraph]
    work: Work
    batch: Batch
    reached_by: ReachedBy | None
    count: Count | None
    callers: Mapping[str, torch.Tensor]
    batches: Sequence[Mapping[str, torch.Tensor]]
    drawing: tuple[Graph | None, Graph | None]

    def reached(self, seeds: Sequence[Any]) -> list[Reached] | None:
        """What has a gradient in each microbatch; None where all that wants one does."""
        return None if self.reached_by is None else [self.reached_by(seed) for seed in seeds if seed is not None]

    @property
    def loss_dtype(self) -> torch.dtype:
        """Of the model's loss; float64 where it has none."""
        graph = self.captured.graph
        name = "float64" if graph.loss is None else graph.spec(graph.outputs[graph.loss]).dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def shares_of(runs: Sequence[Ready], own_rows: RowsInStages | None, device_mesh: DeviceMesh) -> list[Shares]:
    """By what part each microbatch of each run counts in the loss of the batch: by its rows, or by what its loss is the
    mean of (:mod:`.loss_counts`).

    On accelerators counts stay on the device, so that the host does not wait for them; then a microbatch in which
    nothing counts has the loss that the model gives it, which for a mean over no labels is no number.

    Args:
        own_rows: where each rank has its own, which are gathered on ``device_mesh``, that of one of its stages.
    """

    def counted(count: Count, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if own_rows is not None:
            there = {name: own_rows.joined(inputs[name], shape, device_mesh) for name, shape in count.inputs.items()}
            inputs = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in there.items()}
        return count(inputs)

    of = [each.count for each in runs if each.count is not None]
    if len(of) < len(runs):
        return [[each.run.share] * each.run.microbatches for each in runs]
    counts = torch.stack([counted(count, x) for each, count in zip(runs, of, strict=True) for x in each.batches])
    rows = torch.cat([  # filled where they are: a list would be copied from the host at every step
        torch.full((len(each.batches),), each.run.share, dtype=counts.dtype, device=counts.device) for each in runs
    ])  # fmt: skip
    shares = shares_by_count(of, counts, rows)
    if shares is None:
        return [[each.run.share] * each.run.microbatches for each in runs]
    of_runs = shares.split([each.run.microbatches for each in runs])
    return [part.tolist() if part.device.type == "cpu" else part for part in of_runs]


__all__ = ["Ready", "shares_of"]
