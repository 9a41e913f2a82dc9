"""The executor: a program with its parameters, called like the model.

``pm(*batch)`` takes the whole batch on every rank and returns the model's own output structure; ``loss.backward()``
leaves reduced gradients in ``param.grad``, placed as the parameters are; any ``torch.optim`` optimizer updates the
stored parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture import Captured
from autopar.capture.evaluation import Skeleton, evaluated
from autopar.errors import AutoparError, MeshError, RunError
from autopar.lower.emit import Program, lower
from autopar.lower.segments import on_mesh
from autopar.placements import Mesh, State, format_state, in_pieces, is_cut, mesh_text, whole_state
from autopar.plan import Plan
from autopar.runtime import prefetch
from autopar.runtime.agree import mesh_group
from autopar.runtime.batch import Batch
from autopar.runtime.crossing import crossed
from autopar.runtime.direct import stand_ins
from autopar.runtime.failures import Failures
from autopar.runtime.gradients import Gradients
from autopar.runtime.outputs import IN_PIECES, Meeting, unread, with_pending
from autopar.runtime.programs import AllWell, Fields, PlanAgain, compiled, fields_of, resume, take
from autopar.runtime.renewed import outliving
from autopar.runtime.same_batch import Seen, compare, is_checked
from autopar.runtime.spread import Part, SpreadModule, check_mode
from autopar.runtime.state import (
    Followed,
    Held,
    Unit,
    as_dtensor,
    joined,
    local_piece,
    make_units,
    torch_placements,
)
from autopar.runtime.values import check_values

warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")  # it calls torch 2.12's names
_GOLDEN = 0x9E3779B97F4A7C15


def check_device_mesh(device_mesh: DeviceMesh, mesh: Mesh) -> None:
    """The plan's mesh and the device mesh must have the same axes.

    Raises:
        MeshError: names or sizes differ.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError("the DeviceMesh has no axis names; make it with mesh_dim_names=('data', ...)")
    have = tuple((name, device_mesh.size(i)) for i, name in enumerate(names))
    if have != mesh:
        show = [mesh_text(m) for m in (mesh, have)]
        raise MeshError(f"the plan is for mesh {show[0]}, the DeviceMesh is {show[1]}; plan again for this mesh")


