"""A step program behind a parallel module: one node of the caller's autograd graph runs it forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from building import Builder, Step
from generating import Functions
from passes import again, in_buckets, in_place

from autopar.lower.segments import on_mesh
from autopar.runtime.gradients.gradient_reduction import bucket_bytes
from autopar.runtime.parameters.state import HeldParam, give
from autopar.runtime.stages.stage import Stage
from autopar.torch_private import keeps_graph


class Program:
    """The step program of a stage, for one set of outputs with gradients and inputs that want one."""

    def __init__(
        self,
        stage: Stage,
        roots: Sequence[int],
        wanting: Sequence[str],
        split: bool = False,
        recomputed: Sequence[str] = (),
        reduce: bool = True,
    ) -> None:
        self.stage, self.wanting = stage, list(wanting)
        slots = stage.program.slots
        wants = [
            k
            for k, slot in enumerate(slots)
            if (slot.kind == "param" and stage.held_params[slot.name].param.requires_grad) or slot.name in self.wanting
        ]
        self.stored = reduce
        with on_mesh(stage.device_mesh):
            masters = {n: held.param.dtype for n, held in stage.held_params.items()}
            self.step: Step = Builder(stage.program, roots, wants, stage.plan if reduce else None, masters).build()
        n_bytes = sum(x.leaf.numel() * x.leaf.element_size() for x in stage.held_params.values())
        self.buckets = in_buckets(self.step, bucket_bytes(n_bytes))
        gathers = [
            f"{slot.name}:"
            for slot in slots
            if reduce and slot.kind == "param" and stage.plan.params[slot.name].lifetime == "use"
        ]
        again(self.step, [*recomputed, *(c.name for c in self.step.calls if c.name.startswith(tuple(gathers)))])
        self.in_place = in_place(self.step)
        self.functions = Functions(self.step, split)
        self.params = [
            (n, stage.held_params[slots[k].name])
            for n, k in enumerate(self.functions.slots)
            if slots[k].kind == "param"
        ]
        self.input_grads = {slots[k].name: n for n, k in enumerate(self.functions.slots) if slots[k].kind == "input"}
        self.param_slots = [(k, stage.held_params[s.name]) for k, s in enumerate(slots) if s.kind == "param"]

    def values(self, inputs: Mapping[str, torch.Tensor], seed: Any) -> list[Any]:
        """Return what the forward takes."""
        stage = self.stage
        given = stage.template[: len(stage.program.slots)]
        for k, held in self.param_slots:
            given[k] = held.local if self.stored and held.local is not None else held.leaf
            if held.casts:
                given[k] = held.param.to_local() if hasattr(held.param, "to_local") else held.param
        for name, x in inputs.items():
            given[stage.input_slots[name]] = x
        if stage.seed_slot is not None:
            given[stage.seed_slot] = seed
        return given

    def forward(self, inputs: Mapping[str, torch.Tensor], seed: Any) -> tuple[tuple[Any, ...], list[Any]]:
        """Return outputs, and what is saved."""
        flat = self.functions.forward(self.values(inputs, seed))
        program = self.stage.program
        for name, new in zip(program.updates, flat[len(program.outputs) : self.functions.n_results], strict=True):
            kept = self.stage.buffers[name][0]
            if new is not kept:
                kept.copy_(new)
        return flat[: len(program.outputs)], list(flat[self.functions.n_results :])


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, inputs: Mapping[str, torch.Tensor], seed: Any, _p: Any, *_: Any) -> Any:
        ctx.set_materialize_grads(False)
        outputs, ctx.saved = program.forward(inputs, seed)
        ctx.program = program
        roots = set(program.functions.roots)
        outputs = tuple(outputs)
        ctx.mark_non_differentiable(
            *(x for k, x in enumerate(outputs) if k not in roots and isinstance(x, torch.Tensor))
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        program: Program = ctx.program
        functions = program.functions
        saved = list(ctx.saved) if keeps_graph() else ctx.saved
        got = (
            functions.backward([*saved, *(grads[k] for k in functions.roots)])
            if keeps_graph()
            else functions.backward(_with(saved, [grads[k] for k in functions.roots]))
        )
        for n, held in program.params:
            if got[n] is not None:
                give(held.param, got[n])
        return (None, None, None, None, *(got[program.input_grads[name]] for name in program.wanting))


def _with(saved: list[Any], grads: list[Any]) -> list[Any]:
    saved.extend(grads)
    return saved


class Runs:
    """Runs step programs for a parallel module on one mesh, in the place of what its stage runs."""

    def __init__(self, pm: Any, recomputed: Sequence[str] = ()) -> None:
        self.run = pm._autopar
        self.recomputed = recomputed
        self.programs: dict[Any, Program] = {}
        self.run.call_program = self.call_program

    def program(self, wanting: Sequence[str]) -> Program:
        """Return the program for inputs that want gradients."""
        key = tuple(wanting)
        if key not in self.programs:
            stage = self.run.stage
            self.programs[key] = Program(stage, [stage.graph.loss], wanting, recomputed=self.recomputed)
        return self.programs[key]

    def call_program(self, call: int, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Run a call, as ``MeshRun.call_program`` does."""
        run = self.run
        stage = run.stage
        run.calls = call
        stage.bind()
        inputs = run.compared.inputs(lambda seen: run.inputs(args, kwargs, seen), run.named_parameters())
        seed = run.seeds.of_call(stage.graph) if stage.draws else None
        wanting = [name for name, x in inputs.items() if x.requires_grad]
        program = self.program(wanting)
        return _Node.apply(program, inputs, seed, stage.probe, *(inputs[name] for name in wanting))


def held_params(pm: Any) -> Mapping[str, HeldParam]:
    """Return the parameters of a module's stage."""
    return pm._autopar.stage.held_params
