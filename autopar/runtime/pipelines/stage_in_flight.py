"""One stage of a pipeline on this rank, and the microbatches that are in flight through it.

A forward takes what earlier stages send, runs the stage, and sends what later ones want; a backward does the same the
other way round, whole (``B``) or in two halves (``I`` and ``W``, :mod:`autopar.runtime.pipelines.backward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.plans.stage_graphs import StageGraph
from autopar.runtime.batches.local_batch import RowsOfRanks
from autopar.runtime.gradients.reached import Reached
from autopar.runtime.pipelines.backward import Halves
from autopar.runtime.pipelines.input_gradients import InputGradients
from autopar.runtime.pipelines.received_tensors import Arrived, arriving
from autopar.runtime.pipelines.wires import Post, Wire
from autopar.runtime.stages.stage import Stage
from autopar.words.autocasting import without_autocast
from cost_models.schedules.actions import Action


@dataclass
class _Microbatch:
    """The parts of a forward that its backward needs.

    The tensors themselves live as long as autograd saves them.

    Attributes:
        arrived: by name, of tensors of earlier stages whose gradients these want, and of inputs that want one.
        outputs: by position among the stage's outputs, where gradients from later stages enter the graph of autograd.
        reached: what has a gradient in this microbatch; None if all that wants one does.
    """

    arrived: dict[str, Arrived]
    outputs: dict[int, GradientEdge]
    loss: torch.Tensor | None
    reached: Reached | None


class Flight:
    """A stage with its wires.

    Attributes:
        part: what of the model the stage is.
        shares: the weights of the microbatches' losses in that of the step.
        scale: the scale by which the gradients of the step are multiplied.
        leads: this rank is the first of the stage's, the one that speaks for it where all have the same.
    """

    def __init__(
        self, part: StageGraph, stage: Stage, wires: Sequence[Wire], row: Sequence[Action],
        input_gradients: InputGradients, leads: bool,
    ) -> None:  # fmt: skip
        """Initialize the object.

        Args:
            wires: the wires of the whole pipeline.
            row: what this rank does in a step.
        """
        self.part, self.stage, self.input_gradients, self.leads = part, stage, input_gradients, leads
        self.shares: Sequence[float] | Mapping[int, float] = ()
        self.scale: torch.Tensor | None = None
        self.local_batch: RowsOfRanks | None = None
        self.into = [wire for wire in wires if wire.target == part.number]
        self.out = [wire for wire in wires if wire.source == part.number]
        backwards = [action for action in row if action.stage == part.number and action.kind in "BW"]
        self.last = backwards[-1] if backwards else None
        self.halves = Halves()
        self.begun = False
        self.flying: dict[int, _Microbatch] = {}

    @property
    def whole_backward(self) -> bool:
        """Whether the backward is not split: what is recomputed in it would be recomputed in both halves."""
        return self.stage.plan.whole_backward

    def begin(
        self, shares: Sequence[float] | Mapping[int, float], local_batch: RowsOfRanks | None,
        scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Begin a step: what was gathered before the optimizer's step no longer counts.

        Args:
            local_batch: where each rank is called with rows of its own.
        """
        self.local_batch = local_batch
        self.begun, self.shares, self.scale = False, shares, scale
        self.stage.bind()

    def drop(self) -> None:
        """Forget a step that broke off."""
        self.stage.gradients.drop()
        self.halves.waiting.clear()
        self.flying.clear()

    def forward(
        self, post: Post, microbatch: int, batch: Mapping[str, torch.Tensor], shown: Mapping[str, str],
        seed: Any, evaluating: bool, reached: Reached | None = None,
    ) -> tuple[torch.Tensor | None, tuple[Any, ...]]:  # fmt: skip
        """Run the forward of a microbatch; return the loss, if the stage makes it, and all that the stage makes.

        Args:
            batch: the model's inputs of the microbatch, whole; messages call them as ``shown`` says.
            reached: what will have a gradient; None if all that wants one does.
        """
        with spmd.set_current_mesh(self.stage.device_mesh):
            arrived: dict[str, Arrived] = {}
            inputs: dict[str, torch.Tensor] = {}
            for wire in self.into:
                inputs[wire.name] = post.take(wire, False, microbatch).detach()
                if wire.back is not None and torch.is_grad_enabled():
                    inputs[wire.name], arrived[wire.name] = arriving(inputs[wire.name])
            for name in self.part.inputs:
                leaf = batch[name].detach()
                if self.local_batch is not None:
                    leaf = self.local_batch.joined(leaf, self.stage.inputs[name].shape, self.stage.device_mesh)
                inputs[name] = self.stage.local_input(name, leaf, shown.get(name, name))
                if name in self.input_gradients and torch.is_grad_enabled():
                    inputs[name], arrived[name] = arriving(inputs[name].detach())
            flat = self.stage.run(inputs, seed, same_step=self.begun, evaluating=evaluating)
            self.begun = True
            for wire in self.out:
                assert wire.stage_edge is not None
                post.send(wire, False, microbatch, flat[wire.stage_edge.output])
        graph = self.part.graph
        loss: torch.Tensor | None = None if graph.loss is None else flat[graph.loss]
        if torch.is_grad_enabled():
            self.stage.gradients.in_step.add(self.stage.gradients.took)
            outputs = {at: get_gradient_edge(x) for at, x in enumerate(flat[: len(self.part.gives)]) if x.requires_grad}
            self.flying[microbatch] = _Microbatch(arrived, outputs, loss, reached)
        return loss, flat

    def backward(self, post: Post, action: Action) -> None:
        """Compute the gradients of what arrived, and with them (``B``) or later (``I``) those of the parameters."""
        with spmd.set_current_mesh(self.stage.device_mesh), without_autocast():
            flown = self.flying.pop(action.microbatch)
            roots, grads = self._roots(post, action.microbatch, flown)
            if action.kind == "B" or self.whole_backward:
                with self.stage.gradients.reducing(last=action == self.last):
                    if roots:
                        torch.autograd.backward(roots, grads)
            else:
                wanted = list(flown.arrived.values())
                gradients = self.halves.inputs(
                    action.microbatch, roots, grads, [arrived.edge for arrived in wanted], self.stage.leaves()
                )
                for arrived, gradient in zip(wanted, gradients, strict=True):
                    arrived.gradient = gradient
                self.stage.free()
            for wire in self.into:
                if wire.back is not None:
                    post.send(wire, True, action.microbatch, flown.arrived[wire.name].gradient_or_zeros())
            self._give_inputs(action.microbatch, flown)

    def weights(self, action: Action) -> None:
        """Compute the gradients of the parameters, where the backward is split."""
        with (
            spmd.set_current_mesh(self.stage.device_mesh), without_autocast(),
            self.stage.gradients.reducing(last=action == self.last, by_hand=True),
        ):
            if not self.whole_backward:
                self.halves.weights(action.microbatch)

    def _roots(self, post: Post, microbatch: int, flown: _Microbatch) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return where gradients enter the graph of autograd, and these gradients."""
        sums: dict[int, torch.Tensor] = {}
        for wire in self.out:
            if wire.back is not None and wire.stage_edge is not None:
                grad, at = post.take(wire, True, microbatch), wire.stage_edge.output
                if flown.reached is not None and wire.stage_edge.tensor not in flown.reached:
                    continue  # zeros for what in eager mode would not be in the backward at all
                sums[at] = sums[at] + grad if at in sums else grad
        used = [at for at in sorted(sums) if at in flown.outputs]
        roots, grads = [flown.outputs[at] for at in used], [sums[at] for at in used]
        if flown.loss is not None:
            roots.append(get_gradient_edge(flown.loss))
            first = torch.full_like(flown.loss, self.shares[microbatch])
            grads.append(first if self.scale is None else first * self.scale.to(first.dtype))
        return roots, grads

    def _give_inputs(self, microbatch: int, flown: _Microbatch) -> None:
        for name in self.part.inputs:
            if name in flown.arrived and (grad := flown.arrived[name].gradient) is not None:
                whole = self.stage.joined_gradient(name, grad)
                if self.leads:
                    self.input_gradients.add(name, microbatch, whole)
