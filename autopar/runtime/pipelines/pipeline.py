"""The pipeline: every group of ranks holds its stages and does what the schedule says, action by action.

A stage is a :class:`~autopar.runtime.stages.stage.Stage` on the group's own mesh, so parameters, gathers and gradient
reductions are those of a plan without pipeline; what is in flight through it, and its messages, are
:mod:`autopar.runtime.pipelines.stage_in_flight`. This file is the module that people hold: a step of all stages, and
what crosses them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton, evaluated
from autopar.errors import RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph, cut
from autopar.rules.registry import drawing
from autopar.runtime.as_module.copied import copied
from autopar.runtime.as_module.parallel_module import SpreadModule
from autopar.runtime.batches.batch import Batch
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.batches.calls import without_inference_mode
from autopar.runtime.batches.local_batch import TakesRows
from autopar.runtime.batches.local_batch_in_stages import RowsInStages
from autopar.runtime.batches.same_batch import Calls, first_readers
from autopar.runtime.batches.totals_ahead import TotalsAhead, totals_ahead
from autopar.runtime.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from autopar.runtime.gradients.reached import ReachedBy, reached_by
from autopar.runtime.optimizers import grad_scaler
from autopar.runtime.parameters.one_rank_functions import flat_optimizer_states, scaled, squared_norm
from autopar.runtime.parameters.registering import Placing
from autopar.runtime.parameters.state import as_dtensor
from autopar.runtime.pipelines import pipeline_programs
from autopar.runtime.pipelines.pipeline_outputs import of_batch, of_run
from autopar.runtime.pipelines.pipeline_programs import Lines
from autopar.runtime.pipelines.pipeline_runs import forwards, ready_runs, seeds_of
from autopar.runtime.pipelines.pipeline_start import begun, check_fits, take_values, unread_in
from autopar.runtime.pipelines.rank_actions import Span, Unfinished, Work
from autopar.runtime.pipelines.schedule_check import check_buffers, check_rows
from autopar.runtime.pipelines.ties import Tied
from autopar.runtime.ranks.agree import Meeting
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.ranks.groups import Groups
from autopar.runtime.stages.compiled import compiled_as_callers
from autopar.runtime.stages.seeds import Seeds, seeds_for
from autopar.runtime.stages.stage import Stage, device_of
from autopar.runtime.variants.buckets import Padding
from autopar.runtime.variants.module_calls import ModuleCall
from autopar.runtime.variants.program_cache import AllWell, Fields
from autopar.torch_private import pytree
from autopar.words.graph import Graph


class PipelineModule(TakesRows, SpreadModule):
    """A model in stages on several groups of ranks. Every rank holds the parameters of its own stages.

    Names of parameters are those of the model. ``train_step(*batch)`` takes the whole batch on every rank, cuts it into
    microbatches (:mod:`~autopar.runtime.batches.runs`), returns the loss of the batch on every rank and leaves
    gradients in ``param.grad``.
    """

    _autopar_plan: Plan
    _autopar_rank: int
    _autopar_signature: inspect.Signature
    _autopar_parts: tuple[StageGraph, ...]
    _autopar_batch: Batch
    _autopar_compared: Calls
    _autopar_seeds: Seeds
    _autopar_steps: int
    _autopar_planned: tuple[Captured, int]
    _autopar_drawing: tuple[Graph | None, Graph | None]
    _autopar_none: torch.nn.Parameter
    _autopar_has_evaluation: bool
    _autopar_reached_by: ReachedBy | None
    _autopar_totals: TotalsAhead | None
    _autopar_stages: dict[int, Stage]
    _autopar_lines: Lines
    _autopar_first_tied: tuple[Tied, ...]
    _autopar_works: dict[int, Work]
    _autopar_work: Work
    _autopar_unfinished: Unfinished
    _autopar_spans: list[Span] | None
    _autopar_local_batch: RowsInStages | None = None
    _autopar_failures: Failures
    _autopar_groups: Groups
    _autopar_generation: int
    _autopar_order: tuple[str, ...]
    _autopar_padding: Padding

    def __init__(
        self, model: torch.nn.Module, captured: Captured, plan: Plan, device_type: str = "cpu",
        values: Callable[[str], torch.Tensor] | None = None, alike: bool | None = None, meeting: Meeting | None = None,
        random: str = "sharded",
    ) -> None:  # fmt: skip
        """Every rank calls this with the same arguments.

        Args:
            model: with its values, or on the meta device with ``values``.
            captured: of one microbatch.
            values: gives the whole value of a parameter or buffer by name; called on every rank for every name in the
                same order, so it may communicate.
            alike: whether this rank's generator of random numbers was seeded as rank 0's; by default all find out.
            random: who draws random numbers (:data:`~autopar.runtime.stages.seeds.MODES`).
            meeting: where ranks hear of one that fails here; whoever gives it closes it.

        Raises:
            PlanError: the plan is for another model. RunError: not as many ranks as devices in the plan.
        """
        super().__init__()
        check_fits(plan, captured)
        self._autopar_plan, self._autopar_rank, self._autopar_world = plan, dist.get_rank(), dist.group.WORLD
        self._autopar_order = (
            model._autopar_parameter_order() if isinstance(model, PipelineModule)
            else tuple(name for name, _ in model.named_parameters())
        )  # fmt: skip
        self._autopar_signature = inspect.signature(model.forward)
        self._autopar_captured, self._autopar_captured_training = captured, model.training
        self._autopar_skeleton = Skeleton(model) if model.training and not isinstance(model, SpreadModule) else None
        self._autopar_has_evaluation = False
        self._autopar_steps = 0
        self._autopar_planned = captured, plan.microbatches
        self._autopar_parts = cut(captured.graph, plan.starts)
        check_rows(plan.schedule, self._autopar_parts)
        check_buffers(plan, {name for name, _ in model.named_buffers(remove_duplicate=False)})
        well = meeting.tell if meeting is not None else lambda: None
        well()
        here = begun(self._autopar_parts, plan, device_type)  # all groups, before ranks go different ways
        groups, mine, meshes = here.groups, here.mine, here.meshes
        self._autopar_groups, self._autopar_generation = groups, groups.generation
        if len({s.devices for s in plan.stages}) > 1:
            flat_optimizer_states(PipelineModule)
        shared: dict[str, torch.nn.Parameter] = {}
        unread = unread_in(model, captured, self._autopar_parts)
        placings = {
            s: Placing(
                self, model, self._autopar_parts[s].graph, captured.constants, plan.stages[s], meshes[s], shared=shared,
                unread=unread if s == 0 else None,
            )
            for s in mine
        }  # fmt: skip
        take_values(model, here, values, placings.values())
        well()
        self._autopar_drawing = (drawing(captured.graph),) * 2
        self._autopar_device = torch.device(device_of(meshes[mine[0]]))
        self._autopar_none = torch.nn.Parameter(torch.empty(0, device=self._autopar_device))
        self._autopar_batch = Batch(captured, self._autopar_signature, self._autopar_device)
        self._autopar_reached_by = reached_by(captured.graph, self._autopar_device)
        self._autopar_totals = totals_ahead(captured, self._autopar_device)
        readers = first_readers([captured.graph])
        self._autopar_compared = Calls(here.everyone, None, False, list(meshes.values()), readers)
        self._autopar_seeds = seeds_for(random, here.everyone, 0, self._autopar_device, alike)
        self._autopar_failures = Failures(
            range(dist.get_world_size()), groups.abort, stays_armed=self._autopar_device.type != "cpu"
        )
        self._autopar_leads = self._autopar_rank == plan.stages[mine[0]].devices[0]
        for placing in placings.values():
            placing.parameters()
        self._autopar_stages = {
            s: Stage(self._autopar_parts[s].graph, plan.stages[s], meshes[s], self, placing.registered_buffers())
            for s, placing in placings.items()
        }
        self._autopar_set_mode_of(model)
        self._autopar_lines, self._autopar_first_tied = (here.wires, here.tied), here.tied
        self._autopar_works, self._autopar_unfinished, self._autopar_spans = {}, Unfinished(), None
        self._autopar_work = pipeline_programs.work_of(self, plan.microbatches)

    @property
    def plan(self) -> Plan:
        """The plan that this module runs."""
        return self._autopar_plan

    def _autopar_take_local_batch(self, without: frozenset[str]) -> None:
        """From now on every rank is called with its own rows; inputs of the names in ``without`` have none."""
        self._autopar_local_batch = RowsInStages(
            [(s.mesh, s.devices) for s in self._autopar_plan.stages], self._autopar_rank
        )
        self._autopar_local_batch.without = without

    @property
    def _autopar_rows(self) -> RowsInStages | None:
        """How this step's rows lie on the ranks; None where each of them has all of them."""
        return (
            self._autopar_local_batch
            if self._autopar_local_batch is not None and self._autopar_local_batch.counts is None
            else None
        )

    def _autopar_draws(self) -> bool:
        return self._autopar_drawing[0] is not None

    def _autopar_ranks(self) -> tuple[Any, int]:
        return dist.group.WORLD, 0

    def _autopar_buffer(self, name: str) -> torch.Tensor | None:
        """The whole value of a buffer, on all ranks, which call it together: that of the first stage that reads it."""
        node = self._autopar_captured.graph.nodes[self._autopar_captured.graph.index[name]]
        number = next(
            (p.number for p in self._autopar_parts if any(n.target == name for _, n in p.graph.of_kind("buffer"))), 0
        )  # fmt: skip
        stage, value = self._autopar_stages.get(number), self._autopar_captured.constants.get(name)
        if stage is not None and name in stage.buffers:
            held, state = stage.buffers[name]
            value = as_dtensor(held, state, node.out.shape, stage.device_mesh).full_tensor() if state.is_cut else held
        elif value is None:
            value = self._autopar_registered().get(name)
        if value is None:
            value = torch.empty(node.out.shape, dtype=getattr(torch, node.out.dtype))
        value = value.detach().to(self._autopar_device).contiguous().clone()
        dist.broadcast(value, self._autopar_plan.stages[number].devices[0], group=self._autopar_work.everyone)
        return value

    def _autopar_parameter_order(self) -> tuple[str, ...]:
        return self._autopar_order

    def _autopar_tied_names(self) -> dict[str, str]:
        return {alias: name for part in self._autopar_parts for alias, name in part.graph.tied.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineModule:
        """Another one, with the values that this one has now, on the same ranks; every rank copies. Values that
        ``forward`` reads stay those of the program that runs now."""
        captured, plan, kind = self._autopar_captured, self._autopar_plan, self._autopar_device.type
        seeds = self._autopar_seeds
        new: PipelineModule = copied(
            self, memo, lambda values: PipelineModule(
                self, captured, plan, kind, values, alike=seeds.alike, random=seeds.mode
            )
        )
        new._autopar_planned, new._autopar_first_tied = self._autopar_planned, self._autopar_first_tied
        return new

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Those of this rank's stages; if they have none, one without elements and without a name, because optimizers
        refuse an empty list."""
        params = list(super().parameters(recurse))
        yield from params or [self._autopar_none]

    # -- a step

    @compiled_as_callers
    def train_step(
        self, *args: Any, optimizer: torch.optim.Optimizer | None = None, scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One training step on a batch of any number of rows, in microbatches of at most as many as are planned.

        Inputs that have the rows of the batch are cut; others go into every microbatch. Each loss counts by its
        microbatch's part of the rows, and divides by what the whole batch has where it divides by a sum over labels or
        masks (:mod:`~autopar.runtime.batches.totals_ahead`). With
        ``shapes="fixed"`` the batch is ``plan.microbatches`` microbatches, and inputs of the captured shape go into
        every one.

        Inputs that require grad (in the example inputs of ``parallelize``, too) get their gradients in this call, since
        it runs the backward: a leaf in ``x.grad``, on every rank and whole; of any other tensor the parameters that it
        was made with, such as those of a layer in front. Its graph is freed, as after ``loss.backward()``.

        Args:
            args, kwargs: the batch, of global shapes, the same on every rank.
            optimizer: if given, ``step()`` and ``zero_grad()`` follow.
            scaler: multiplies the gradients (:mod:`~autopar.runtime.optimizers.grad_scaler`); with ``optimizer``,
                ``step()`` and ``update()`` of it follow, else ``unscale_``, clipping and these are the caller's.

        Returns:
            The loss of the batch, a tensor of shape [] and of the loss's dtype, the same on every rank.

        Raises:
            RunError: an input requires grad, and the example did not, so that its gradient was not planned.
        """
        self._autopar_check_trains()
        with self._autopar_step(f"train_step {self._autopar_steps}"):
            scale = grad_scaler.scale_of(scaler, self._autopar_device)
            ready = ready_runs(self, args, kwargs, "to train on")
            if not self._autopar_told_of_statistics:
                microbatches = sum(each.run.microbatches for each in ready)
                self._autopar_told_of_statistics = tell_of_statistics(
                    [each.captured.graph for each in ready], microbatches
                )
            losses: list[torch.Tensor] = []
            seeds_of_runs = seeds_of(self, ready)
            for each, seeds in zip(ready, seeds_of_runs, strict=True):
                shares = each.weights
                each.batch.check_planned(each.callers)
                reached = each.reached(seeds)
                losses.append(
                    each.work.train(each.batches, shares, seeds, each.batch.shown, each.callers, reached, scale)
                )
            for each in ready:
                each.work.give()
            given = [pair for each in ready for pair in each.work.input_gradients.taken()]
            if given:
                torch.autograd.backward([x for x, _ in given], [grad for _, grad in given])
            self._autopar_steps += 1
            if scale is not None:
                grad_scaler.share_overflows(self.parameters(), self._autopar_device, self._autopar_work.everyone)
            if optimizer is not None:
                grad_scaler.step(optimizer, scaler)
        if optimizer is not None:
            optimizer.zero_grad()
        return sum(losses[1:], losses[0]).to(ready[0].loss_dtype)

    @contextlib.contextmanager
    def _autopar_step(self, where: str) -> Iterator[None]:
        """Around all that ranks do together in a step, or in forwards: what fails on one of them ends it on all."""
        self._autopar_check_world()
        self._autopar_failures.settle()
        with self._autopar_failures.during(where), without_inference_mode():
            self._autopar_groups.check(self._autopar_generation)
            yield

    # -- programs of eval mode and of other values

    @property
    def _autopar_evaluates(self) -> bool:
        """Whether the program that runs now has one of eval mode beside it."""
        return self._autopar_has_evaluation

    def _autopar_prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        for stage in self._autopar_stages.values():
            stage.prepare_evaluation(sides)
        self._autopar_has_evaluation = True
        self._autopar_drawing = self._autopar_drawing[0], drawing(evaluated(self._autopar_captured.graph, sides))

    def _autopar_kept_program(self) -> Fields:
        return pipeline_programs.fields_of(self)

    def _autopar_resume_program(self, fields: Fields) -> None:
        pipeline_programs.resume(self, fields)

    def _autopar_take_program(self, new: Captured, call: ModuleCall, replan: Any, all_well: AllWell) -> None:
        pipeline_programs.take(self, new, call.parts or self._autopar_plan.microbatches, replan, all_well)

    # -- without gradients

    @compiled_as_callers
    def evaluate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The mean loss of a batch without gradients, in the mode (:meth:`train`, ``eval()``) that is set.

        In training mode buffers that a forward changes are changed, as the model would.

        Args:
            args, kwargs: the batch, as for :meth:`train_step`.

        Returns:
            A tensor of shape [] and of the loss's dtype, the same on every rank.

        Raises:
            RunError: the model has no scalar loss, or the shapes are not those of whole microbatches.
        """
        with self._autopar_step("a forward without gradients"):
            ready = ready_runs(self, args, kwargs, "to evaluate")
            losses = [loss for loss, _ in forwards(self, ready)]
            return sum(losses[1:], losses[0]).to(ready[0].loss_dtype)

    @compiled_as_callers
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In eval mode, the model's output for a whole batch on every rank, without gradients: the mean loss, and of
        other tensors those of all microbatches one after the other (of scalars the mean).

        Raises:
            RunError: in training mode; it says what to call.
        """
        if self.training:
            raise RunError(
                "a pipelined model trains in whole steps: call train_step(*batch); for outputs call eval() first, for "
                "a loss without gradients evaluate(*batch)"
            )
        with self._autopar_step("a forward without gradients"):
            ready = ready_runs(self, args, kwargs)
            for each in ready:
                for name, x in each.callers.items():
                    if x.requires_grad and torch.is_grad_enabled():
                        raise RunError(
                            f"input {each.batch.shown[name]} requires grad, and outputs of a pipelined model have no "
                            "gradients: call it under torch.no_grad(), or detach() this input; train_step(*batch) "
                            "gives inputs their gradients"
                        )
            of_runs = [
                of_run(each, loss, parts) for each, (loss, parts) in zip(ready, forwards(self, ready), strict=True)
            ]
            of_all = of_batch(ready[0], of_runs, self._autopar_local_batch)
            spec = ready[0].captured.out_spec
            outputs = pytree.tree_unflatten(of_all[: spec.num_leaves], spec)
            return (
                outputs if self._autopar_buckets is None else self._autopar_buckets.cut(outputs, self._autopar_padding)
            )

    def record(self, on: bool = True) -> list[tuple[str, str, float, float]]:
        """Start to record what the next steps do on this rank (or stop): ``(action, kind, start, end)`` in seconds of
        ``time.perf_counter``. On an accelerator these are the times of the launches."""
        spans: list[Span] = []
        self._autopar_spans = spans if on else None
        return spans

    # -- of all stages

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of all stages so that their norm is at most ``max_norm``; returns the norm before.

        Every rank must call it. A parameter that several stages hold counts once.
        """
        if norm_type != 2.0:
            raise RunError(f"clip_grad_norm_: norm_type is {norm_type}; a pipeline knows 2")
        with self._autopar_step("clip_grad_norm_"):
            squared = squared_norm(self, {each.name: each.stages[0] for each in self._autopar_first_tied})
            dist.all_reduce(squared, group=self._autopar_work.everyone)
        return scaled(self.parameters(), squared.sqrt(), max_norm)

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by the model's names, on rank 0; empty elsewhere.

        Args:
            all_ranks: give it to every rank.
        """
        return full_state_dict(self, all_ranks=all_ranks)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True) -> None:
        """Load a state dict of the model on one device, as :func:`autopar.load_full_state_dict` does."""
        load_full_state_dict(self, state, strict=strict)

    def __repr__(self) -> str:
        s = self._autopar_plan.schedule
        here = list(self._autopar_stages)
        return f"PipelineModule({s.name}, {s.n_stages} stages, {s.n_microbatches} microbatches, here {here})"


__all__ = ["PipelineModule"]
