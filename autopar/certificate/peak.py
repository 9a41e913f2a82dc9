"""The peak of memory on one rank, counted allocation by allocation in the program that a plan emits.

A training step runs once: copies of parameters are gathered from the pieces that are stored, forward, backward, step of
the optimizer. A dispatch mode notes the storage of every tensor that an operator makes, and how many bytes of all those
noted still live. By default the tensors have no values; with values (``fake=False``) the same is the real peak of a
process that plays the first rank, its collectives answered by a fake group.

A plan's price adds up what is held at different times of a step, and does not count what an operator needs while it
runs (the gradients of logits and of their softmax, gathered buffers that are taken apart), so the two differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.graph import Graph
from autopar.lower.collectives import state_step
from autopar.lower.emit import lower
from autopar.lower.program import Slot
from autopar.placements import local_shape, path
from autopar.plan import ParamChoice, StagePlan
from autopar.rules.many_ranks import fake_world
from autopar.torch_private import FakeTensorMode, TorchDispatchMode, pytree
from cost_models import optimizer_state_bytes


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators make, and of those given to :meth:`note`, while they live.

    Attributes:
        peak_bytes: the most that lived at once.
        at: phase of the step and operator where that was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.noted_bytes = 0  # of all those, the dead that were not looked for since among them
        self.phase, self.at, self.peak_bytes = "", "", 0

    def note(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        noted = self.living.get(storage._cdata)
        if noted is None or noted[0].expired():
            self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.noted_bytes += storage.nbytes()

    @property
    def live_bytes(self) -> int:
        self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
        self.noted_bytes = sum(n_bytes for _, n_bytes in self.living.values())
        return self.noted_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.note(x)
        if self.noted_bytes > self.peak_bytes and self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at = self.noted_bytes, f"{self.phase}: {func}"
        return result


@dataclass(frozen=True)
class Peak:
    """The most bytes that live at once on the first rank, the batch and buffers apart, and ``phase: operator`` then."""

    n_bytes: int
    at: str


def peak_of(plan: StagePlan, graph: Graph, given: Mapping[str, torch.Tensor] | None = None) -> Peak:
    """The peak of a training step of one microbatch under ``plan``, for a graph with a loss.

    Args:
        given: values of buffers and inputs, in pieces of the first rank; without them all tensors are fake.

    Raises:
        MeshError: this process already belongs to a process group.
    """
    program = lower(graph, plan)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if given is None else contextlib.nullcontext()
    with fake_world(plan.mesh), fake, spmd.no_typecheck():
        stored = {
            slot.name: torch.zeros(
                local_shape(slot.shape, plan.params[slot.name].stored, plan.mesh), dtype=getattr(torch, slot.dtype)
            ).requires_grad_(slot.needs_grad)
            for slot in program.slots if slot.kind == "param"
        }  # fmt: skip
        outside = {slot.name: _outside(slot, given, plan) for slot in program.slots if slot.kind != "param"}
        trained = [x for x in stored.values() if x.requires_grad]
        states = [
            torch.empty(optimizer_state_bytes(plan.optimizer, x.numel(), x.element_size()), dtype=torch.uint8)
            for x in trained
        ]
        count = Allocations()
        for x in (*stored.values(), *states):
            count.note(x)
        with count:
            count.phase = "gathering parameters"
            values = [
                outside[slot.name] if slot.kind != "param"
                else _used(stored[slot.name], slot, plan.params[slot.name], plan) for slot in program.slots
            ]  # fmt: skip
            count.phase = "forward"
            results = program.runnable(*values)
            assert graph.loss is not None, "a peak is counted of a step, which begins at a loss"
            loss = results[graph.loss]
            del values, results
            count.phase = "backward"
            loss.backward()
            count.phase = "step"
            for x in trained:
                if plan.optimizer.startswith("adam") and x.grad is not None:
                    (x.grad.sqrt() / 1.0).add_(1e-8)  # what Adam divides by
    return Peak(count.peak_bytes, count.at)


def _outside(slot: Slot, given: Mapping[str, torch.Tensor] | None, plan: StagePlan) -> torch.Tensor:
    """A buffer, an input or the seed."""
    if slot.kind == "seed":
        return torch.zeros((), dtype=torch.int64)
    if given is not None:
        return given[slot.name]
    return torch.empty(local_shape(slot.shape, slot.state, plan.mesh), dtype=getattr(torch, slot.dtype))


def _used(x: torch.Tensor, slot: Slot, choice: ParamChoice, plan: StagePlan) -> torch.Tensor:
    """A stored parameter in the placement in which the program takes it."""
    steps = path(choice.stored, choice.used)
    assert steps is not None
    for axis, src, dst in steps:
        if plan.mesh[axis][1] > 1:
            function, arguments = state_step(slot.shape, src, dst, plan.mesh)
            x = function(x, *arguments)  # type: ignore[operator]
    return x


__all__ = ["Allocations", "Peak", "peak_of"]
