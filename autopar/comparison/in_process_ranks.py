"""Many ranks in one process: a program with real numbers, without processes.

``LocalTensorMode`` of torch runs every operation once per rank on a fake process group, with working collectives and
autograd. It is slow and exact: what ``autopar verify`` and most tests use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import RunError
from autopar.lower.collectives import state_step
from autopar.lower.program import Program
from autopar.plans.plan import ParamChoice, StagePlan
from autopar.plans.stage_graphs import StageGraph
from autopar.rules.proving.many_ranks import join, many_ranks, piece
from autopar.rules.whole_tensors import updates_of
from autopar.torch_private import LocalTensor
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import State, path
from autopar.words.trees import PyTree
from cost_models.schedules.actions import Action, Schedule


def along(x: torch.Tensor, shape: Sequence[int], src: State, dst: State, mesh: Mesh) -> torch.Tensor:
    """Apply the differentiable steps from a parameter's stored to its used placement; ``shape`` is global."""
    steps = path(src, dst)
    assert steps is not None, f"no path from {src} to {dst}"
    for axis, a, b in steps:
        if mesh.size(axis) > 1:
            fn, args = state_step(shape, a, b, mesh)
            x = fn(x, *args)  # type: ignore[operator]
    return x


@dataclass
class WorldStep:
    """The result of one training step of a program, joined from all ranks."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    arriving: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of inputs, those from earlier stages among them; of a pipeline, of all microbatches in order."""


