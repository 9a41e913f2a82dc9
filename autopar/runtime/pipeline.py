"""The pipeline: every group of ranks holds its stages and does what the schedule says, action by action.

A stage is a :class:`~autopar.runtime.executor.ParallelModule` on the group's own mesh, so parameters, gathers and
gradient reductions are those of a plan without pipeline; this file adds microbatches, messages between stages, and what
crosses all of them: the loss, tied parameters, the norm of all gradients.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton
from autopar.errors import AutoparError, PlanError, RunError
from autopar.graph import Ref, Spec
from autopar.pipeline import PipelinePlan
from autopar.placements import State, format_state
from autopar.rules.registry import rules_of
from autopar.runtime.agree import Meeting
from autopar.runtime.backward import Halves
from autopar.runtime.batch import NOT_PLANNED
from autopar.runtime.calls import flatten_call, same_literal
from autopar.runtime.checkpoint import load_full_state_dict
from autopar.runtime.executor import ParallelModule, device_of, mixed_seed
from autopar.runtime.failures import Failures
from autopar.runtime.input_gradients import InputGradients
from autopar.runtime.programs import (
    AllWell,
    Fields,
    PlanAgain,
    differs,
    fields_of,
    resume,
    skeleton_of,
    with_other_literals,
)
from autopar.runtime.rows import check_rows
from autopar.runtime.same_batch import Seen, compare, is_checked
from autopar.runtime.spread import EXTRA, Part, SpreadModule, check_mode
from autopar.runtime.stagewise import flat_optimizer_states, refuse_norms_on
from autopar.runtime.state import Held, as_dtensor, hops
from autopar.runtime.values import check_values
from autopar.runtime.wires import Post, Wire, clear
from autopar.staging import StageGraph, cut
from autopar.transfer import Side, transfer
from cost_models.pipeline import forward_only
from cost_models.pipeline.actions import KINDS, Action

_PROGRAM = ("_captured", "_graphs", "_plan", "_skeleton", "_evaluates")
"""What is another with other values, beside the programs of the stages."""
_Shown = tuple[dict[str, Any], dict[str, Any], str]
_Made = tuple[torch.Tensor | None, tuple[Any, ...]]
_Batches = tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]


class _Stage:
    """One stage on this rank: its module, and the microbatches in flight."""

    def __init__(self, module: ParallelModule, graph: StageGraph, row: Sequence[Action]) -> None:
        self.module, self.graph = module, graph
        self.halves = Halves()
        self.begun = False  # parameters gathered since the last optimizer step are those of today
        gradient_kinds = [a for a in row if a.stage == graph.number and a.kind in "BW"]
        self.first = gradient_kinds[0] if gradient_kinds else None
        self.last = gradient_kinds[-1] if gradient_kinds else None
        self.arrived: dict[int, dict[str, torch.Tensor]] = {}
        self.made: dict[int, tuple[list[torch.Tensor], list[torch.Tensor | None]]] = {}
        self.whole = bool(module.plan.recompute)  # a split backward would run segments again in both halves

    @property
    def mesh(self) -> DeviceMesh:
        return self.module.device_mesh


class PipelineModule(SpreadModule):
    """A model in stages on several groups of ranks. Every rank holds the parameters of its own stages.

    Names of parameters are those of the model. ``train_step(*batch)`` takes the whole batch, which is as many
    microbatches as the plan says, on every rank; it returns the mean of the microbatches' losses on every rank and
    leaves gradients in ``param.grad``.
    """

    _plan: PipelinePlan
    _captured: Captured
    _rank: int
    _graphs: tuple[StageGraph, ...]
    _wires: tuple[Wire, ...]
    _seed: int
    _steps: int
    _random: bool
    _row: tuple[Action, ...]
    _spans: list[tuple[str, str, float, float]] | None
    _stages: dict[int, _Stage]
    _shown: list[_Shown]
    _none: torch.nn.Parameter
    _device: torch.device
    _post: Post
    _forward_post: Post
    _tied: dict[str, tuple[int, ...]]
    _tie_wires: tuple[Wire, ...]
    _tie_post: Post
    _signature: inspect.Signature
    _captured_training: bool
    _skeleton: Skeleton | None
    _evaluates: bool
    _broken: bool
    _compared: int
    _input_gradients: InputGradients
    _failures: Failures

    def __init__(
        self, model: torch.nn.Module, captured: Captured, plan: PipelinePlan, device_type: str = "cpu",
        values: Callable[[str], torch.Tensor] | None = None, seed: int | None = None, meeting: Meeting | None = None,
    ) -> None:  # fmt: skip
        """Every rank calls this with the same arguments.

        Args:
            model: with its values, or on the meta device with ``values``.
            captured: of one microbatch.
            values: gives the whole value of a parameter or buffer by name; called on every rank for every name in the
                same order, so it may communicate.
            seed: of random ops, the same on all ranks; by default rank 0's ``torch.initial_seed()``.
            meeting: where ranks hear of one that fails here; whoever gives it closes it.

        Raises:
            PlanError: the plan is for another model. RunError: not as many ranks as devices in the plan.
        """
        super().__init__()
        plan.validate()
        if plan.fingerprint != captured.graph.fingerprint:
            raise PlanError(
                f"the plan was made for a model with fingerprint {plan.fingerprint}, this one has "
                f"{captured.graph.fingerprint}: shapes, operators or names differ; plan this model again"
            )
        if plan.n_devices != dist.get_world_size():
            raise RunError(f"the plan is for {plan.n_devices} ranks, {dist.get_world_size()} are running")
        put = object.__setattr__
        put(self, "_plan", plan)
        put(self, "_captured", captured)
        put(self, "_rank", dist.get_rank())
        put(self, "_signature", inspect.signature(model.forward))
        put(self, "_mode", model.training)
        put(self, "_captured_training", model.training)
        put(self, "_skeleton", Skeleton(model) if model.training else None)
        put(self, "_evaluates", False)
        put(self, "_broken", False)
        put(self, "_compared", 0)
        graphs = cut(captured.graph, plan.starts)
        check_rows(plan.schedule, graphs)
        well = meeting.tell if meeting is not None else lambda: None
        well()
        meshes = [
            DeviceMesh(
                device_type, torch.tensor(s.devices).reshape([n for _, n in s.mesh]),
                mesh_dim_names=tuple(name for name, _ in s.mesh),
            )
            for s in plan.stages
        ]  # fmt: skip
        if len({s.devices for s in plan.stages}) > 1:
            for mesh in meshes:
                refuse_norms_on(mesh)
            flat_optimizer_states(PipelineModule)
        put(self, "_graphs", graphs)
        put(self, "_wires", _wires(graphs, plan))
        mine = [s for s, stage in enumerate(plan.stages) if self._rank in stage.devices]
        needed = {n.target for s in mine for n in graphs[s].graph.nodes if n.kind in ("param", "buffer")}
        given = _values(model, needed, values)
        put(self, "_seed", _agreed(torch.initial_seed() % (1 << 62)) if seed is None else seed)
        well()
        for s in mine:  # groups of several axes are made together; nothing after this waits for other ranks
            shapes = {node.target: node.out.shape for _, node in graphs[s].graph.of_kind("param")}
            for name, choice in plan.stages[s].params.items():
                hops(name, choice, shapes[name], meshes[s], plan.stages[s].mesh)
        put(self, "_steps", 0)
        put(self, "_random", any(rule is not None and rule.random for rule in rules_of(captured.graph)))
        put(self, "_spans", None)
        group = plan.schedule.rank_of_stage[mine[0]]
        row = plan.schedule.flat_rows[group]
        put(self, "_row", row)
        held: dict[str, torch.nn.Parameter] = {}
        stages: dict[int, _Stage] = {}
        shown: list[_Shown] = []
        for s in mine:
            module = ParallelModule(
                model, _captured(captured, graphs[s]), plan.stages[s], meshes[s], given.__getitem__,
                seed=self._seed, shared=held,
            )  # fmt: skip
            stages[s] = _Stage(module, graphs[s], row)
            shown.extend(_adopt(self, module))
        put(self, "_stages", stages)
        put(self, "_shown", shown)
        put(self, "_none", torch.nn.Parameter(torch.empty(0, device=device_of(meshes[mine[0]]))))
        self._set_mode_of(model)
        rows = {d: plan.schedule.flat_rows[plan.schedule.rank_of_stage[s]] for s, stage in enumerate(plan.stages)
                for d in stage.devices}  # fmt: skip
        device = torch.device(device_of(meshes[mine[0]]))
        put(self, "_device", device)
        put(self, "_failures", Failures(range(dist.get_world_size())))
        put(self, "_input_gradients", InputGradients(captured.graph, plan.microbatches, device))
        put(self, "_post", Post.of(self._rank, device, self._wires, rows, plan.microbatches))
        alone = forward_only(len(graphs), plan.microbatches, plan.schedule.stages_of_rank)
        forwards = {
            d: alone.flat_rows[plan.schedule.rank_of_stage[s]] for s, stage in enumerate(plan.stages)
            for d in stage.devices
        }  # fmt: skip
        put(self, "_forward_post", Post.of(self._rank, device, self._wires, forwards, plan.microbatches))
        tied, tie_wires = _ties(graphs, plan)
        put(self, "_tied", tied)
        put(self, "_tie_wires", tie_wires)
        give = {d: tuple(Action(s, "F", 0) for s, stage in enumerate(plan.stages) if d in stage.devices) for d in rows}
        put(self, "_tie_post", Post.of(self._rank, device, tie_wires, give, 1))

    @property
    def plan(self) -> PipelinePlan:
        """The plan that this module runs."""
        return self._plan

    def _position(self) -> tuple[int, int]:
        return self._seed, self._steps * self._plan.microbatches

    def _set_position(self, seed: int, calls: int) -> None:
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_steps", -(-calls // self._plan.microbatches))

    def _draws(self) -> bool:
        return self._random

    def _ranks(self) -> tuple[Any, int]:
        return dist.group.WORLD, 0

    def _follow(self) -> None:
        """Have the stages read the parameters and buffers that are registered here."""
        for there, here, key in self._shown:
            if here[key] is not there[key]:
                here[key] = there[key]

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Those of this rank's stages; if they have none, one without elements and without a name, because optimizers
        refuse an empty list."""
        found = list(super().parameters(recurse))
        yield from found or [self._none]

    # -- a step

    def train_step(self, *args: Any, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> torch.Tensor:
        """One training step on a batch of ``plan.microbatches`` microbatches; returns the mean of their losses.

        Inputs whose first dim is that many times the captured one are cut there; those of the captured shape go into
        every microbatch.

        Inputs that require grad (in the example inputs of ``parallelize``, too) get their gradients in this call, since
        it runs the backward: a leaf in ``x.grad``, on every rank and whole; of any other tensor the parameters that it
        was made with, such as those of a layer in front. Its graph is freed, as after ``loss.backward()``.

        Args:
            optimizer: if given, ``step()`` and ``zero_grad()`` follow.

        Raises:
            RunError: an input requires grad, and the example did not, so that its gradient was not planned.
        """
        if self._captured.graph.loss is None:
            raise RunError("the model has no scalar loss to train on; give loss_fn= and targets= when planning")
        self.check_trains()
        callers, batches = self._microbatches(args, kwargs)
        _check_planned(self._captured, callers)
        self._follow()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._failures.settle()
        with self._failures.during(f"train_step {self._steps}"):
            self._begin()
            self._input_gradients.begin(callers)
            for stage in self._stages.values():
                stage.module.gradients.forget()
            self._post.begin()
            spans = self._spans
            for action in self._row:
                stage = self._stages[action.stage]
                began = time.perf_counter() if spans is not None else 0.0
                with spmd.set_current_mesh(stage.mesh):
                    if action.kind == "F":
                        loss, _ = self._forward(stage, action.microbatch, batches[action.microbatch])
                        if loss is not None and self._rank == self._plan.stages[action.stage].devices[0]:
                            total += loss.detach().double() / self._plan.microbatches
                    elif action.kind == "W":
                        self._weights(stage, action)
                    else:
                        self._backward(stage, action)
                if spans is not None:
                    spans.append((str(action), KINDS[action.kind], began, time.perf_counter()))
            self._post.end()
            self._tie()
            dist.all_reduce(total)
            object.__setattr__(self, "_broken", False)
            for stage in self._stages.values():
                stage.module.gradients.give()
        self._input_gradients.give()
        object.__setattr__(self, "_steps", self._steps + 1)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return total.to(getattr(torch, self._captured.graph.spec(self._loss).dtype))

    def _begin(self) -> None:
        """A step begins: nothing is left of an earlier one, also if that was broken off by an exception on all ranks.

        Then messages are under way that nobody takes, and receives are posted that nobody answers. The ranks tell each
        other how far they came; what was sent is received, and what is waited for is sent.
        """
        if self._broken:
            clear([self._post, self._forward_post, self._tie_post])
            for stage in self._stages.values():
                stage.module.gradients.drop()
                stage.halves.waiting.clear()
                stage.arrived.clear()
                stage.made.clear()
        for stage in self._stages.values():
            stage.begun = False
        object.__setattr__(self, "_broken", True)

    def _change_mode(self, mode: bool) -> None:
        sides = check_mode(mode, self._captured_training, self._skeleton, self._captured, self._evaluates)
        if not mode and self._captured_training and not self._evaluates:
            for stage in self._stages.values():
                stage.module.prepare_evaluation(sides)
            object.__setattr__(self, "_evaluates", True)

    def _kept_program(self) -> Fields:
        stages = {s: (stage.graph, fields_of(stage.module)) for s, stage in self._stages.items()}
        return {"_stages": stages, **{name: self.__dict__[name] for name in _PROGRAM}}

    def _resume_program(self, fields: Fields) -> None:
        self.__dict__.update({name: fields[name] for name in _PROGRAM})
        for s, (graph, own) in fields["_stages"].items():
            self._stages[s].graph = graph
            resume(self._stages[s].module, own)

    def _take_program(self, new: Captured, plan_again: PlanAgain | None, all_well: AllWell) -> None:
        """Have the stages run ``new``, which differs in nothing but literals."""
        reason = differs(self._captured, new)
        error: BaseException | None = None
        if reason:
            error = RunError(
                f"with the values that it has now the model is another one ({reason}), and the stages of a pipeline "
                "can only have other numbers; parallelize it again, and load this full_state_dict()"
            )
        all_well(error)
        try:
            cuts = cut(new.graph, self._plan.starts)  # crossings stay those that the wires know
            graphs = tuple(replace(g, graph=other.graph) for g, other in zip(self._graphs, cuts, strict=True))
            plan = self._plan.of_graphs(new.graph.fingerprint, [g.graph.fingerprint for g in graphs])
            for s, stage in self._stages.items():
                stage.graph = graphs[s]
                with_other_literals(stage.module, _captured(new, graphs[s]))
            self.__dict__.update(
                _captured=new, _graphs=graphs, _plan=plan, _skeleton=skeleton_of(self), _evaluates=False
            )
        except Exception as e:
            error = e
        all_well(error)

    def evaluate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The mean loss of a batch without gradients, in the mode (:meth:`train`, ``eval()``) that is set.

        In training mode buffers that a forward changes are changed, as the model would.
        """
        return self._forwards(self._microbatches(args, kwargs)[1], None)

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
        made: dict[int, list[torch.Tensor]] = {}
        callers, batches = self._microbatches(args, kwargs)
        for name, x in callers.items():
            if x.requires_grad and torch.is_grad_enabled():
                raise RunError(
                    f"input {name} requires grad, and outputs of a pipelined model have no gradients: call it under "
                    "torch.no_grad(), or detach() this input; train_step(*batch) gives inputs their gradients"
                )
        loss = self._forwards(batches, made)
        graph = self._captured.graph
        outputs: list[Any] = []
        for position, out in enumerate(graph.outputs):
            if position == graph.loss or not isinstance(out, Ref):
                outputs.append(loss if position == graph.loss else out)
            else:
                outputs.append(self._everywhere(position, graph.spec(out), made.get(position)))
        return pytree.tree_unflatten(outputs, self._captured.out_spec)

    def _everywhere(self, position: int, spec: Spec, parts: list[torch.Tensor] | None) -> torch.Tensor:
        """An output of the model, on every rank; ``parts`` are those of the microbatches, where it is made."""
        k = self._plan.microbatches
        shape = (k * spec.shape[0], *spec.shape[1:]) if spec.shape else ()
        value = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self._device)
        if parts is not None:
            value.copy_(torch.cat(parts) if spec.shape else torch.stack(parts).to(torch.float64).mean())
        maker = next(g.number for g in self._graphs if position in g.outputs)
        dist.broadcast(value, src=self._plan.stages[maker].devices[0])
        return value

    @torch.no_grad()
    def _forwards(
        self, batches: list[dict[str, torch.Tensor]], made: dict[int, list[torch.Tensor]] | None
    ) -> torch.Tensor:
        """The mean loss; into ``made`` go whole outputs of this rank's stages by position, if they are other ones."""
        if self._captured.graph.loss is None:
            raise RunError("the model has no scalar loss; give loss_fn= and targets= when planning")
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._follow()
        schedule = forward_only(len(self._graphs), self._plan.microbatches, self._plan.schedule.stages_of_rank)
        group = schedule.rank_of_stage[next(iter(self._stages))]
        self._failures.settle()
        self._begin()
        main, self_post = self._post, self._forward_post
        object.__setattr__(self, "_post", self_post)
        try:
            self_post.begin()
            for action in schedule.flat_rows[group]:
                stage = self._stages[action.stage]
                with spmd.set_current_mesh(stage.mesh):
                    loss, flat = self._forward(stage, action.microbatch, batches[action.microbatch])
                    if loss is not None and self._rank == self._plan.stages[action.stage].devices[0]:
                        total += loss.double() / self._plan.microbatches
                if made is not None:
                    for position, whole in self._other_outputs(stage, flat):
                        made.setdefault(position, []).append(whole)
                stage.arrived.clear()
                stage.made.clear()
            self_post.end()
        finally:
            object.__setattr__(self, "_post", main)
        dist.all_reduce(total)
        object.__setattr__(self, "_broken", False)
        if self.training:
            object.__setattr__(self, "_steps", self._steps + 1)
        return total.to(getattr(torch, self._captured.graph.spec(self._loss).dtype))

    def _other_outputs(self, stage: _Stage, flat: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """The model's outputs beside the loss that a stage makes, whole, by position."""
        graph, states = stage.graph, stage.module.program.outputs
        for k, position in enumerate(graph.outputs, len(graph.gives)):
            state, out = states[k], graph.graph.outputs[k]
            if position != self._captured.graph.loss and state is not None and isinstance(out, Ref):
                yield position, as_dtensor(flat[k], state, graph.graph.spec(out).shape, stage.mesh).full_tensor()

    def record(self, on: bool = True) -> list[tuple[str, str, float, float]]:
        """Start to record what the next steps do on this rank (or stop): ``(action, kind, start, end)`` in seconds of
        ``time.perf_counter``. On an accelerator these are the times of the launches."""
        spans: list[tuple[str, str, float, float]] = []
        object.__setattr__(self, "_spans", spans if on else None)
        return spans

    @property
    def _loss(self) -> Any:
        loss = self._captured.graph.loss
        assert loss is not None
        return self._captured.graph.outputs[loss]

    def _forward(self, stage: _Stage, microbatch: int, batch: Mapping[str, torch.Tensor]) -> _Made:
        """The loss, if the stage makes it, and all that the stage makes."""
        graph = stage.graph
        inputs = {}
        for wire in self._wires:
            if wire.target == graph.number:
                value = self._post.take(wire, False, microbatch)
                inputs[wire.name] = value.detach().requires_grad_(wire.back is not None)
        arrived = dict(inputs)
        for name in graph.inputs:
            inputs[name] = stage.module.local_input(name, batch[name].detach())
            if name in self._input_gradients and torch.is_grad_enabled():
                arrived[name] = inputs[name] = inputs[name].detach().requires_grad_()
        number = self._steps * self._plan.microbatches + microbatch
        flat = stage.module.run_local(
            inputs, mixed_seed(self._seed, number), same_step=stage.begun, evaluating=not self.training
        )
        stage.begun = True
        outputs = list(flat[: len(graph.gives)])
        loss = None if graph.graph.loss is None else flat[graph.graph.loss]
        for wire in self._wires:
            if wire.source == graph.number:
                assert wire.crossing is not None
                self._post.send(wire, False, microbatch, outputs[wire.crossing.output])
        stage.arrived[microbatch] = arrived
        stage.made[microbatch] = outputs, [loss]
        return loss, flat

    def _roots(self, stage: _Stage, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs with gradients, and these."""
        outputs, (loss,) = stage.made.pop(microbatch)
        roots: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for crossing, out in zip(stage.graph.gives, outputs, strict=True):
            total: torch.Tensor | None = None
            for wire in self._wires:
                if wire.crossing == crossing and wire.back is not None:
                    grad = self._post.take(wire, True, microbatch)
                    total = grad if total is None else total + grad
            if total is not None and out.requires_grad:
                roots.append(out)
                grads.append(total)
        if loss is not None:
            roots.append(loss)
            grads.append(torch.full_like(loss, 1 / self._plan.microbatches))
        return roots, grads

    def _backward(self, stage: _Stage, action: Action) -> None:
        roots, grads = self._roots(stage, action.microbatch)
        arrived = stage.arrived.pop(action.microbatch)
        wanted = [x for x in arrived.values() if x.requires_grad]
        if action.kind == "B" or stage.whole:
            with stage.module.gradients.reducing(last=action == stage.last):
                torch.autograd.backward(roots, grads)
        else:
            stage.halves.inputs(action.microbatch, roots, grads, wanted, stage.module.leaves())
            stage.module.free_gathered()
        for wire in self._wires:
            if wire.target == stage.graph.number and wire.back is not None:
                x = arrived[wire.name]
                self._post.send(wire, True, action.microbatch, torch.zeros_like(x) if x.grad is None else x.grad)
        for name in stage.graph.inputs:
            if name in arrived and (grad := arrived[name].grad) is not None:
                whole = stage.module.joined_gradient(name, grad)
                if self._rank == self._plan.stages[action.stage].devices[0]:
                    self._input_gradients.add(name, action.microbatch, whole)

    def _weights(self, stage: _Stage, action: Action) -> None:
        with stage.module.gradients.reducing(last=action == stage.last, by_hand=True):
            if not stage.whole:
                stage.halves.weights(action.microbatch, stage.module.leaves())

    # -- what crosses stages

    @torch.no_grad()
    def _tie(self) -> None:
        """Sum the gradients of parameters that several groups hold, in the same order everywhere."""
        post = self._tie_post
        first: dict[int, Held] = {}
        for _, stage in sorted(self._stages.items()):  # stages of this rank share a parameter: its gradient is one
            for held in stage.module.helds.values():
                other = first.setdefault(id(held.param), held)
                if other is not held and (grad := held.taken()) is not None:
                    other.add(grad)
        if not self._tied:
            return
        post.begin()
        own: dict[tuple[str, int], torch.Tensor] = {}
        for s, stage in sorted(self._stages.items()):
            for wire in self._tie_wires:
                if wire.source == s:
                    key = wire.name, s
                    if key not in own:
                        held = stage.module.helds[wire.name]
                        grad = held.taken()
                        assert held.local is not None
                        own[key] = torch.zeros_like(held.local) if grad is None else grad
                    post.send(wire, False, 0, own[key])
        for name, s in own:
            total: torch.Tensor | None = None
            with spmd.set_current_mesh(self._stages[s].mesh):
                for a in self._tied[name]:
                    if a == s:
                        part = own[name, s]
                    else:
                        wire = next(w for w in self._tie_wires if (w.name, w.source, w.target) == (name, a, s))
                        part = post.take(wire, False, 0)
                    total = part if total is None else total + part
            assert total is not None
            self._stages[s].module.helds[name].add(total)
        post.end()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of all stages so that their norm is at most ``max_norm``; returns the norm before.

        Every rank must call it. A parameter that several stages hold counts once.
        """
        if norm_type != 2.0:
            raise RunError(f"clip_grad_norm_: norm_type is {norm_type}; a pipeline knows 2")
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        seen: set[int] = set()
        for number, stage in self._stages.items():
            for name, param in stage.module.named_parameters():
                if param.grad is None or id(param) in seen:
                    continue
                seen.add(id(param))
                first = self._tied[name][0] if name in self._tied else number
                norm = param.grad.norm()
                whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
                if self._rank == self._plan.stages[first].devices[0]:
                    total += whole.double() ** 2
        dist.all_reduce(total)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for param in {id(p): p for p in self.parameters()}.values():
            if param.grad is not None:
                param.grad.mul_(scale.to(param.grad.dtype))
        return norm

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by the model's names, on rank 0; empty elsewhere.

        Args:
            all_ranks: give it to every rank.
        """
        self._follow()
        own: dict[str, torch.Tensor] = {}
        for number, stage in self._stages.items():
            for name, value in stage.module.state_dict().items():
                if name == EXTRA:
                    continue
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if self._rank == self._plan.stages[number].devices[0]:
                    own[name] = whole.detach().cpu()
        gathered: list[Any] = [None] * dist.get_world_size()
        if all_ranks:
            dist.all_gather_object(gathered, own)
        else:
            dist.gather_object(own, gathered if self._rank == 0 else None, dst=0)
        found: dict[str, torch.Tensor] = {}
        if self._rank == 0 or all_ranks:
            for part in gathered:
                found.update(part)
        return found

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True) -> None:
        """Load a state dict of the model on one device, as :func:`autopar.load_full_state_dict` does."""
        load_full_state_dict(self, state, strict=strict)

    def _microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Batches:
        """The whole inputs by name, and those of every microbatch; now and then the ranks compare what they were
        called with."""
        object.__setattr__(self, "_compared", self._compared + 1)
        if self._programs is not None:
            check_values(self)
        if not is_checked(self._compared):
            return self._pieces(args, kwargs, Seen())
        seen, error, found = Seen(), None, None
        try:
            found = self._pieces(args, kwargs, seen)
        except AutoparError as e:
            error = e
        compare(dist.group.WORLD, seen, error)
        assert found is not None
        return found

    def _pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen) -> _Batches:
        captured, k = self._captured, self._plan.microbatches
        if self._programs is None:
            check_values(self)
        leaves = flatten_call(captured, self._signature, args, kwargs)
        callers: dict[str, torch.Tensor] = {}
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(k)]
        for i, (leaf, number) in enumerate(zip(leaves, captured.inputs, strict=True)):
            if number is None:
                if i in captured.literals and not same_literal(captured.literals[i], leaf):
                    raise RunError(
                        f"an input was captured with {captured.literals[i]!r} and called with {leaf!r}; such values "
                        "are part of the program; parallelize again with the new value"
                    )
                continue
            node = captured.graph.nodes[number]
            want = node.out.shape
            if not isinstance(leaf, torch.Tensor):
                raise RunError(f"input {node.target}: captured as a tensor, called with {type(leaf).__name__}")
            have = tuple(leaf.shape)
            if is_checked(self._compared):
                seen.add(node.target, node.target, leaf)
            if have == want:
                pieces = [leaf] * k
            elif want and have[1:] == want[1:] and have[0] == k * want[0]:
                pieces = list(leaf.split(want[0]))
            else:
                raise RunError(
                    f"input {node.target}: captured with shape {want} a microbatch, called with {have}; give {k} x "
                    f"{want[0] if want else 1} rows, or one tensor of the captured shape for all microbatches"
                )
            callers[node.target] = leaf
            for batch, piece in zip(found, pieces, strict=True):
                batch[node.target] = piece
        return callers, found

    def __repr__(self) -> str:
        s = self._plan.schedule
        return (
            f"PipelineModule({s.name}, {s.n_stages} stages, {s.n_microbatches} microbatches, here {list(self._stages)})"
        )


# --- construction ----------------------------------------------------------------------------------------------------


def _captured(captured: Captured, stage: StageGraph) -> Captured:
    """A stage as something captured: flat inputs, flat outputs."""
    numbers = [i for i, _ in stage.graph.of_kind("input")]
    in_spec = pytree.tree_structure((tuple(range(len(numbers))), {}))
    out_spec = pytree.tree_structure(tuple(range(len(stage.graph.outputs))))
    return replace(captured, graph=stage.graph, in_spec=in_spec, literals={}, inputs=tuple(numbers), out_spec=out_spec)


def _wires(graphs: Sequence[StageGraph], plan: PipelinePlan) -> tuple[Wire, ...]:
    wires: list[Wire] = []
    for graph in graphs:
        for crossing in graph.takes:
            here, there = crossing.sides(plan.stages, graph.number)
            _sendable(crossing.tensor, crossing.source, here.state)
            forward = transfer(crossing.spec, here, there)
            back = transfer(crossing.spec, there, here) if crossing.needs_grad else None
            number = len(wires)
            wires.append(Wire(number, crossing.tensor, crossing.source, graph.number, forward, back, crossing))
    return tuple(wires)


def _sendable(name: str, stage: int, state: State) -> None:
    if any(p == "P" for p in state):
        shown = format_state(state)
        raise PlanError(f"stage {stage} gives '{name}' as {shown}: a pending sum cannot be sent; plan again")


def _values(
    model: torch.nn.Module, needed: set[str], values: Callable[[str], torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Whole values of what this rank holds; rank 0's, so that ranks that were seeded differently agree."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    found = {}
    for name, tensor in named.items():
        if values is not None:
            value = values(name)
        else:
            value = tensor.detach().clone().contiguous()
            dist.broadcast(value, src=0)
        if name in needed:
            found[name] = value
    return found


def _check_planned(captured: Captured, callers: Mapping[str, torch.Tensor]) -> None:
    """Refuse an input whose gradient is wanted and was not planned.

    Raises:
        RunError: with the input's name.
    """
    for _, node in captured.graph.of_kind("input"):
        if node.target in callers and callers[node.target].requires_grad and not node.needs_grad:
            raise RunError(NOT_PLANNED.format(name=node.target))


def _agreed(seed: int) -> int:
    box = [seed]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _adopt(whole: torch.nn.Module, stage: torch.nn.Module) -> list[_Shown]:
    """Let the pipeline show a stage's parameters and buffers under the model's names.

    Returns:
        Where each is shown and where the stage has it: someone may put another one where it is shown.
    """
    shown: list[_Shown] = []
    for path, module in stage.named_modules():
        owner = whole
        for part in path.split(".") if path else []:
            if part not in owner._modules:
                owner._modules[part] = Part()
            child = owner._modules[part]
            assert child is not None
            owner = child
        owner._parameters.update(module._parameters)
        owner._buffers.update(module._buffers)
        owner._non_persistent_buffers_set |= module._non_persistent_buffers_set
        shown.extend((owner._parameters, module._parameters, key) for key in module._parameters)
        shown.extend((owner._buffers, module._buffers, key) for key in module._buffers)
    return shown


def _ties(graphs: Sequence[StageGraph], plan: PipelinePlan) -> tuple[dict[str, tuple[int, ...]], tuple[Wire, ...]]:
    """Parameters that several groups hold, each with one stage a group, and the wires between their gradients.

    Stages of one group share the parameter itself.
    """
    holders: dict[str, dict[int, int]] = {}
    specs: dict[str, Spec] = {}
    for graph in graphs:
        for _, node in graph.graph.of_kind("param"):
            if node.needs_grad:
                group = plan.schedule.rank_of_stage[graph.number]
                holders.setdefault(node.target, {}).setdefault(group, graph.number)
                specs[node.target] = node.out
    tied = {name: tuple(sorted(own.values())) for name, own in sorted(holders.items()) if len(own) > 1}
    wires: list[Wire] = []
    for name, stages in tied.items():
        sides = {
            s: Side(plan.stages[s].params[name].stored, plan.stages[s].mesh, plan.stages[s].devices)
            for s in stages
        }
        for a in stages:
            for b in stages:
                if a != b:
                    wires.append(Wire(len(wires), name, a, b, transfer(specs[name], sides[a], sides[b]), None))
    return tied, tuple(wires)


__all__ = ["PipelineModule"]
