"""The actions of one rank in a pipeline's step: its row, messages, and exchanges of all stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph
from autopar.runtime.batches.local_batch import RowsOfRanks
from autopar.runtime.gradients.reached import Reached
from autopar.runtime.gradients.taking_part import told_elsewhere
from autopar.runtime.parameters.state import as_dtensor
from autopar.runtime.pipelines.input_gradients import InputGradients
from autopar.runtime.pipelines.stage_in_flight import Flight
from autopar.runtime.pipelines.ties import Tied, Ties
from autopar.runtime.pipelines.wires import Post, Wire, clear, pairs_of
from autopar.runtime.ranks.groups import Groups
from autopar.runtime.stages.stage import Stage
from autopar.words.graph import Ref
from cost_models.schedules import forward_only
from cost_models.schedules.actions import KINDS, Action

Batches = Sequence[Mapping[str, torch.Tensor]]
"""The model's inputs of every microbatch, whole, by name."""
Span = tuple[str, str, float, float]


@dataclass
class Unfinished:
    """The step that all ranks have broken off, of a pipeline; all that run over the same channels share one."""

    generation: int
    work: Work | None = None

    def clear(self) -> None:
        """Clean up what an exception on all ranks left of a step.

        Messages are then pending that nobody takes, and receives posted that nobody answers. The ranks tell each
        other how far they came; what was sent is received, and what is waited for is sent.
        """
        if (broken := self.work) is not None:
            clear([broken.post, broken.forward_post, broken.ties.post], broken.everyone)
            for flight in broken.flights.values():
                flight.drop()
        self.work = None


_OF_GROUPS: WeakKeyDictionary[Groups, Unfinished] = WeakKeyDictionary()


def unfinished_of(groups: Groups) -> Unfinished:
    """Return what is unfinished in the channels of all pipelines with the same ranks, also of models that are gone."""
    known = _OF_GROUPS.get(groups)
    if known is None or known.generation != groups.generation:
        known = _OF_GROUPS[groups] = Unfinished(groups.generation)
    return known


