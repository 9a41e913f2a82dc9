"""The executor: a program with its parameters, called like the model.

``pm(*batch)`` takes the whole batch on every rank and returns the model's own output structure; ``loss.backward()``
leaves reduced gradients in ``param.grad``, placed as the parameters are; any ``torch.optim`` optimizer updates the
stored parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph, cut
from autopar.runtime.batches.batch import Shape
from autopar.runtime.batches.module_calls import ModuleCall, batch_rows
from autopar.runtime.batches.outputs import IN_SHARDS, unread, with_pending
from autopar.runtime.batches.same_batch import Calls, Seen, first_readers
from autopar.runtime.batches.totals_ahead import TotalsAhead, computed_ahead
from autopar.runtime.one_mesh.crossing import crossed
from autopar.runtime.one_mesh.left_attributes import leave
from autopar.runtime.one_mesh.statistics_anew import taken_anew
from autopar.runtime.parameters.state import HeldParam, as_dtensor, whole_of
from autopar.runtime.ranks.agree import mesh_group
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.runtime.ranks.devices import device_of
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.ranks.groups import groups_on
from autopar.runtime.stages.plan_groups import check_device_mesh, mesh_of_own
from autopar.runtime.stages.registering import Placing
from autopar.runtime.stages.seeds import seeds_for
from autopar.runtime.stages.stage import Stage
from autopar.runtime.variants.program_cache import Replan
from autopar.runtime.variants.recaptured import stored_pins
from autopar.runtime.variants.run import ParallelRun
from autopar.torch_private import pytree
from autopar.words.meshes import Mesh
from autopar.words.trees import PyTree

MOVED = (
    "backward() of a call before the last one, and the last one's bucket has parameters in other pieces, in which they "
    "are now: call backward() before the next bucket's forward, or give params= with which all buckets store them alike"
)


class MeshCalls(ParallelRun):
    """A model that is spread over one mesh, and its calls."""

    given_ahead: Mapping[str, torch.Tensor] | None = None

    def __init__(
        self, model: torch.nn.Module, captured: Captured, plan: Plan, device_mesh: DeviceMesh,
        values: Callable[[str], torch.Tensor] | None = None, *, alike: bool | None = None,
        random: str = "sharded",
    ) -> None:  # fmt: skip
        """Spread ``model`` over ``device_mesh`` as ``plan`` says, which has one stage.

        Args:
            values: gives the whole value of a parameter or buffer by name; by default the model's own. Only this
                rank's slice is kept.
            alike: whether this rank's generator of random numbers was seeded as the first rank's; by default all find
                out.
            random: who draws random numbers (:data:`~autopar.runtime.stages.seeds.MODES`).
        """
        super().__init__(model, captured, plan)
        check_device_mesh(device_mesh, plan.mesh)
        ranks = [int(r) for r in device_mesh.mesh.flatten()]
        groups = groups_on(device_mesh) if len(ranks) > 1 and groups_on(device_mesh).possible else None
        if groups is not None:
            device_mesh = mesh_of_own(captured.graph, plan.only(), device_mesh.device_type, ranks)
        self.device_mesh, self.groups = device_mesh, groups
        self.generation = groups.generation if groups is not None else 0
        self.world = dist.group.WORLD if len(ranks) > 1 else None
        self.device = torch.device(device_of(device_mesh))
        abort = groups.abort if groups is not None else None
        self.failures = Failures(ranks, abort, stays_armed=True) if len(ranks) > 1 else None
        self.calls = 0
        readers = first_readers([captured.graph])
        self.compared = Calls(self.everyone, device_mesh, len(ranks) == 1, [device_mesh], readers)
        self.seeds = seeds_for(random, self.everyone if len(ranks) > 1 else None, ranks[0], self.device, alike)
        self.parts = cut(captured.graph, plan.starts)
        placing = Placing(self.user, model, captured.graph, captured.constants, plan.only(), device_mesh, values)
        self._place({0: placing})

    @property
    def stage(self) -> Stage:
        """The program with what it reads: all of the model."""
        return self.stages[0]

    def run_program(
        self, captured: Captured, parts: tuple[StageGraph, ...], plan: Plan, stages: dict[int, Stage]
    ) -> None:
        """Run another program from now on; ranks meet where they read outputs that are in pieces."""
        super().run_program(captured, parts, plan, stages)
        cut_outputs = [
            i for i, state in enumerate(self.stage.program.outputs)
            if state is not None and i not in plan.pins.outputs and state.in_shards
        ]  # fmt: skip
        if cut_outputs and self.device_mesh.size() > 1 and self.meeting is None:
            self.meeting = CollectiveLog(self.rank_numbers())

    def shards_of(self) -> dict[str, Shape]:
        """Return the shapes of this rank's pieces of the inputs whose placement was asked for, where they are cut."""
        stage = self.stage
        pinned = [name for name in self.plan.pins.inputs if name in stage.inputs]
        return {name: stage.part_shape(name) for name in pinned if stage.inputs[name].state.is_cut}

    def plan_again(self, planner: Replan, new: Captured, call: ModuleCall) -> Plan:
        """Return a plan for another capture, with the parameters stored as they are."""
        stage = planner(new, stored_pins(self, self.stage.buffers, new.graph))
        return replace(self.plan, fingerprint=stage.fingerprint, stages=(stage,), seconds=stage.price.seconds)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return the whole value of a buffer that the program reads."""
        if name not in self.stage.buffers:
            return None
        value, state = self.stage.buffers[name]
        shape = self.captured.graph.nodes[self.captured.graph.index[name]].out.shape
        return as_dtensor(value, state, shape, self.device_mesh).full_tensor() if state.is_cut else value

    def draws(self) -> bool:
        """Return whether the program has random operators."""
        return self.stage.draws

    @property
    def everyone(self) -> Any:
        """The group of the ranks of the mesh: autopar's own, where that is possible."""
        return self.groups.of(self.rank_numbers()) if self.groups is not None else mesh_group(self.device_mesh)

    def stages_on_ranks(self) -> list[tuple[Mesh, Sequence[int]]]:
        """Return the mesh and its ranks, which may be others than those of the plan."""
        return [(self.plan.mesh, self.rank_numbers())]

    def ranks(self) -> tuple[Any, int]:
        """Return the process group of the ranks that hold a part, and the first of them."""
        return mesh_group(self.device_mesh), int(self.device_mesh.mesh.flatten()[0])

    def rank_numbers(self) -> list[int]:
        """Return the ranks of the mesh."""
        return [int(rank) for rank in self.device_mesh.mesh.flatten()]

    def in_step(self) -> bool:
        """Return whether a step has begun."""
        return self.stage.gradients.accumulating or self.stage.gradients.defer

    # -- running

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the outputs of a call, padded to its bucket where there are buckets."""
        if self.buckets is None:
            return self.run_call(args, kwargs)
        (args, kwargs), padding = self.buckets.padded(args, kwargs)
        return self.buckets.cut(self.run_call(args, kwargs), padding)

    def run_call(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], of_step: bool = False) -> PyTree:
        """Run :meth:`forward` of a call that has its bucket's shape, if there are buckets.

        Args:
            of_step: it is a microbatch of a step.
        """
        call = self.calls + 1
        with self.all_in_step(f"the forward of call {call}"):
            if self.local_batch is not None and not of_step:
                together = self.rows_of_all(args, kwargs)
                args, kwargs = self.local_batch.whole(args, kwargs, self.device_mesh) if together is None else together
            self.check_values(ModuleCall(args, kwargs, of_step=of_step))
            if self.meeting is not None:
                self.meeting.note(f"the forward of call {call}")
            with taken_anew(self):
                return self._outputs(self.call_program(call, args, kwargs), call, of_step)

    def call_program(self, call: int, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[Any, ...]:
        """Run the program on a call whose shapes it takes."""
        if torch.jit.is_tracing():
            raise RunError(
                "torch.jit.trace of a parallel module: it computes with this rank's shards and collectives; trace a "
                "copy of the model, on one rank, with the weights that autopar.full_state_dict(pm) gives"
            )
        stage, meeting = self.stage, self.meeting
        self.calls = call
        stage.bind()
        inputs = self.compared.inputs(lambda seen: self.inputs(args, kwargs, seen), self.named_parameters())
        seed = self.seeds.of_call(stage.graph_in(self.training)) if stage.draws_in(self.training) else None

        def run(inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
            same_step = stage.gradients.accumulating
            flat = stage.run(inputs, seed, same_step=same_step, evaluating=not self.training)
            return flat[: len(stage.plan.outputs)]

        if stage.direct:
            return run(inputs)

        layout = self.layout

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            self.check_world()
            if self.layout != layout:
                raise RunError(MOVED)
            if meeting is not None:
                meeting.note(f"the backward of call {call}")
            with self.fails_everywhere(f"the backward of call {call}"):
                yield

        return crossed(stage.gradients, stage.probe, inputs, run, around)

    def _outputs(self, flat: tuple[Any, ...], call: int, of_step: bool) -> Any:
        """Return the structure that the model gives, from the program's flat outputs.

        Args:
            call: its number.
            of_step: it is a microbatch of a step, of which nothing but the loss is read.
        """
        graph, mesh = self.captured.graph, self.device_mesh
        results: list[Any] = []
        local_batch = None if of_step else self.local_batch
        rows = batch_rows(self.captured) if local_batch is not None else 0
        for i, (value, state) in enumerate(zip(flat, self.stage.plan.outputs, strict=True)):
            if state is None or not isinstance(value, torch.Tensor):
                results.append(value)
                continue
            value = with_pending(value, state, mesh)
            if local_batch is not None and (shape := graph.spec(graph.outputs[i]).shape) and shape[0] == rows:
                results.append(local_batch.of_output(value, state, shape, mesh))
                continue
            if any(not p.is_replicated and n > 1 for p, (_, n) in zip(state, self.stage.plan.mesh, strict=True)):
                shape = graph.spec(graph.outputs[i]).shape
                if self.meeting is None or i in self.plan.pins.outputs:
                    value = as_dtensor(value, state, shape, mesh)
                else:
                    meet = partial(self.meeting.meet, "reads", f"output {i} of call {call}", IN_SHARDS)
                    value = unread(value, state, shape, mesh, meet)
            results.append(value)
        n_outputs = self.captured.out_spec.num_leaves
        leave(self, results[n_outputs:], of_step)
        return pytree.tree_unflatten(results[:n_outputs], self.captured.out_spec)

    def inputs(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], seen: Seen | None) -> dict[str, torch.Tensor]:
        """Return the local inputs by name; what ranks are to compare goes into ``seen``."""
        stage, batch = self.stage, self.batch
        local_inputs: dict[str, torch.Tensor] = {}
        tensors = batch.tensors(args, kwargs)
        batch.check_one(tensors, self.plan.microbatches)
        if (ahead := self.totals) is not None:
            of_step = self.given_ahead
            if of_step is None:
                whole = self.whole_inputs(ahead, args, kwargs)
                (of_step,) = computed_ahead([ahead], [whole], [1.0], self.buffer)
            local_inputs.update(of_step)
        for name, leaf in tensors.items():
            local_inputs[name] = stage.local_input(name, leaf, batch.shown[name], name in batch.pieces)
            if seen is not None and not isinstance(leaf, DTensor):
                slot = stage.inputs[name]
                seen.add(batch.shown[name], name, leaf, None if tuple(leaf.shape) == slot.shape else slot.state)
        return local_inputs

    def whole_inputs(
        self, ahead: TotalsAhead, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> dict[str, torch.Tensor]:
        """Return the inputs from which totals of the batch follow, whole: ranks may be called with their pieces."""
        tensors = self.batch.tensors(args, kwargs)
        whole = {}
        for name, shape in ahead.inputs.items():
            leaf = tensors[name].detach()
            if not isinstance(leaf, DTensor) and tuple(leaf.shape) != shape:
                leaf = as_dtensor(leaf, self.stage.inputs[name].state, shape, self.device_mesh)
            whole[name] = whole_of(leaf)
        return whole

    @property
    def held_params(self) -> Mapping[str, HeldParam]:
        """The parameters that the program reads, by name."""
        return self.stage.held_params

    def evaluate(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> torch.Tensor:
        """Return the loss of a batch without gradients."""
        with torch.no_grad():
            outputs = pytree.tree_leaves(self.forward(*args, **kwargs))
        number = self.captured.graph.loss
        if number is None:
            raise RunError("the model has no scalar loss to evaluate; pass loss_fn= and targets= to parallelize")
        return outputs[number]  # type: ignore[no-any-return]
