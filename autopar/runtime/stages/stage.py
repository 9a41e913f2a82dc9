"""A program on one mesh with the parameters and buffers that it reads: a whole model, or one stage of a pipeline.

A run on one mesh has one, which runs as a node of the caller's autograd graph; in a pipeline a rank has some, and runs
the parts of a step itself. What is stored is registered in the module; a stage follows it there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture.evaluation import evaluated
from autopar.lower.emit import lower
from autopar.lower.program import Program
from autopar.lower.segments import on_mesh
from autopar.plans.plan import StagePlan
from autopar.rules.whole_tensors import updates_of
from autopar.runtime.batches.batch import local_part, part_shape
from autopar.runtime.gradients.step_gradients import Gradients, waits_for_more
from autopar.runtime.gradients.taking_part import TakingPart
from autopar.runtime.parameters import prefetch
from autopar.runtime.parameters.gathering import Unit, make_units
from autopar.runtime.parameters.narrow_gathers import wire_of
from autopar.runtime.parameters.state import Buffers, Followed, HeldParam, joined, local_shard, note_write
from autopar.runtime.ranks.devices import device_of
from autopar.runtime.ranks.streams import StepStream
from autopar.runtime.stages.branch_checks import WaysTaken
from autopar.runtime.stages.buffer_versions import outliving
from autopar.runtime.stages.compiled import compiled
from autopar.runtime.stages.compiled_order import OneOrder
from autopar.runtime.stages.graph_compiler import CompileArguments
from autopar.runtime.stages.home import Home
from autopar.words.autocasting import without_autocast
from autopar.words.graph import Graph, Node


class Stage:
    """One program, and what it needs to run.

    Attributes:
        held_params: the parameters that the program reads, by name.
        gradients: those of the step that is under way.
        direct: nothing is gathered or reduced, so the program reads the stored parameters themselves.
        probe: an empty leaf that wants a gradient, for :mod:`autopar.runtime.one_mesh.crossing`.
    """

    def __init__(
        self, graph: Graph, plan: StagePlan, device_mesh: DeviceMesh, home: Home, buffers: Buffers,
        compile_args: CompileArguments | None = None,
    ) -> None:  # fmt: skip
        """Initialize the object.

        Args:
            home: where parameters and buffers are registered.
            compile_args: the program is to be compiled with these.
        """
        self.graph, self.plan, self.device_mesh, self.home = graph, plan, device_mesh, home
        self.device = torch.device(device_of(device_mesh))
        self.buffers, self.compile_args = buffers, compile_args
        self.program: Program = self._lowered(graph, plan)
        self.held_params = self._hold_parameters()
        self.stream = StepStream(self.device, self._kept)
        self.schedule = prefetch.GatherOrder(self._units(), self.stream)
        self.evaluation: tuple[Program, Any] | None = None
        self.evaluation_graph = graph
        on_meshes = any(isinstance(held_param.param, DTensor) for held_param in self.held_params.values())
        copied = any(held_param.casts or held_param.carrier for held_param in self.held_params.values())
        self.direct = device_mesh.size() == 1 and not (on_meshes or copied or graph.parts)
        self.gradients = Gradients({} if self.direct else self.held_params, self.schedule, lambda: home.gradient_dtype)
        self.run_program = self._runnable(self.program)
        self.probe = torch.empty(0, requires_grad=True)
        self.ways, self.parts = WaysTaken(graph), TakingPart(graph)
        self.distributed = any(size > 1 for size in self.program.mesh.sizes)
        slots = self.program.slots
        self.template: list[Any] = [None] * len(slots)
        self.inputs = {slot.name: slot for slot in slots if slot.kind == "input"}
        self.input_slots = {slot.name: i for i, slot in enumerate(slots) if slot.kind == "input"}
        self.seed_slot = next((i for i, slot in enumerate(slots) if slot.kind == "seed"), None)
        self.param_slots = [(i, self.held_params[slot.name]) for i, slot in enumerate(slots) if slot.kind == "param"]
        copied = outliving(graph)
        self.copied = [i for i, slot in enumerate(slots) if slot.kind == "buffer" and slot.name in copied]
        for i, held_param in self.param_slots:
            self.template[i] = held_param.leaf
            self.gradients.listen(held_param)
        self.followed: list[tuple[int, Followed]] = []
        self.follow_buffers()

    def _lowered(self, graph: Graph, plan: StagePlan) -> Program:
        return lower(graph, plan, self.device, self.home.seeds.mode == "torch")

    def _hold_parameters(self) -> dict[str, HeldParam]:
        held_params: dict[str, HeldParam] = {}
        nodes = {node.target: node for _, node in self.graph.of_kind("param")}
        for name, _ in self.home.named_parameters(remove_duplicate=False):
            source = self.graph.tied.get(name, name)
            if source in nodes and source not in held_params:
                owner, key = self.home.owner_of(name)
                choice = self.plan.params[source]
                held_params[source] = HeldParam(
                    source, owner, key, choice, self.device_mesh, self.plan.mesh, nodes[source].out.shape,
                    nodes[source].needs_grad, getattr(torch, nodes[source].out.dtype),
                    wire_of(self.graph, nodes[source], choice.stored, self.device_mesh),
                )  # fmt: skip
                held_params[source].bind()
        return held_params

    def _units(self) -> list[Unit]:
        order = [self.held_params[self.program.slots[i].name] for i in prefetch.order_of_use(self.program)]
        gathered = [held_param for held_param in order if not held_param.alias]
        stored = [held_param for held_param in self.held_params.values() if not held_param.alias]
        idle = [held_param for held_param in stored if held_param not in gathered]
        units = make_units([*gathered, *idle])
        for unit in units:
            for held_param in unit.held_params:
                held_param.bind()
        return units

    def follow_buffers(self) -> None:
        """Read the buffers that are registered now, and the constants of the model's code."""
        registered = self.home.registered()
        self.followed = []
        for i, slot in enumerate(self.program.slots):
            if slot.kind == "buffer":
                self.template[i] = self.buffers[slot.name][0]
                if slot.name in registered:
                    self.followed.append((i, Followed(slot.name, *self.home.owner_of(slot.name))))
        self.renewed = [each for _, each in self.followed if each.is_param]

    # -- other programs over the same parameters

    def prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        """Make the program of eval mode, which reads the same parameters and buffers.

        Args:
            sides: the sides of random branches (:func:`~autopar.capture.evaluation.evaluated`).
        """
        graph = evaluated(self.graph, sides)
        plan = replace(self.plan, fingerprint=graph.fingerprint, memory={})
        program = self._lowered(graph, plan)
        assert program.slots == self.program.slots[: len(program.slots)]
        self.evaluation, self.evaluation_graph = (program, self._runnable(program)), graph

    def with_other_literals(self, graph: Graph) -> Stage:
        """Return the same stage with a graph that differs only in literals; both share parameters and gradients."""
        twin = copy.copy(self)
        twin.graph, twin.plan = graph, replace(self.plan, fingerprint=graph.fingerprint)
        twin.program = twin._lowered(graph, twin.plan)
        twin.run_program = self._runnable(twin.program)
        twin.evaluation, twin.evaluation_graph = None, graph
        return twin

    def compile(self, arguments: CompileArguments | None) -> None:
        """Compile the programs with these arguments of ``torch.compile``; None to run them as they are lowered."""
        before = self.compile_args
        self.schedule.drop()
        self.compile_args = arguments
        try:
            run_program = self._runnable(self.program)
            evaluation = self.evaluation and (self.evaluation[0], self._runnable(self.evaluation[0]))
        except BaseException:
            self.compile_args = before
            raise
        self.run_program, self.evaluation = run_program, evaluation

    def _runnable(self, program: Program) -> Any:
        """Return what runs a program: its modules, or the compiler's result."""
        if self.compile_args is None:
            return prefetch.with_gathers(program, self.schedule)
        order = OneOrder(self.device_mesh, self._heard) if self.device_mesh.size() > 1 else None
        with on_mesh(self.device_mesh):
            takers = {
                name: partial(self.gradients.take, held_param)
                for name, held_param in self.held_params.items() if waits_for_more(held_param)
            }  # fmt: skip
            return compiled(program, self.gathered_inside, self.compile_args, takers, order)

    def _heard(self) -> str:
        """Return what is known of another rank's failure in the running step; empty if nothing is."""
        failures = self.home.failures
        return failures.news() if failures is not None else ""

    @property
    def gathered_inside(self) -> list[Unit]:
        """The parameters that a compiled program gathers itself, for each use, those together that fit one gather."""
        return [unit for unit in self.schedule.units if unit.per_use]

    # -- running

    @property
    def draws(self) -> bool:
        """Whether the program has random operators."""
        return self.seed_slot is not None

    def draws_in(self, training: bool) -> bool:
        """Check whether the program of a mode has random operators."""
        if training or self.evaluation is None:
            return self.draws
        return self.draws and len(self.evaluation[0].slots) == len(self.program.slots)

    def graph_in(self, training: bool) -> Graph:
        """Return the graph of the program of a mode."""
        return self.graph if training else self.evaluation_graph

    def bind(self) -> None:
        """Follow the parameters and buffers that are registered now."""
        for slot, held_param in self.param_slots:
            if held_param.bind():
                self.template[slot] = held_param.leaf
                self.gradients.listen(held_param)
        for slot, buffer in self.followed:
            if buffer.replaced():
                self.template[slot] = buffer.local
                self.buffers[buffer.name] = buffer.local, self.buffers[buffer.name][1]

    def local_input(self, name: str, leaf: torch.Tensor, shown: str, in_shards: bool = False) -> torch.Tensor:
        """Return this rank's part of an input of the model.

        Args:
            shown: what messages call the input.
            in_shards: every rank may pass its own piece.
        """
        return local_part(self.inputs[name], leaf, shown, self.device_mesh, self.plan.mesh, in_shards)

    def part_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of an input."""
        return part_shape(self.inputs[name], self.device_mesh, self.plan.mesh)

    def run(
        self, inputs: Mapping[str, torch.Tensor], seed: Any, *, same_step: bool, evaluating: bool = False
    ) -> tuple[Any, ...]:
        """Run the bound program on local inputs by name; return its local outputs and new buffers.

        Args:
            seed: the seed of random operators, a tensor or what stands for one; None if the program has none.
            same_step: parameters have not changed since the last call, so gathered copies may be used again.
            evaluating: the program of eval mode is meant.
        """
        try:
            with without_autocast():  # its casts are in the program
                return self._run(inputs, seed, same_step, evaluating)
        except BaseException:
            self.schedule.drop()
            raise
        finally:
            for i in self.input_slots.values():
                self.template[i] = None

    def _run(self, inputs: Mapping[str, torch.Tensor], seed: Any, same_step: bool, evaluating: bool) -> tuple[Any, ...]:
        program, run, template = self.program, self.run_program, self.template
        for name, value in inputs.items():
            template[self.input_slots[name]] = value
        if self.seed_slot is not None:
            template[self.seed_slot] = seed
        of_eval = evaluating and self.evaluation is not None
        before = (self.evaluation_graph if of_eval else self.graph).before
        if before is not None and not same_step:
            self._write_first(before)
        self.stream.begin(same_step)
        if self.compile_args is None:
            self.schedule.begin(same_step=same_step)
        else:
            self.schedule.begin_whole(same_step=same_step)
        if of_eval:
            assert self.evaluation is not None
            program, run = self.evaluation
        given = template[: len(program.slots)]
        for slot in self.copied if program.updates else ():
            given[slot] = given[slot].clone()
        if self.compile_args is not None:
            pieces = (held_param.local for unit in self.gathered_inside for held_param in unit.held_params)
            values = [*pieces, *given]
        else:
            values = [self.schedule, *given] if self.schedule.units else given
        if self.distributed:
            with on_mesh(self.device_mesh):
                flat: tuple[Any, ...] = run(*values)
        else:
            flat = run(*values)
        with torch.no_grad():
            for name, new in zip(program.updates, flat[len(program.outputs) :], strict=True):
                kept = self.buffers[name][0]
                if new is not kept:
                    kept.copy_(new)
            for renewed in self.renewed if program.updates else ():
                note_write(renewed.param)
            self.ways.look(self.buffers)
            self.gradients.took = self.parts.look(self.buffers)
        return flat

    @torch.no_grad()
    def _write_first(self, before: Graph) -> None:
        """Write to parameters what the model's forward writes to them first.

        What that depends on is gathered whole: masks and scales are small beside a step's other work.
        """

        def value(node: Node) -> torch.Tensor:
            if node.kind == "param":
                held = self.held_params[node.target]
                assert held.local is not None
                return joined(held.local, held.choice.stored, node.out.shape, self.device_mesh)
            local, state = self.buffers[node.target]
            return joined(local, state, node.out.shape, self.device_mesh)

        for name, new in updates_of(before, value).items():
            held = self.held_params[name]
            assert held.local is not None
            held.local.copy_(local_shard(new, held.choice.stored, self.device_mesh))
            note_write(held.param)

    def leaves(self) -> list[torch.Tensor]:
        """List the used parameters that want gradients."""
        return [held_param.leaf for held_param in self.held_params.values() if held_param.leaf.requires_grad]

    def joined_gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Gather the gradient of an input from the ranks' shards; every rank of the mesh calls it."""
        slot = self.inputs[name]
        return joined(grad, slot.state, slot.shape, self.device_mesh)

    def _kept(self) -> list[torch.Tensor]:
        """List what stays in memory between steps: stored and gathered parameters, and buffers."""
        of_params = [x for held_param in self.held_params.values() for x in (held_param.local, held_param.leaf)]
        return [*(x for x in of_params if x is not None), *(buffer for buffer, _ in self.buffers.values())]

    def free(self) -> None:
        """Free what was gathered for one use."""
        self.schedule.end()
