"""Runs of a pipeline whose programs are in place, with what their microbatches read of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.plans.stage_graphs import StageGraph
from autopar.runtime.batches.batch import Batch
from autopar.runtime.batches.local_batch import RowsOfRanks
from autopar.runtime.batches.runs import Run
from autopar.runtime.batches.totals_ahead import State, TotalsAhead, check_in_parts, computed_ahead
from autopar.runtime.gradients.reached import Reached, ReachedBy
from autopar.runtime.parameters.state import whole_of
from autopar.runtime.pipelines.rank_actions import Work
from autopar.words.graph import Graph


@dataclass(frozen=True)
class Ready:
    """A run, and what goes through the stages.

    Attributes:
        captured, stages, batch: the program that takes it.
        callers: the caller's tensors, by input name.
        batches: whole inputs of every microbatch.
        totals: gives the inputs that are computed ahead of the step; None if there are none.
        drawing: the graphs of training and of eval mode, where these have random operators.
    """

    run: Run
    captured: Captured
    stages: Sequence[StageGraph]
    work: Work
    batch: Batch
    reached_by: ReachedBy | None
    totals: TotalsAhead | None
    callers: Mapping[str, torch.Tensor]
    batches: Sequence[Mapping[str, torch.Tensor]]
    drawing: tuple[Graph | None, Graph | None]

    def reached(self, seeds: Sequence[Any]) -> list[Reached] | None:
        """Return what has a gradient in each microbatch; None if all that wants one does."""
        return None if self.reached_by is None else [self.reached_by(seed) for seed in seeds if seed is not None]

    @property
    def weights(self) -> list[float]:
        """The weights of each microbatch's loss in that of the batch."""
        share = self.run.share
        return [share if self.totals is None else self.totals.totals.weight(share)] * self.run.microbatches

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the model's loss; float64 where it has none."""
        graph = self.captured.graph
        name = "float64" if graph.loss is None else graph.spec(graph.outputs[graph.loss]).dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def with_totals_of_batch(
    runs: Sequence[Ready], local_batch: RowsOfRanks | None, device_mesh: DeviceMesh, state: State
) -> list[Ready]:
    """Return the runs with what their microbatches read of the whole batch.

    Args:
        local_batch: where each rank has its own, which are gathered on ``device_mesh``, that of one of its stages.
        state: gives a buffer, whole, on all ranks.
    """

    def whole(totals: TotalsAhead, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if local_batch is None:
            return inputs
        there = {name: local_batch.joined(inputs[name], shape, device_mesh) for name, shape in totals.inputs.items()}
        return {name: whole_of(x) for name, x in there.items()}

    if sum(each.run.microbatches for each in runs) > 1:
        for each in runs:
            check_in_parts(each.captured)
    of = [each.totals for each in runs for _ in each.batches]
    wholes = [
        {} if each.totals is None else whole(each.totals, inputs) for each in runs for inputs in each.batches
    ]  # fmt: skip
    shares = [each.run.share for each in runs for _ in each.batches]
    given = iter(computed_ahead(of, wholes, shares, state))
    done = []
    for each in runs:
        done.append(replace(each, batches=[{**inputs, **next(given)} for inputs in each.batches]))
    return done
