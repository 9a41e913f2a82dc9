"""The pipeline: every group of ranks holds its stages and does what the schedule says, action by action.

A stage is a :class:`~autopar.runtime.stages.stage.Stage` on the group's own mesh, so parameters, gathers and gradient
reductions are those of a plan without pipeline; what is in flight through it, and its messages, are
:mod:`autopar.runtime.pipelines.stage_in_flight`. This file is a step of all stages, and what
crosses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import cut
from autopar.runtime.batches.batch_statistics import tell_of_statistics
from autopar.runtime.batches.same_batch import Calls, first_readers
from autopar.runtime.optimizers import grad_scaler
from autopar.runtime.optimizers.closures import refuse_joint_steps
from autopar.runtime.parameters.state import as_dtensor, whole_of
from autopar.runtime.pipelines.asynchronous import AsynchronousSteps
from autopar.runtime.pipelines.pipeline_outputs import of_batch, of_run
from autopar.runtime.pipelines.pipeline_start import begun, check_fits, take_values, unread_in
from autopar.runtime.pipelines.rank_actions import Span, unfinished_of
from autopar.runtime.pipelines.schedule_check import check_buffers, check_rows
from autopar.runtime.ranks.agree import Meeting
from autopar.runtime.ranks.devices import device_of
from autopar.runtime.ranks.failures import Failures
from autopar.runtime.repairs.functions_of_all_parameters import flat_optimizer_states
from autopar.runtime.stages.registering import Placing
from autopar.runtime.stages.seeds import seeds_for
from autopar.torch_private import pytree
from autopar.words.trees import PyTree
from cost_models.schedules import ASYNCHRONOUS_KINDS


class PipelineRun(AsynchronousSteps):
    """A model in stages on several groups of ranks. Every rank holds the parameters of its own stages."""

    failures: Failures

    def __init__(
        self, model: torch.nn.Module, captured: Captured, plan: Plan, device_type: str = "cpu",
        values: Callable[[str], torch.Tensor] | None = None, alike: bool | None = None, meeting: Meeting | None = None,
        random: str = "sharded",
    ) -> None:  # fmt: skip
        """Initialize the object; every rank calls it with the same arguments.

        Args:
            model: with its values, or on the meta device with ``values``.
            captured: the capture of one microbatch.
            values: gives the whole value of a parameter or buffer by name; called on every rank for every name in the
                same order, so it may communicate.
            alike: whether this rank's generator of random numbers was seeded as rank 0's; by default all find out.
            random: who draws random numbers (:data:`~autopar.runtime.stages.seeds.MODES`).
            meeting: where ranks hear of one that fails here; whoever gives it closes it.

        Raises:
            PlanError: the plan is for another model. RunError: not as many ranks as devices in the plan.
        """
        super().__init__(model, captured, plan)
        check_fits(plan, captured)
        self.rank, self.world = dist.get_rank(), dist.group.WORLD
        self.steps = 0
        self.planned_microbatches = plan.microbatches
        self.parts = cut(captured.graph, plan.starts)
        check_rows(plan.schedule, self.parts)
        check_buffers(plan, {name for name, _ in model.named_buffers(remove_duplicate=False)})
        well = meeting.tell if meeting is not None else lambda: None
        well()
        here = begun(self.parts, plan, device_type)  # all groups, before ranks go different ways
        groups, mine, meshes = here.groups, here.mine, here.meshes
        self.groups, self.generation = groups, groups.generation
        if len({s.devices for s in plan.stages}) > 1:
            flat_optimizer_states()
        shared: dict[str, torch.nn.Parameter] = {}
        unread = unread_in(model, captured, self.parts)
        placings = {
            s: Placing(
                self.user, model, self.parts[s].graph, captured.constants, plan.stages[s], meshes[s], shared=shared,
                unread=unread if s == 0 else None,
            )
            for s in mine
        }  # fmt: skip
        take_values(model, here, values, placings.values())
        well()
        self.device = torch.device(device_of(meshes[mine[0]]))
        self.no_parameter = torch.nn.Parameter(torch.empty(0, device=self.device))
        readers = first_readers([captured.graph])
        self.compared = Calls(here.everyone, None, False, list(meshes.values()), readers)
        self.seeds = seeds_for(random, here.everyone, 0, self.device, alike)
        self.failures = Failures(range(dist.get_world_size()), groups.abort, stays_armed=self.device.type != "cpu")
        self.leads = self.rank == plan.stages[mine[0]].devices[0]
        self.lines, self.first_tied = (here.wires, here.tied), here.tied
        self.unfinished, self.spans = unfinished_of(groups), None
        self._place(placings)
        with self.user.restored_on_error():
            self.work = self.work_of(plan.microbatches)
        if len({s.devices for s in plan.stages}) > 1:
            refuse_joint_steps([*dict(self.named_parameters()).values(), self.no_parameter])

    def rebuilt(self, model: torch.nn.Module, values: Callable[[str], torch.Tensor]) -> PipelineRun:
        """Return a run like this one of a copy of the model, with given whole values by name; all ranks call it."""
        self.check_at_rest("copy.deepcopy()")
        seeds = self.seeds
        new = PipelineRun(
            model, self.captured, self.plan, self.device.type, values, alike=seeds.alike, random=seeds.mode
        )
        new.planned_microbatches, new.first_tied = self.planned_microbatches, self.first_tied
        return new

    @property
    def everyone(self) -> Any:
        """The group of all ranks, of autopar's own."""
        return self.groups.of(range(self.plan.n_devices))

    def ranks(self) -> tuple[Any, int]:
        """Return the process group of the ranks that hold a part, and the first of them."""
        return dist.group.WORLD, 0

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return the whole value of a buffer, that of the first stage that reads it; all ranks call it together."""
        node = self.captured.graph.nodes[self.captured.graph.index[name]]
        number = next(
            (p.number for p in self.parts if any(n.target == name for _, n in p.graph.of_kind("buffer"))), 0
        )  # fmt: skip
        stage, value = self.stages.get(number), self.captured.constants.get(name)
        if stage is not None and name in stage.buffers:
            held, state = stage.buffers[name]
            value = as_dtensor(held, state, node.out.shape, stage.device_mesh).full_tensor() if state.is_cut else held
        elif value is None:
            value = self.registered().get(name)
        if value is None:
            value = torch.empty(node.out.shape, dtype=getattr(torch, node.out.dtype))
        value = value.detach().to(self.device).contiguous().clone()
        dist.broadcast(value, self.plan.stages[number].devices[0], group=self.everyone)
        return value

    def tied_names(self) -> dict[str, str]:
        """Return the first names of tied parameters by the others."""
        return {alias: name for part in self.parts for alias, name in part.graph.tied.items()}

    # -- a step

    def train_step(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, optimizers: Sequence[torch.optim.Optimizer] = (),
        microbatches: int | None = None, scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a training step; arguments as of ``ParallelModule.train_step``."""
        if microbatches is not None:
            raise RunError(
                f"train_step: microbatches is {microbatches}, and a pipeline's schedule says how many a step has "
                f"({self.plan.microbatches}); leave it out, or parallelize with microbatches={microbatches}"
            )
        if self.plan.schedule.name in ASYNCHRONOUS_KINDS:
            return self.step_of_stream(args, kwargs, optimizers, scaler)
        self.check_trains()
        with self.all_in_step(f"train_step {self.steps}"):
            scale = grad_scaler.scale_of(scaler, self.device)
            ready = self.ready_runs(args, kwargs, "to train on")
            if not self.told_of_statistics:
                microbatches = sum(each.run.microbatches for each in ready)
                self.told_of_statistics = tell_of_statistics([each.captured.graph for each in ready], microbatches)
            losses: list[torch.Tensor] = []
            seeds_of_runs = self.seeds_of(ready)
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
            self.steps += 1
            if scale is not None:
                grad_scaler.share_overflows(self.parameters(), self.device, self.everyone)
            if optimizers:
                grad_scaler.step(optimizers, scaler)
        for optimizer in optimizers:
            optimizer.zero_grad()
        return sum(losses[1:], losses[0]).to(ready[0].loss_dtype)

    # -- without gradients

    def evaluate(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> torch.Tensor:
        """Return the mean loss of a batch without gradients."""
        self.check_at_rest("evaluate()")
        with self.all_in_step("a forward without gradients"):
            ready = self.ready_runs(args, kwargs, "to evaluate")
            losses = [loss for loss, _ in self.forwards(ready)]
            return sum(losses[1:], losses[0]).to(ready[0].loss_dtype)

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the outputs of a batch in eval mode, without gradients.

        Raises:
            RunError: in training mode; it says what to call.
        """
        if self.training:
            raise RunError(
                "a pipelined model trains in whole steps: call train_step(*batch); for outputs call eval() first, for "
                "a loss without gradients evaluate(*batch)"
            )
        self.check_at_rest("a call in eval mode")
        with self.all_in_step("a forward without gradients"):
            ready = self.ready_runs(args, kwargs)
            for each in ready:
                for name, x in each.callers.items():
                    if x.requires_grad and torch.is_grad_enabled():
                        raise RunError(
                            f"input {each.batch.shown[name]} requires grad, and outputs of a pipelined model have no "
                            "gradients: call it under torch.no_grad(), or detach() this input; train_step(*batch) "
                            "gives inputs their gradients"
                        )
            of_runs = [
                of_run(each, loss, parts) for each, (loss, parts) in zip(ready, self.forwards(ready), strict=True)
            ]
            of_all = of_batch(ready[0], of_runs, self.local_batch)
            spec = ready[0].captured.out_spec
            outputs = pytree.tree_unflatten(of_all[: spec.num_leaves], spec)
            return outputs if self.buckets is None else self.buckets.cut(outputs, self.padding)

    def record(self, on: bool = True) -> list[Span]:
        """Start to record what the next steps do on this rank, or stop."""
        spans: list[Span] = []
        self.spans = spans if on else None
        return spans

    # -- of all stages

    def full_state(self, all_ranks: bool) -> dict[str, torch.Tensor] | None:
        """Return the state dict of the model on one device: the first rank of each group gives what its stages hold."""
        mine: dict[str, torch.Tensor] = {}
        for name, value in self.in_state_dict().items():  # one whole tensor at a time
            whole = whole_of(value.detach())
            if self.leads:
                mine[name] = whole.cpu()
        gathered: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
        if all_ranks:
            dist.all_gather_object(gathered, mine)
        else:
            dist.gather_object(mine, gathered if dist.get_rank() == 0 else None)
        if not all_ranks and dist.get_rank() != 0:
            return None
        return {name: value for part in gathered for name, value in part.items()}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of all stages so that their norm is at most ``max_norm``; return the norm before."""
        if self.plan.schedule.name in ASYNCHRONOUS_KINDS:
            raise RunError(
                f"clip_grad_norm_: the norm is over all stages, and schedule '{self.plan.schedule.name}' updates each "
                "of them within train_step, when the gradients of others are not there: clip values in hooks of the "
                "parameters, or use schedule 1f1b"
            )
        if norm_type != 2.0:
            raise RunError(f"clip_grad_norm_: norm_type is {norm_type}; a pipeline knows 2")
        with self.all_in_step("clip_grad_norm_"):
            squared = self._squared_norm({each.name: each.stages[0] for each in self.first_tied})
            dist.all_reduce(squared, group=self.everyone)
        return self._scaled(squared.sqrt(), max_norm)

    def whole_values(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, whole, on this rank's device, where all ranks call it.

        Those that several stages hold under several names are one tensor as in the model.
        """
        state, same = self.full_state(all_ranks=True), dict[int, torch.Tensor]()
        assert state is not None
        named = [*self.user.params.items(), *self.user.buffers.items()]
        for name, tensor in named:
            if name in state and id(tensor) not in same:
                same[id(tensor)] = state[name].to(self.device)
        return {name: same[id(tensor)] for name, tensor in named if id(tensor) in same}

    def _squared_norm(self, first: Mapping[str, int]) -> torch.Tensor:
        """Compute the squared norm of the gradients of this rank's stages, float64 [].

        What several ranks hold is counted on one of them.

        Args:
            first: for each parameter that several groups of ranks hold, the stage whose ranks count it.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        counted: dict[torch.nn.Parameter, bool] = {}
        for name, param in self.named_parameters(remove_duplicate=False):
            counted.setdefault(param, bool(self.leads))
            if name in first:  # whichever of its names that is
                counted[param] = self.rank == self.plan.stages[first[name]].devices[0]
        for param, counts in counted.items():
            if param.grad is not None:
                norm = param.grad.norm()
                whole = whole_of(norm)
                total += whole.double() ** 2 if counts else 0.0
        return total

    def _scaled(self, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        """Scale all gradients to have at most ``max_norm``, and return ``norm``, theirs before."""
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        there = {scale.device: scale}  # and on the host, for gradients of what is stored there
        for param in {id(p): p for p in self.parameters()}.values():
            if param.grad is not None:
                device = param.grad.device
                there[device] = there[device] if device in there else scale.to(device)
                param.grad.mul_(there[device].to(param.grad.dtype))
        return norm