class Work:
    """The stages of one rank, and what it does in a step of one number of microbatches.

    Attributes:
        flights: by number of the stage.
        local_batch: where each rank is called with rows of its own.
        spans: where the times of actions go: action, kind, begin and end in seconds of ``time.perf_counter``.
    """

    def __init__(
        self, parts: Sequence[StageGraph], plan: Plan, rank: int, stages: Mapping[int, Stage],
        wires: Sequence[Wire], tied: Sequence[Tied], groups: Groups, unfinished: Unfinished,
    ) -> None:  # fmt: skip
        """Initialize the object.

        Args:
            parts: the parts of the whole model.
            plan: its schedule says how many microbatches there are.
            stages: the stages of this rank.
            wires, tied: what crosses between stages, and what several of them hold.
            groups: with those that the plan needs.
        """
        device = groups.device
        self.plan, self.rank, self.device, self.unfinished = plan, rank, device, unfinished
        self.everyone = groups.of(range(plan.n_devices))
        self.microbatches = plan.microbatches
        self.input_gradients = InputGradients(parts, device, self.everyone)
        group_of = {d: plan.schedule.rank_of_stage[s] for s, stage in enumerate(plan.stages) for d in stage.devices}
        alone = forward_only(len(parts), plan.microbatches, plan.schedule.stages_of_rank)
        rows, forwards = (
            {d: schedule.flat_rows[group] for d, group in group_of.items()} for schedule in (plan.schedule, alone)
        )
        self.row, self.forward_row = rows[rank], forwards[rank]
        channels = groups.channels(pairs_of(wires))
        self.post = Post.of(rank, device, wires, rows, plan.microbatches, channels)
        self.forward_post = Post.of(rank, device, wires, forwards, plan.microbatches, channels)
        self.ties = Ties(tied, plan, rank, groups)
        elsewhere = told_elsewhere([part.graph for part in parts])
        for stage in stages.values():
            stage.parts.always(elsewhere)
        self.flights = {
            s: Flight(
                parts[s], stage, wires, self.row, self.input_gradients, leads=rank == plan.stages[s].devices[0]
            )
            for s, stage in stages.items()
        }  # fmt: skip
        self.spans: list[Span] | None = None
        self.local_batch: RowsOfRanks | None = None

    def train(
        self, batches: Batches, shares: Sequence[float], seeds: Sequence[Any], shown: Mapping[str, str],
        callers: Mapping[str, torch.Tensor], reached: Sequence[Reached] | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run forward and backward of all microbatches; :meth:`give` hands over the gradients.

        Args:
            shares: the weights of the microbatches' losses in that of the step.
            seeds: the seeds of random operators, for each microbatch.
            shown: what messages call the inputs.
            callers: the caller's tensors, by input name; :attr:`input_gradients` has theirs then.
            reached: what has a gradient in each microbatch; None if all that wants one does.
            scale: the scale by which the gradients are multiplied.

        Returns:
            the sum of the weighted losses, on every rank.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self._begin(shares, scale)
        self.input_gradients.begin(callers)
        for flight in self.flights.values():
            flight.stage.gradients.forget()
        self.post.begin()
        spans = self.spans
        for action in self.row:
            began = time.perf_counter() if spans is not None else 0.0
            flight = self.flights[action.stage]
            if action.kind == "F":
                there = None if reached is None else reached[action.microbatch]
                self._forward(flight, self.post, action, batches, seeds, shown, False, total, there)
            elif action.kind == "W":
                flight.weights(action)
            else:
                flight.backward(self.post, action)
            if spans is not None:
                spans.append((str(action), KINDS[action.kind], began, time.perf_counter()))
        self.post.end()
        in_step = None if reached is None else frozenset().union(*reached)
        self.ties.add_up({s: flight.stage for s, flight in self.flights.items()}, in_step)
        dist.all_reduce(total, group=self.everyone)
        self.unfinished.work = None
        return total

    def give(self) -> None:
        """Hand the gradients of the step over to the parameters."""
        for flight in self.flights.values():
            flight.stage.gradients.give()

    @torch.no_grad()
    def forwards(
        self, batches: Batches, shares: Sequence[float], seeds: Sequence[Any], shown: Mapping[str, str],
        training: bool, outputs: dict[int, list[torch.Tensor]] | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the sum of the weighted losses of all microbatches without gradients, on every rank; 0 without a loss.

        Args:
            outputs: where whole outputs of this rank's stages beside the loss go, by their position in the model's.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self._begin(shares)
        self.forward_post.begin()
        for action in self.forward_row:
            flight = self.flights[action.stage]
            flat = self._forward(flight, self.forward_post, action, batches, seeds, shown, not training, total)
            for position, whole in _other_outputs(flight, flat) if outputs is not None else ():
                outputs.setdefault(position, []).append(whole)  # type: ignore[union-attr]
        self.forward_post.end()
        dist.all_reduce(total, group=self.everyone)
        self.unfinished.work = None
        return total

    def _forward(
        self, flight: Flight, post: Post, action: Action, batches: Batches, seeds: Sequence[Any],
        shown: Mapping[str, str], evaluating: bool, total: torch.Tensor, reached: Reached | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return all that a stage makes, and add its part of the loss to ``total``."""
        k = action.microbatch
        loss, flat = flight.forward(post, k, batches[k], shown, seeds[k], evaluating, reached)
        if loss is not None and flight.leads:
            total += loss.detach().double() * flight.shares[k]
        return flat

    def _begin(self, shares: Sequence[float], scale: torch.Tensor | None = None) -> None:
        """Begin a step, after cleaning up what is left of one that broke off."""
        self.unfinished.clear()
        for flight in self.flights.values():
            flight.begin(shares, self.local_batch, scale)
        self.unfinished.work = self


def _other_outputs(flight: Flight, flat: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the whole outputs of the model, besides the loss, that a stage makes, by position."""
    part, stage = flight.part, flight.stage
    for k, position in enumerate(part.outputs, len(part.gives)):
        state, out = stage.program.outputs[k], part.graph.outputs[k]
        if k != part.graph.loss and state is not None and isinstance(out, Ref):
            shape = part.graph.spec(out).shape
            yield position, as_dtensor(flat[k], state, shape, stage.device_mesh).full_tensor()
