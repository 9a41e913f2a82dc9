"""Train a habit three batches long: in eager mode, on one rank, and on two ranks under forced cuts."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import autopar
from autopar.capture import Captured
from autopar.comparison.in_process_ranks import run_step, write_first
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.lower.emit import lower
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.random_plans import random_plan
from autopar.rules.registry import rules_of
from autopar.words.meshes import Mesh
from habits.base import BATCHES, Habit, batch, loss_fn, made
from hardware_profiles import abstract_cluster

LEARNING_RATE = 0.01
TWO = Mesh.of(data=2)
TOLERANCE = 1e-9
LIMIT_SECONDS = 10


class TooLong(BaseException):
    """Not an Exception: nothing on the way may take it for an error of its own."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop what takes more than so many CPU-seconds, or six times as long on the clock."""

    def stop(number: int, frame: Any) -> None:
        raise TooLong(f"more than {seconds:g} CPU-seconds, or {6 * seconds:g} seconds")

    before = signal.signal(signal.SIGPROF, stop), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 6 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


@dataclasses.dataclass
class Step:
    """What one batch gives. A parameter or input without a gradient is not listed."""

    loss: Tensor
    gradients: dict[str, Tensor]
    inputs: dict[int, Tensor]
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def module_step(module: torch.nn.Module, args: tuple[Tensor, ...], loss_of: Any) -> Step:
    """Forward, backward and a step of plain SGD of a module, parallel or not."""
    args = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in args)
    module.zero_grad()
    loss = loss_of(module, *args)
    loss.backward()
    params = dict(module.named_parameters(remove_duplicate=False))
    found = Step(
        loss.detach().clone(),
        {n: p.grad.detach().clone() for n, p in params.items() if p.grad is not None},
        {i: x.grad.clone() for i, x in enumerate(args) if x.grad is not None},
    )
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= LEARNING_RATE * p.grad
    found.buffers = {n: b.detach().clone() for n, b in module.named_buffers(remove_duplicate=False)}
    return found


def scalar(output: Any) -> Tensor:
    if dataclasses.is_dataclass(output):
        output = vars(output)
    return next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 0)


def eager(kind: type[Habit]) -> list[Step]:
    """The truth."""
    model, outside = made(kind), loss_fn(kind)

    def loss_of(module: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return outside(module(x), y) if outside else scalar(module(x, y))

    return [module_step(model, batch(kind, i), loss_of) for i in range(BATCHES)]


def one_rank(kind: type[Habit], steps: list[Step]) -> Captured:
    """Through the front door: ``parallelize`` on one rank. Fills ``steps`` as they are done; returns the capture."""
    outside, (x, y) = loss_fn(kind), batch(kind, 0)
    try:
        given: dict[str, Any] = {"loss_fn": outside, "targets": (y,)} if outside else {}
        pm = autopar.parallelize(made(kind), 1, (x,) if outside else (x, y), **given)
        for i in range(BATCHES):
            steps.append(module_step(pm, batch(kind, i), lambda m, *a: scalar(m(*a))))
        return pm._autopar.captured
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def two_ranks(kind: type[Habit], captured: Captured, seed: int | None) -> list[Step]:
    """The program of a random plan on two ranks in this process; with no seed, the program of one device."""
    graph = captured.graph
    priced = pricer(abstract_cluster({"data": 2}), TWO)
    plan = one_device(graph) if seed is None else random_plan(graph, rules_of(graph), priced, seed)
    program = lower(graph, plan)
    model = made(kind)
    weights, held = state_of(captured, model)
    initial = dict(model.named_buffers(remove_duplicate=False))
    steps = []
    for i in range(BATCHES):
        given = inputs_of(captured, batch(kind, i), {})
        write_first(graph, weights, held)
        done = run_step(graph, plan, program, weights, held, given, seed=i)
        held.update(done.buffers)
        assert graph.loss is not None
        names = [None if n is None else graph.nodes[n].target for n in captured.inputs]
        arrived = {k: done.arriving[n] for k, n in enumerate(names) if n in done.arriving}
        gradients, buffers = dict(done.gradients), {**initial, **held}
        for alias, name in graph.tied.items():
            for values in (gradients, buffers):
                if name in values:
                    values[alias] = values[name]
        steps.append(Step(done.outputs[graph.loss], gradients, arrived, buffers))
        with torch.no_grad():
            for name, grad in done.gradients.items():
                weights[name] -= LEARNING_RATE * grad
    return steps


def differences(mine: list[Step], truth: list[Step]) -> list[str]:
    """What is not equal, in words; nothing where all is."""
    said = []
    for i, (a, b) in enumerate(zip(mine, truth, strict=True)):
        pairs: list[tuple[str, dict[Any, Tensor], dict[Any, Tensor]]] = [
            ("loss", {"": a.loss}, {"": b.loss}), ("gradient of", a.gradients, b.gradients),
            ("gradient of input", a.inputs, b.inputs), ("buffer", a.buffers, b.buffers),
        ]  # fmt: skip
        for what, ours, theirs in pairs:
            extra = [] if what == "buffer" else [n for n in ours if n not in theirs]  # constants are buffers of graphs
            for name in [*theirs, *extra]:
                x, y = ours.get(name), theirs.get(name)
                x, y = (torch.zeros_like(y if x is None else x) if t is None else t for t in (x, y))
                x, y = (t if t.is_complex() else t.double() for t in (x, y))
                worst = (x - y).abs().max().item() if x.numel() else 0.0
                if x.shape != y.shape or not worst <= TOLERANCE * (1 + y.abs().max().item()):
                    said.append(f"batch {i + 1}: {what} {name}: {worst:.3g} off")
    return said