def write_first(graph: Graph, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Write to whole parameters what a call of the model writes to them before it reads them."""
    if graph.before is None:
        return
    values = {**buffers, **weights}
    with torch.no_grad():
        for name, value in updates_of(graph.before, lambda node: values[node.target]).items():
            weights[name].copy_(value)


def run_step(  # noqa: C901  (a step from end to end)
    graph: Graph,
    plan: StagePlan,
    program: Program,
    weights: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    seed: int = 0,
    backward: bool = True,
    leaving: Mapping[int, torch.Tensor] | None = None,
    loss_weight: float = 1.0,
) -> WorldStep:
    """Run forward and backward of a program on all ranks of its mesh, in this process.

    Args:
        weights, buffers, inputs: whole tensors by name.
        leaving: whole gradients of outputs that later pipeline stages read, by position.
        loss_weight: what the loss counts, if it is one of several microbatches'.

    Returns:
        outputs, gradients by parameter and new buffers, all whole. Every rank's copy of a replicated value is
        checked to be the same; a difference is an AssertionError.
    """
    mesh = plan.mesh
    device = next((t.device for of in (weights, buffers, inputs) for t in of.values()), None)
    with many_ranks(mesh) as n:

        def spread(value: torch.Tensor, state: State) -> LocalTensor:
            return LocalTensor({r: piece(value, state, mesh, r) for r in range(n)})

        stored: dict[str, LocalTensor] = {}
        buffer_shards: dict[str, tuple[LocalTensor, State]] = {}
        taken: dict[str, tuple[LocalTensor, State]] = {}
        values: list[PyTree] = []
        for slot in program.slots:
            if slot.kind == "param":
                choice: ParamChoice = plan.params[slot.name]
                leaf = spread(weights[slot.name].detach(), choice.stored)
                if weights[slot.name].requires_grad:
                    leaf.requires_grad_()
                stored[slot.name] = leaf
                values.append(along(leaf, slot.shape, choice.stored, choice.used, mesh))
            elif slot.kind == "buffer":
                buffer_shards[slot.name] = (spread(buffers[slot.name], slot.state), slot.state)
                values.append(buffer_shards[slot.name][0])
            elif slot.kind == "input":
                arrived = spread(inputs[slot.name].detach(), slot.state)
                if slot.needs_grad:
                    arrived.requires_grad_()
                    taken[slot.name] = (arrived, slot.state)
                values.append(arrived)
            else:
                values.append(spread(torch.tensor(seed, dtype=torch.int64, device=device), slot.state))
        flat = program.runnable(*values)
        results, updates = flat[: len(program.outputs)], flat[len(program.outputs) :]
        if backward:
            roots: list[torch.Tensor] = []
            grads: list[torch.Tensor | None] = []
            for k, grad in (leaving or {}).items():
                if results[k].requires_grad:
                    roots.append(results[k])
                    grads.append(spread(grad, program.outputs[k] or State()))
            if graph.loss is not None:
                roots.append(results[graph.loss] * loss_weight if loss_weight != 1.0 else results[graph.loss])
                grads.append(None)
            if roots:
                torch.autograd.backward(roots, grads)

    def whole(x: Any, state: State, name: str) -> torch.Tensor:
        if not isinstance(x, LocalTensor):
            return x
        pieces = [x._local_tensors[r].detach() for r in range(n)]
        _same_copies(pieces, state, mesh, name)
        return join(pieces, state, mesh)

    outputs = [
        out if state is None else whole(out, state, f"output {i}")
        for i, (out, state) in enumerate(zip(results, program.outputs, strict=True))
    ]
    gradients = {
        name: whole(leaf.grad, plan.params[name].stored, f"gradient of {name}")
        for name, leaf in stored.items()
        if leaf.grad is not None
    }
    arriving = {
        name: whole(leaf.grad, state, f"gradient of {name}") for name, (leaf, state) in taken.items()
        if leaf.grad is not None
    }  # fmt: skip
    new = {name: whole(x, state, name) for name, (x, state) in buffer_shards.items()}
    for name, x in zip(program.updates, updates, strict=True):
        new[name] = whole(x, plan.buffers[name], name)
    return WorldStep(outputs, gradients, new, arriving)


def _same_copies(pieces: Sequence[torch.Tensor], state: State, mesh: Mesh, name: str) -> None:
    for rank, value in enumerate(pieces):
        at = mesh.coordinate(rank)
        first = 0
        for placement, (_, size), c in zip(state, mesh, at, strict=True):
            first = first * size + (0 if placement.is_replicated else c)
        copy_there = pieces[first]
        if not torch.allclose(value, copy_there, rtol=1e-4, atol=1e-6, equal_nan=True):
            worst = (value - copy_there).abs().max().item()
            shown = state.text
            raise AssertionError(f"{name} ({shown}) differs between ranks {first} and {rank} by {worst:.3e}")


def pipeline_step(
    graphs: Sequence[StageGraph], plans: Sequence[StagePlan], programs: Sequence[Program], schedule: Schedule,
    weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
    microbatches: Sequence[Mapping[str, torch.Tensor]], loss: int, *, seeds: Sequence[int],
) -> WorldStep:  # fmt: skip
    """Run one training step of a pipeline, every stage on all ranks of its mesh, in this process.

    The actions run one at a time, in an order that the rows of the schedule allow; gradients of weights are computed
    when the schedule says so. Every stage runs forward for its outputs, and once more with its backward: ranks of
    other stages cannot be alive at the same time here.

    Raises:
        RunError: the rows wait for each other.
    """
    buffers_now = dict(buffers)
    share = 1 / len(microbatches)
    total: torch.Tensor | None = None
    sums: dict[str, torch.Tensor] = {}
    crossed: list[dict[str, torch.Tensor]] = [{} for _ in microbatches]
    grads: list[dict[str, torch.Tensor]] = [{} for _ in microbatches]
    before: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    late: dict[tuple[int, int], Mapping[str, torch.Tensor]] = {}

    def add(into: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> None:
        for name, grad in more.items():
            into[name] = into[name] + grad if name in into else grad

    for s, kind, k in _in_order(graphs, schedule):
        stage, plan, program = graphs[s], plans[s], programs[s]
        given = {**microbatches[k], **crossed[k]}
        if kind == "F":
            before[s, k] = dict(buffers_now)
            done = run_step(stage.graph, plan, program, weights, buffers_now, given, seed=seeds[k], backward=False)
            crossed[k].update(zip((c.tensor for c in stage.gives), done.outputs, strict=False))
            buffers_now.update(done.buffers)
            if stage.graph.loss is not None:
                part = done.outputs[stage.graph.loss] * share
                total = part if total is None else total + part
        elif kind == "W":
            add(sums, late.pop((s, k)))
        else:
            leaving = {c.output: grads[k][c.tensor] for c in stage.gives if c.tensor in grads[k]}
            done = run_step(
                stage.graph, plan, program, weights, before.pop((s, k)), given, seed=seeds[k], leaving=leaving,
                loss_weight=share,
            )  # fmt: skip
            add(grads[k], done.arriving)
            if kind == "B":
                add(sums, done.gradients)
            else:
                late[s, k] = done.gradients
    outputs: list[Any] = [None] * (loss + 1)
    outputs[loss] = total
    arriving = {name: torch.cat([part[name] for part in grads]) for name in microbatches[0] if name in grads[0]}
    return WorldStep(outputs, sums, buffers_now, arriving)


def _in_order(graphs: Sequence[StageGraph], schedule: Schedule) -> Iterator[Action]:
    """Yield the actions of a schedule, each after those whose tensors it takes and those before it in its row."""
    sources = [{crossing.source for crossing in stage.takes} for stage in graphs]
    readers = [{t for t, stages_before in enumerate(sources) if s in stages_before} for s in range(len(graphs))]
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        s, kind, k = action
        if kind == "F":
            return all(Action(source, "F", k) in done for source in sources[s])
        if kind == "W":
            return Action(s, "I", k) in done
        back = all(Action(t, "B", k) in done or Action(t, "I", k) in done for t in readers[s])
        return back and Action(s, "F", k) in done

    rows = [list(reversed(row)) for row in schedule.flat_rows]
    while any(rows):
        before = len(done)
        for row in rows:
            while row and ready(row[-1]):
                done.add(row[-1])
                yield row.pop()
        if len(done) == before:
            waiting = ", ".join(str(row[-1]) for row in rows if row)
            raise RunError(f"schedule {schedule.name}: its rows wait for each other, at {waiting}")
