"""The executor: a program with its parameters, called like the model.

``pm(*batch)`` takes the whole batch on every rank and returns the model's own output structure; ``loss.backward()``
leaves reduced gradients in ``param.grad``, placed as the parameters are; any ``torch.optim`` optimizer updates the
stored parameters.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton
from autopar.errors import RunError
from autopar.lower.program import Program
from autopar.plans.plan import Plan
from autopar.runtime.as_module.copied import copied
from autopar.runtime.as_module.parallel_module import SpreadModule
from autopar.runtime.as_module.statistics_anew import taken_anew
from autopar.runtime.batches.batch import Batch
from autopar.runtime.batches.calls import without_inference_mode
from autopar.runtime.batches.local_batch import Call, LocalBatch, TakesRows
from autopar.runtime.batches.outputs import CollectiveLog
from autopar.runtime.batches.same_batch import Calls, Seen, first_readers
from autopar.runtime.batches.totals_ahead import TotalsAhead, computed_ahead, totals_ahead
from autopar.runtime.one_mesh.crossing import crossed
from autopar.runtime.one_mesh.mesh_outputs import outputs_of
from autopar.runtime.one_mesh.mesh_step import parts_of_step, trained, whole_inputs
from autopar.runtime.optimizers import grad_scaler
from autopar.runtime.parameters.registering import Placing
from autopar.runtime.parameters.state import HeldParam, as_dtensor
from autopar.runtime.ranks.agree import mesh_group
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.ranks.groups import Groups, groups_on
from autopar.runtime.ranks.plan_groups import check_device_mesh, mesh_of_own
from autopar.runtime.stages.compiled import compiled_as_callers
from autopar.runtime.stages.seeds import Seeds, seeds_for
from autopar.runtime.stages.stage import Stage, device_of
from autopar.runtime.variants.module_calls import ModuleCall
from autopar.runtime.variants.program_cache import AllWell, Fields, Replan
from autopar.runtime.variants.recaptured import fields_of, resume, take
from autopar.runtime.variants.values import check_values

MOVED = (
    "backward() of a call before the last one, and the last one's bucket has parameters in other pieces, in which they "
    "are now: call backward() before the next bucket's forward, or give params= with which all buckets store them alike"
)


class ParallelModule(TakesRows, SpreadModule):
    """What :func:`autopar.parallelize` returns: the model, spread over a mesh.

    Parameters are DTensors under the names that they have in the model; on a mesh of one device plain tensors, for
    which optimizers take half the time. :attr:`plan` and :attr:`program` are for reading.
    """

    _autopar_mesh: DeviceMesh
    _autopar_signature: inspect.Signature
    _autopar_given: Plan
    _autopar_stage: Stage
    _autopar_batch: Batch
    _autopar_seeds: Seeds
    _autopar_calls: int
    _autopar_compared: Calls
    _autopar_meeting: CollectiveLog | None
    _autopar_failures: Failures | None
    _autopar_groups: Groups | None
    _autopar_generation: int
    _autopar_local_batch: LocalBatch | None = None
    _autopar_planned: Captured
    _autopar_totals_kept: tuple[TotalsAhead | None] | None = None
    _autopar_given_ahead: Mapping[str, torch.Tensor] | None = None

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
        super().__init__()
        check_device_mesh(device_mesh, plan.mesh)
        ranks = [int(r) for r in device_mesh.mesh.flatten()]
        groups = groups_on(device_mesh) if len(ranks) > 1 and groups_on(device_mesh).possible else None
        if groups is not None:
            device_mesh = mesh_of_own(captured.graph, plan.only(), device_mesh.device_type, ranks)
        self._autopar_mesh, self._autopar_groups = device_mesh, groups
        self._autopar_generation = groups.generation if groups is not None else 0
        self._autopar_world = dist.group.WORLD if len(ranks) > 1 else None
        self._autopar_device = torch.device(device_of(device_mesh))
        self._autopar_signature = inspect.signature(model.forward)
        self._autopar_captured, self._autopar_captured_training = captured, model.training
        self._autopar_planned = captured
        self._autopar_skeleton = Skeleton(model) if model.training and not isinstance(model, SpreadModule) else None
        self._autopar_meeting = None
        abort = groups.abort if groups is not None else None
        self._autopar_failures = Failures(ranks, abort, stays_armed=True) if len(ranks) > 1 else None
        self._autopar_calls = 0
        readers = first_readers([captured.graph])
        compared_in = groups.of(ranks) if groups is not None else mesh_group(device_mesh)
        self._autopar_compared = Calls(compared_in, device_mesh, len(ranks) == 1, [device_mesh], readers)
        self._autopar_seeds = seeds_for(
            random, compared_in if len(ranks) > 1 else None, ranks[0], self._autopar_device, alike
        )
        self._autopar_given = plan
        placing = Placing(self, model, captured.graph, captured.constants, plan.only(), device_mesh, values)
        placing.parameters()
        self._autopar_set_mode_of(model)
        self._autopar_run_stage(
            captured, Stage(captured.graph, plan.only(), device_mesh, self, placing.registered_buffers())
        )

    def _autopar_run_stage(self, captured: Captured, stage: Stage) -> None:
        """Run another program from now on.

        Args:
            captured: what the stage is of.
        """
        self._autopar_captured, self._autopar_stage, self._autopar_totals_kept = captured, stage, None
        self._autopar_batch = Batch(
            captured, self._autopar_signature, self._autopar_device, self._autopar_pieces(stage)
        )
        cut_outputs = [
            i for i, state in enumerate(stage.program.outputs)
            if state is not None and i not in self._autopar_given.pins.outputs and state.in_shards
        ]  # fmt: skip
        if cut_outputs and self._autopar_mesh.size() > 1 and self._autopar_meeting is None:
            self._autopar_meeting = CollectiveLog([int(r) for r in self._autopar_mesh.mesh.flatten()])

    def _autopar_pieces(self, stage: Stage) -> dict[str, tuple[int, ...]]:
        """Shapes of this rank's pieces of the inputs whose placement was asked for, where they are cut."""
        pinned = [name for name in self._autopar_given.pins.inputs if name in stage.inputs]
        return {name: stage.part_shape(name) for name in pinned if stage.inputs[name].state.is_cut}

    @property
    def plan(self) -> Plan:
        """The plan that this module runs."""
        stage = self._autopar_stage.plan
        if stage is self._autopar_given.stages[0]:
            return self._autopar_given
        return replace(self._autopar_given, fingerprint=stage.fingerprint, stages=(stage,), seconds=stage.price.seconds)

    @property
    def _autopar_totals(self) -> TotalsAhead | None:
        """What gives the inputs of the program that are computed ahead of a step; None where it has none."""
        if self._autopar_totals_kept is None:
            self._autopar_totals_kept = (totals_ahead(self._autopar_captured, self._autopar_device),)
        return self._autopar_totals_kept[0]

    def _autopar_buffer(self, name: str) -> torch.Tensor | None:
        """The whole value of a buffer that the program reads."""
        if name not in self._autopar_stage.buffers:
            return None
        value, state = self._autopar_stage.buffers[name]
        shape = self._autopar_captured.graph.nodes[self._autopar_captured.graph.index[name]].out.shape
        return as_dtensor(value, state, shape, self._autopar_mesh).full_tensor() if state.is_cut else value

    def _autopar_batch_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call of the program that runs now, by input name."""
        return self._autopar_batch.tensors(args, kwargs)

    @property
    def program(self) -> Program:
        """The rewritten model; ``print(pm.program.code)``."""
        return self._autopar_stage.program

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks."""
        return self._autopar_mesh

    def _autopar_take_local_batch(self, without: frozenset[str]) -> None:
        """From now on every rank is called with its own rows; inputs of the names in ``without`` have none."""
        self._autopar_local_batch = LocalBatch(self._autopar_mesh)
        self._autopar_local_batch.without = without

    @property
    def _autopar_evaluates(self) -> bool:
        """Whether the program that runs now has one of eval mode beside it."""
        return self._autopar_stage.evaluation is not None

    def _autopar_prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        self._autopar_stage.prepare_evaluation(sides)

    def _autopar_draws(self) -> bool:
        return self._autopar_stage.draws

    def _autopar_ranks(self) -> tuple[Any, int]:
        return mesh_group(self._autopar_mesh), int(self._autopar_mesh.mesh.flatten()[0])

    def _autopar_kept_program(self) -> Fields:
        return fields_of(self)

    def _autopar_resume_program(self, fields: Fields) -> None:
        resume(self, fields)

    def _autopar_take_program(
        self, new: Captured, call: ModuleCall, replan: Replan | None, all_well: AllWell
    ) -> None:
        take(self, new, replan, all_well)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Another one, with the values that this one has now; every rank copies. Values that ``forward`` reads stay
        those of the program that runs now, so a copy does not follow changes (``on_change="recapture"``).
        """
        captured, seeds = self._autopar_captured, self._autopar_seeds
        new: ParallelModule = copied(
            self, memo, lambda values: ParallelModule(
                self, captured, self.plan, self._autopar_mesh, values, alike=seeds.alike, random=seeds.mode
            )
        )  # it has all that is asked of a model here: names, shapes and classes
        new._autopar_planned = self._autopar_planned
        return new

    def _autopar_in_step(self) -> bool:
        return self._autopar_stage.gradients.accumulating or self._autopar_stage.gradients.defer

    # -- running

    @compiled_as_callers
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a whole batch, which every rank passes alike.

        Args:
            args, kwargs: what the model is called with: tensors of global shape on this rank's device (with
                ``batch="local"`` this rank's rows: :mod:`~autopar.runtime.batches.local_batch`), or DTensors of any
                placement. Of an input whose placement was asked for (``placements=``), a tensor that has the shape of
                this rank's piece is that piece.

        Returns:
            The model's output, of global shapes and in the model's dtypes.

        All outputs are plain and whole, the same on all ranks, and any of them, or a sum of them, can be called
        ``backward`` on. Large ones beside a loss are put together when their values are first used, on every rank.
        Outputs that were pinned to pieces (``placements={1: "S0"}``) are DTensors.

        Raises:
            RunError: the call is not one that was captured; or ranks were called with different batches, or hold
                different copies of a parameter, which they compare in the first three calls and now and then
                (:mod:`autopar.runtime.batches.same_batch`).
        """
        if self._autopar_buckets is None:
            return self._autopar_run_call(args, kwargs)
        (args, kwargs), padding = self._autopar_buckets.padded(args, kwargs)
        return self._autopar_buckets.cut(self._autopar_run_call(args, kwargs), padding)

    def _autopar_run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], of_step: bool = False) -> Any:
        """:meth:`forward` of a call that is of its bucket's shape, where there are buckets.

        Args:
            of_step: it is a microbatch of a step.
        """
        with without_inference_mode():
            return self._autopar_run(args, kwargs, of_step)

    def _autopar_run(self, args: tuple[Any, ...], kwargs: dict[str, Any], of_step: bool) -> Any:
        call = self._autopar_calls + 1
        failures = self._autopar_failures
        if failures is None:  # one device: the program runs in the caller's own autograd graph
            check_values(self, ModuleCall(args, kwargs, of_step=of_step))
            with taken_anew(self):
                return outputs_of(self, self._autopar_call(call, args, kwargs), call, of_step)
        self._autopar_check_world()
        failures.settle()
        with failures.during(f"the forward of call {call}"):
            if self._autopar_groups is not None:
                self._autopar_groups.check(self._autopar_generation)
            if self._autopar_local_batch is not None and not of_step:
                together = self._autopar_rows_of_all(args, kwargs)
                args, kwargs = self._autopar_local_batch.whole(args, kwargs) if together is None else together
            check_values(self, ModuleCall(args, kwargs, of_step=of_step))
            meeting = self._autopar_meeting
            if meeting is not None:
                meeting.note(f"the forward of call {call}")
            with taken_anew(self):
                return outputs_of(self, self._autopar_call(call, args, kwargs), call, of_step)

    def _autopar_rows_of_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """A call with the rows of all ranks, where each has its own and not equally many; else None."""
        if (
            self._autopar_local_batch is None
            or self._autopar_buckets is not None
            or self._autopar_programs is None
            or not self._autopar_programs.shapes
        ):
            return None
        logs = [log for log in (self._autopar_meeting, self._autopar_programs.meeting) if log is not None]
        return self._autopar_local_batch.put_together(args, kwargs, logs)

    def _autopar_fails_everywhere(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Around a part of a step: what fails in it on one rank ends the step on all."""
        return self._autopar_failures.during(where) if self._autopar_failures is not None else contextlib.nullcontext()

    def _autopar_call(self, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if torch.jit.is_tracing():
            raise RunError(
                "torch.jit.trace of a parallel module: it computes with this rank's pieces and collectives; trace the "
                "model itself, on one rank, with the weights that autopar.full_state_dict(pm) gives"
            )
        stage, meeting = self._autopar_stage, self._autopar_meeting
        self._autopar_calls = call
        stage.bind()
        inputs = self._autopar_compared.inputs(
            lambda seen: self._autopar_inputs(args, kwargs, seen), self.named_parameters()
        )
        seed = self._autopar_seeds.of_call(stage.graph_in(self.training)) if stage.draws_in(self.training) else None

        def run(inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
            same_step = stage.gradients.accumulating
            flat = stage.run(inputs, seed, same_step=same_step, evaluating=not self.training)
            return flat[: len(stage.plan.outputs)]

        if stage.direct:
            return run(inputs)

        layout = self._autopar_layout

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            self._autopar_check_world()
            if self._autopar_layout != layout:
                raise RunError(MOVED)
            if meeting is not None:
                meeting.note(f"the backward of call {call}")
            with self._autopar_fails_everywhere(f"the backward of call {call}"):
                yield

        return crossed(stage.gradients, stage.probe, inputs, run, around)

    def _autopar_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen | None
    ) -> dict[str, torch.Tensor]:
        """Local inputs by name; what ranks are to compare goes into ``seen``."""
        stage, batch = self._autopar_stage, self._autopar_batch
        local_inputs: dict[str, torch.Tensor] = {}
        tensors = batch.tensors(args, kwargs)
        batch.check_one(tensors, self._autopar_given.microbatches)
        if (ahead := self._autopar_totals) is not None:
            of_step = self._autopar_given_ahead
            if of_step is None:
                whole = whole_inputs(self, ahead, args, kwargs)
                (of_step,) = computed_ahead([ahead], [whole], [1.0], self._autopar_buffer)
            local_inputs.update(of_step)
        for name, leaf in tensors.items():
            local_inputs[name] = stage.local_input(name, leaf, batch.shown[name], name in batch.pieces)
            if seen is not None and not isinstance(leaf, DTensor):
                slot = stage.inputs[name]
                seen.add(batch.shown[name], name, leaf, None if tuple(leaf.shape) == slot.shape else slot.state)
        return local_inputs

    @property
    def _autopar_held_params(self) -> Mapping[str, HeldParam]:
        """The parameters that the program reads, by name."""
        return self._autopar_stage.held_params

    @compiled_as_callers
    def train_step(
        self, *args: Any, optimizer: torch.optim.Optimizer | None = None, microbatches: int | None = None,
        scaler: torch.amp.GradScaler | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One training step on a batch of one or more microbatches.

        A microbatch has the shapes of the example inputs. An input whose first dim is ``microbatches`` times as long
        is cut there; one with exactly the captured shape goes into every microbatch. Each loss counts by its
        microbatch's part of the rows, and divides by what the whole batch has where it divides by a sum over labels or
        masks (:mod:`~autopar.runtime.batches.totals_ahead`), so that the loss and the gradients are those of the whole
        batch at once.

        Args:
            optimizer: if given, ``step()`` and ``zero_grad()`` follow; else gradients are left in ``param.grad``.
            args, kwargs: the batch, of global shapes, the same on every rank.
            microbatches: how many; by default found from the shapes.
            scaler: multiplies the gradients (:mod:`~autopar.runtime.optimizers.grad_scaler`); with ``optimizer``,
                ``step()`` and ``update()`` of it follow, else ``unscale_``, clipping and these are the caller's.

        Returns:
            The loss of the batch, a tensor of shape [] and of the loss's dtype, the same on every rank.
            Gradients in ``param.grad`` are added to those that are there, as ``loss.backward()`` adds them.

        Raises:
            RunError: the model has no scalar loss, is in eval mode, or the shapes are not those of whole microbatches.
        """
        if self._autopar_buckets is not None:
            (args, kwargs), _ = self._autopar_buckets.padded(args, kwargs)
        parts = parts_of_step(self, args, kwargs, microbatches)
        loss = trained(self, parts, grad_scaler.scale_of(scaler, self._autopar_device))
        if optimizer is not None:
            with self._autopar_fails_everywhere(f"the optimizer's step after call {self._autopar_calls}"):
                grad_scaler.step(optimizer, scaler)
            optimizer.zero_grad()
        return loss

    def _autopar_check_step(self, call: ModuleCall) -> None:
        """Before a step begins: within it, another program would be refused."""
        with self._autopar_all_in_step("the step"):
            check_values(self, call)

    @contextlib.contextmanager
    def _autopar_all_in_step(self, what: str) -> Iterator[None]:
        """Around what all ranks do before a step begins, after all have broken off one that failed."""
        self._autopar_check_world()
        if self._autopar_failures is not None:
            self._autopar_failures.settle()
        with self._autopar_fails_everywhere(f"{what} of call {self._autopar_calls + 1}"):
            yield

    def __repr__(self) -> str:
        mesh = self.plan.mesh.shown()
        parameters, nodes = len(self._autopar_held_params), len(self._autopar_captured.graph.nodes)
        return f"ParallelModule({mesh}, {parameters} parameters, {nodes} nodes)"


__all__ = ["ParallelModule"]