class ParallelModule(SpreadModule):
    """What :func:`autopar.parallelize` returns: the model, spread over a mesh.

    Parameters are DTensors under the names that they have in the model; on a mesh of one device plain tensors, for
    which optimizers take half the time. :attr:`plan` and :attr:`program` are for reading.
    """

    _captured: Captured
    _plan: Plan
    _mesh: DeviceMesh
    _device: torch.device
    _program: Program
    _signature: inspect.Signature
    _helds: dict[str, Held]
    _held_buffers: dict[str, tuple[torch.Tensor, State]]
    _followed: list[tuple[int, Followed]]
    _seed: int
    _calls: int
    _compared: int
    _gradients: Gradients
    _batch: Batch
    _probe: torch.Tensor
    _meeting: Meeting | None
    _failures: Failures | None
    _units: list[Unit]
    _schedule: prefetch.Schedule
    _run: Callable[..., tuple[Any, ...]]
    _template: list[Any]
    _copied: list[int]
    _input_slots: dict[str, int]
    _seed_slot: int | None
    _param_slots: list[tuple[int, Held]]
    _distributed: bool
    _direct: bool
    _skeleton: Skeleton | None
    _captured_training: bool
    _sides: Mapping[str, int]
    _evaluation: tuple[Program, Callable[..., tuple[Any, ...]]] | None
    _compile: tuple[tuple[Any, ...], dict[str, Any]] | None

    def __init__(
        self, model: torch.nn.Module, captured: Captured, plan: Plan, device_mesh: DeviceMesh,
        values: Callable[[str], torch.Tensor] | None = None, *, seed: int | None = None,
        shared: dict[str, torch.nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        """Spread ``model`` over ``device_mesh`` as ``plan`` says.

        Args:
            values: gives the whole value of a parameter or buffer by name; by default the model's own. Only this
                rank's slice is kept.
            seed: of random ops; by default rank 0's ``torch.initial_seed()``.
            shared: for a stage of a pipeline: parameters of this rank's other stages, which are used again where names
                agree and added to. With it, only what the graph reads is held.
        """
        super().__init__()
        check_device_mesh(device_mesh, plan.mesh)
        put = object.__setattr__  # not nn.Module's: names of the model's own modules stay free
        put(self, "_captured", captured)
        put(self, "_plan", plan)
        put(self, "_mesh", device_mesh)
        put(self, "_device", torch.device(device_of(device_mesh)))
        put(self, "_program", lower(captured.graph, plan, self._device))
        put(self, "_signature", inspect.signature(model.forward))
        put(self, "_mode", model.training)
        put(self, "_captured_training", model.training)
        put(self, "_skeleton", Skeleton(model) if model.training and shared is None else None)
        put(self, "_evaluation", None)
        put(self, "_meeting", None)
        ranks = [int(r) for r in device_mesh.mesh.flatten()]
        put(self, "_failures", Failures(ranks) if len(ranks) > 1 and shared is None else None)
        put(self, "_compile", None)
        put(self, "_sides", {})
        put(self, "_helds", {})
        put(self, "_held_buffers", {})
        put(self, "_seed", _agreed_seed(device_mesh) if seed is None else seed)
        put(self, "_calls", 0)
        put(self, "_compared", 0)
        self._register(model, values, shared)
        self._set_mode_of(model)
        self._prepare()

    # -- state

    def _register(
        self, model: torch.nn.Module, values: Callable[[str], torch.Tensor] | None,
        shared: dict[str, torch.nn.Parameter] | None,
    ) -> None:  # fmt: skip
        graph, plan, mesh = self._captured.graph, self._plan, self._plan.mesh
        params = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        specs = {node.target: node for node in graph.nodes if node.kind in ("param", "buffer")}

        def whole(name: str) -> torch.Tensor:
            if name in self._captured.constants and name not in buffers and name not in params:
                return self._captured.constants[name]
            if values is not None:
                return values(name)
            return (params if name in params else buffers)[name]

        def local(name: str, state: State) -> torch.Tensor:
            value = whole(name).detach()
            if value.device.type == "meta":
                raise RunError(f"'{name}' is on the meta device; pass init= to give it a value")
            return local_piece(value, state, self._mesh).to(self._device, copy=True).contiguous()

        made: dict[str, torch.nn.Parameter] = {} if shared is None else shared
        for name, param in params.items():
            source = graph.tied.get(name, name)
            if source not in specs:  # not read by the model's forward
                if shared is not None:
                    continue
                source = next(n for n, p in params.items() if p is param)
            if source not in made:
                node = specs.get(source)
                everywhere = whole_state(mesh, param.requires_grad)
                state = plan.params[source].stored if source in plan.params else everywhere
                shape = node.out.shape if node is not None else tuple(param.shape)
                stored = local(source, state)
                if shared is not None or self._mesh.size() > 1:  # on one device nothing is placed
                    stored = as_dtensor(stored, state, shape, self._mesh)
                made[source] = torch.nn.Parameter(stored, requires_grad=param.requires_grad)
            elif shared is not None and source not in self._helds:
                _same_storage(source, made[source], plan.params[source].stored, self._mesh)
            owner, key = self._owner(name)
            owner._parameters[key] = made[source]
        self._hold_parameters(params)
        seen: dict[str, torch.Tensor] = {}
        for name in [*buffers, *(n.target for n in graph.nodes if n.kind == "buffer" and n.target not in buffers)]:
            source = graph.tied.get(name, name)
            if shared is not None and source not in specs:
                continue
            state = plan.buffers.get(source, whole_state(mesh))
            if source not in seen:
                seen[source] = local(source, state)
                self._held_buffers[source] = (seen[source], state)
            if name in buffers:
                parent, _, key = name.rpartition(".")
                persistent = key not in model.get_submodule(parent)._non_persistent_buffers_set
                owner, key = self._owner(name)
                value = seen[source]
                if is_cut(state):
                    value = as_dtensor(value, state, specs[source].out.shape, self._mesh)
                owner._buffers[key] = value
                if not persistent:
                    owner._non_persistent_buffers_set.add(key)

    def _hold_parameters(self, names: Iterable[str]) -> None:
        """Follow those of the registered parameters that the program reads."""
        graph, plan = self._captured.graph, self._plan
        specs = {node.target: node for node in graph.nodes if node.kind == "param"}
        for name in names:
            source = graph.tied.get(name, name)
            if source in specs and source not in self._helds:
                owner, key = self._owner(name)
                node = specs[source]
                self._helds[source] = Held(
                    source, owner, key, plan.params[source], self._mesh, plan.mesh, node.out.shape, node.needs_grad
                )

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        *parents, key = name.split(".")
        owner: torch.nn.Module = self
        for part in parents:
            if part not in owner._modules:
                owner._modules[part] = Part()
            child = owner._modules[part]
            assert child is not None
            owner = child
        return owner, key

    def _prepare(self) -> None:
        put = object.__setattr__
        program = self._program
        order = prefetch.order_of_use(program)
        helds = [self._helds[program.slots[i].name] for i in order]
        for held in self._helds.values():
            held.bind()
        gathered = [held for held in helds if not held.alias]
        idle = [held for held in self._helds.values() if not held.alias and held not in gathered]
        put(self, "_units", make_units([*gathered, *idle]))
        for unit in self._units:
            for held in unit.helds:
                held.bind()
        put(self, "_schedule", prefetch.Schedule(self._units))
        put(self, "_run", compiled(self, prefetch.with_gathers(program, self._helds, self._schedule)))
        put(self, "_direct", self._mesh.size() == 1 and not any(isinstance(p, DTensor) for p in self.parameters()))
        put(self, "_gradients", Gradients({} if self._direct else self._helds, self._schedule))
        put(self, "_template", [None] * len(program.slots))
        put(self, "_input_slots", {s.name: i for i, s in enumerate(program.slots) if s.kind == "input"})
        put(self, "_seed_slot", next((i for i, s in enumerate(program.slots) if s.kind == "seed"), None))
        put(self, "_param_slots", [(i, self._helds[s.name]) for i, s in enumerate(program.slots) if s.kind == "param"])
        copied = outliving(self._captured.graph)
        put(self, "_copied", [i for i, s in enumerate(program.slots) if s.kind == "buffer" and s.name in copied])
        self._take_buffers()
        for i, slot in enumerate(program.slots):
            if slot.kind == "param":
                self._template[i] = self._helds[slot.name].leaf
                self._gradients.listen(self._helds[slot.name])
        put(self, "_batch", Batch(self._captured, program, self._signature, self._mesh, self._device))
        put(self, "_probe", torch.empty(0, requires_grad=True))
        cut_outputs = [
            i for i, state in enumerate(program.outputs)
            if state is not None and i not in self._plan.pins.outputs and in_pieces(state)
        ]  # fmt: skip
        is_stage = bool(self._captured.graph.arriving or self._captured.graph.sends)
        if cut_outputs and not is_stage and self._mesh.size() > 1 and self._meeting is None:
            put(self, "_meeting", Meeting([int(r) for r in self._mesh.mesh.flatten()]))
        tail = [a for a, s in program.mesh if s > 1]
        put(self, "_distributed", bool(tail))

    def _take_buffers(self) -> None:
        """Have the program read the buffers that are registered, and the constants of its code."""
        registered = dict(self.named_buffers(remove_duplicate=False))
        object.__setattr__(self, "_followed", [])
        for i, slot in enumerate(self._program.slots):
            if slot.kind == "buffer":
                self._template[i] = self._held_buffers[slot.name][0]
                if slot.name in registered:  # no constant of the model's code
                    self._followed.append((i, Followed(slot.name, *self._owner(slot.name))))

    @property
    def plan(self) -> Plan:
        """The plan that this module runs."""
        return self._plan

    @property
    def program(self) -> Program:
        """The rewritten model; ``print(pm.program.code)``."""
        return self._program

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks."""
        return self._mesh

    def _change_mode(self, mode: bool) -> None:
        sides = check_mode(mode, self._captured_training, self._skeleton, self._captured, self._evaluation is not None)
        if not mode and self._captured_training and self._evaluation is None:
            self.prepare_evaluation(sides)

    def _position(self) -> tuple[int, int]:
        return self._seed, self._calls

    def _set_position(self, seed: int, calls: int) -> None:
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_calls", calls)

    def _draws(self) -> bool:
        return self._seed_slot is not None

    def _ranks(self) -> tuple[Any, int]:
        return mesh_group(self._mesh), int(self._mesh.mesh.flatten()[0])

    def prepare_evaluation(self, sides: Mapping[str, int] | None = None) -> None:
        """Make the program of eval mode, which reads the same parameters and buffers.

        Args:
            sides: of random branches (:func:`~autopar.capture.evaluation.evaluated`); None for those of the last time.
        """
        if sides is not None:
            object.__setattr__(self, "_sides", sides)
        graph = evaluated(self._captured.graph, self._sides)
        program = lower(graph, replace(self._plan, fingerprint=graph.fingerprint, recompute=()), self._device)
        assert program.slots == self._program.slots[: len(program.slots)]
        run = prefetch.with_gathers(program, self._helds, self._schedule)
        object.__setattr__(self, "_evaluation", (program, run))

    def _kept_program(self) -> Fields:
        return fields_of(self)

    def _resume_program(self, fields: Fields) -> None:
        resume(self, fields)

    def _take_program(self, new: Captured, plan_again: PlanAgain | None, all_well: AllWell) -> None:
        take(self, new, plan_again, all_well)

    def _in_step(self) -> bool:
        return self._gradients.accumulating or self._gradients.defer

    # -- running

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the program with ``torch.compile(program, *args, **kwargs)``, as ``nn.Module.compile`` does.

        Gathers, gradient reductions and everything else around the program stay eager. Collectives inside it may break
        the graph: spmd-types looks at autograd state that the compiler does not trace. Programs that are captured again
        (``on_change="recapture"``) are compiled like the first one.
        """
        object.__setattr__(self, "_compile", (args, kwargs))
        for fields in (self.__dict__, *(self._programs.kept if self._programs is not None else ())):
            fields["_run"] = compiled(self, fields["_run"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a whole batch, which every rank passes alike.

        All outputs are plain and whole, the same on all ranks, and any of them, or a sum of them, can be called
        ``backward`` on. Large ones beside a loss are put together when their values are first used, on every rank.
        Outputs that were pinned to pieces (``placements={1: "S0"}``) are DTensors.

        Raises:
            RunError: the call is not one that was captured; or ranks were called with different batches, which they
                compare in the first three calls and now and then (:mod:`autopar.runtime.same_batch`).
        """
        check_values(self)
        call = self._calls + 1
        failures, meeting = self._failures, self._meeting
        if failures is None:  # one device: the program runs in the caller's own autograd graph
            return self._outputs(self._call(call, args, kwargs), call)
        failures.settle()
        with failures.during(f"the forward of call {call}"):
            if meeting is not None:
                meeting.note(f"the forward of call {call}")
            return self._outputs(self._call(call, args, kwargs), call)

    def _call(self, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        mixed = mixed_seed(self._seed, self._calls)
        object.__setattr__(self, "_calls", call)
        self._bind()

        def run(inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
            flat = self._run_bound(inputs, mixed, self._gradients.accumulating, not self.training)
            return flat[: len(self._plan.outputs)]

        inputs, failures, meeting = self._inputs(args, kwargs), self._failures, self._meeting
        if self._direct:
            return run(inputs)

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            if meeting is not None:
                meeting.note(f"the backward of call {call}")
            with failures.during(f"the backward of call {call}") if failures is not None else contextlib.nullcontext():
                yield

        return crossed(self._gradients, self._probe, inputs, run, around)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Local inputs by name; now and then the ranks compare what they were called with."""
        object.__setattr__(self, "_compared", self._compared + 1)
        if self._mesh.size() == 1 or not is_checked(self._compared):
            return self._batch.inputs(args, kwargs)
        seen, error, found = Seen(self._mesh), None, {}
        try:
            found = self._batch.inputs(args, kwargs, seen)
        except AutoparError as e:
            error = e
        compare(mesh_group(self._mesh), seen, error)
        return found

    def _outputs(self, flat: tuple[Any, ...], call: int) -> Any:
        graph, plan = self._captured.graph, self._plan
        results: list[Any] = []
        for i, (value, state) in enumerate(zip(flat, plan.outputs, strict=True)):
            if state is None or not isinstance(value, torch.Tensor):
                results.append(value)
                continue
            value = with_pending(value, state, self._mesh)
            if any(in_pieces((p,)) and n > 1 for p, (_, n) in zip(state, plan.mesh, strict=True)):
                shape = graph.spec(graph.outputs[i]).shape
                if self._meeting is None or i in plan.pins.outputs:
                    value = as_dtensor(value, state, shape, self._mesh)
                else:
                    meet = partial(self._meeting.meet, "reads", f"output {i} of call {call}", IN_PIECES)
                    value = unread(value, state, shape, self._mesh, meet)
            results.append(value)
        return pytree.tree_unflatten(results, self._captured.out_spec)

    def run_local(
        self, inputs: Mapping[str, torch.Tensor], seed: int, *, same_step: bool, evaluating: bool = False
    ) -> tuple[Any, ...]:
        """Outputs and new buffers of the program, local as it makes them, from local inputs by name.

        ``same_step`` says that parameters have not changed since the last call, so gathered copies may be used again;
        ``evaluating`` that the program of eval mode is meant.
        """
        self._bind()
        return self._run_bound(inputs, seed, same_step, evaluating)

    def _bind(self) -> None:
        """Follow the parameters and buffers that are registered now."""
        for slot, held in self._param_slots:
            if held.bind():
                self._template[slot] = held.leaf
                self._gradients.listen(held)
        for slot, buffer in self._followed:
            if buffer.replaced():
                self._template[slot] = buffer.local
                self._held_buffers[buffer.name] = buffer.local, self._held_buffers[buffer.name][1]

    def _run_bound(
        self, inputs: Mapping[str, torch.Tensor], seed: int, same_step: bool, evaluating: bool
    ) -> tuple[Any, ...]:
        try:
            return self._run_local(inputs, seed, same_step, evaluating)
        except BaseException:
            self._schedule.drop()
            raise
        finally:
            for i in self._input_slots.values():
                self._template[i] = None

    def _run_local(
        self, inputs: Mapping[str, torch.Tensor], seed: int, same_step: bool, evaluating: bool
    ) -> tuple[Any, ...]:
        program, run, template = self._program, self._run, self._template
        for name, value in inputs.items():
            template[self._input_slots[name]] = value
        if self._seed_slot is not None:
            template[self._seed_slot] = torch.tensor(seed, dtype=torch.int64, device=self._device)
        self._schedule.begin(same_step=same_step)
        if evaluating and self._evaluation is not None:
            program, run = self._evaluation
        given = template[: len(program.slots)]
        for slot in self._copied if program.updates else ():
            given[slot] = given[slot].clone()
        values = [self._schedule, *given] if self._units else given
        if self._distributed:
            with on_mesh(self._mesh):
                flat = run(*values)
        else:
            flat = run(*values)
        with torch.no_grad():
            for name, new in zip(program.updates, flat[len(program.outputs) :], strict=True):
                kept = self._held_buffers[name][0]
                if new is not kept:
                    kept.copy_(new)
        return flat

    # -- for a pipeline, which runs the parts of a step itself

    def local_input(self, name: str, value: Any) -> torch.Tensor:
        """This rank's part of an input of the model."""
        return self._batch.local(name, value)

    def joined_gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """The whole gradient of an input, from the ranks' pieces; every rank of the mesh calls it."""
        slot = self._batch.slots[name]
        return joined(grad, slot.state, slot.shape, self._mesh)

    def leaves(self) -> list[torch.Tensor]:
        """The used parameters that want gradients."""
        return [held.leaf for held in self._helds.values() if held.leaf.requires_grad]

    @property
    def helds(self) -> Mapping[str, Held]:
        """The parameters that the program reads, by name."""
        return self._helds

    @property
    def gradients(self) -> Gradients:
        """Those of the step that is under way."""
        return self._gradients

    def free_gathered(self) -> None:
        """Nothing gathered for one use stays."""
        self._schedule.end()

    def train_step(
        self, *args: Any, optimizer: torch.optim.Optimizer | None = None, microbatches: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """One training step on a batch of one or more microbatches; returns the mean of their losses.

        A microbatch has the shapes of the example inputs. An input whose first dim is ``microbatches`` times as long
        is cut there; one with exactly the captured shape goes into every microbatch. Each loss counts ``1/k``: for a
        loss that is a mean over the batch this is the loss of the whole batch; for a mean over the labels that are not
        ignored it is the mean of the microbatches' means, which differs if they hold different numbers of labels.

        Args:
            optimizer: if given, ``step()`` and ``zero_grad()`` follow; else gradients are left in ``param.grad``.
            microbatches: how many; by default found from the shapes.
        """
        graph = self._captured.graph
        if graph.loss is None:
            raise RunError("the model has no scalar loss; pass loss_fn= and targets=, or call loss.backward() yourself")
        self.check_trains()
        if self._programs is not None:  # before the step begins
            check_values(self)
        pieces = self._batch.microbatches(args, kwargs, microbatches)
        total: torch.Tensor | None = None
        gradients = self._gradients
        if self._direct:
            check_values(self)  # another program would have other stand-ins
        self._bind()
        try:
            with stand_ins(self._param_slots, self._template) if self._direct else contextlib.nullcontext():
                for i, (a, k) in enumerate(pieces):
                    gradients.defer, gradients.accumulating = i < len(pieces) - 1, i > 0
                    outputs = self.forward(*a, **k)
                    loss = pytree.tree_leaves(outputs)[graph.loss]
                    if len(pieces) > 1:
                        loss = loss / len(pieces)
                    loss.backward()
                    total = loss.detach() if total is None else total + loss.detach()
        except BaseException:
            gradients.drop()
            raise
        finally:
            gradients.defer = gradients.accumulating = False
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        assert total is not None
        return total

    def __repr__(self) -> str:
        mesh = mesh_text(self._plan.mesh)
        return f"ParallelModule({mesh}, {len(self._helds)} parameters, {len(self._captured.graph.nodes)} nodes)"


# --- helpers ---------------------------------------------------------------------------------------------------------


def mixed_seed(seed: int, call: int) -> int:
    """The seed of random ops in one forward: another one for every forward, the same on every rank."""
    return (seed + call * _GOLDEN) % (1 << 62)


def device_of(device_mesh: DeviceMesh) -> str:
    kind = device_mesh.device_type
    return kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"


def _same_storage(name: str, held: torch.nn.Parameter, state: State, mesh: DeviceMesh) -> None:
    """Two stages of one rank that use a parameter share it, so they must store it alike."""
    have = (held.device_mesh, tuple(held.placements)) if isinstance(held, DTensor) else None
    if have != (mesh, tuple(torch_placements(state))):
        raise RunError(
            f"parameter '{name}' is used by two stages on the same devices and stored in two ways ({have} and "
            f"{format_state(state)}); pin how it is stored"
        )


def _agreed_seed(device_mesh: DeviceMesh) -> int:
    """Rank 0's ``torch.initial_seed()``, on every rank."""
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], dtype=torch.int64, device=device_of(device_mesh))
    if device_mesh.size() > 1:
        for axis in range(device_mesh.ndim):
            group = device_mesh.get_group(axis)
            dist.broadcast(seed, group=group, group_src=0)
    return int(seed.item())


__all__ = ["ParallelModule", "Unit", "check_device_mesh"]
