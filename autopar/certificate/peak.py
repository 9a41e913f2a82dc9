"""The peak of memory on one rank, counted allocation by allocation in the program that a plan emits.

A training step runs once: parameters are gathered from the stored shards, forward, backward, step of the optimizer. A
dispatch mode notes the storage of every tensor that an operator creates, and the bytes of those that still live. By
default the tensors have no values; with values (``given``) it is the real peak of a process that acts as the first
rank, whose shards are the largest, its collectives answered by a fake group. Lowerings do what the last rank does,
which computes most where a mask is causal: of both, the maximum.

The plan's prediction (:mod:`autopar.planner.intra_op.memory.moments`) follows the same step moment by moment without
running it; of a pipeline's stage it counts also tensors in transit for other microbatches, which this step does not
have. What other microbatches in flight keep is added to it (:func:`in_pipeline`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import spmd_types as spmd
import torch
from torch.autograd.graph import get_gradient_edge

from autopar.allocations import Allocations
from autopar.certificate.recount import Report
from autopar.lower.collectives import state_step
from autopar.lower.emit import lower
from autopar.lower.freed_tensors import EMPTIED
from autopar.lower.program import Program, Slot
from autopar.planner.intra_op.pins.options import device_limit
from autopar.plans.plan import ParamChoice, StagePlan
from autopar.plans.stepped_by import matrices_of, stepped_by
from autopar.rules.lowering_helpers.lowering_trial import as_last_rank
from autopar.rules.proving.many_ranks import fake_world
from autopar.runtime.pipelines.received_tensors import Arrived, arriving
from autopar.torch_private import FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode
from autopar.words.graph import Graph, Ref
from autopar.words.placements import path
from autopar.words.shards import local_shape
from autopar.words.texts import show_bytes
from autopar.words.trees import PyTree
from cost_models import optimizer_state_bytes
from cost_models.matrix_steps import WholeMatrix, loads
from hardware_profiles import Cluster


@dataclass(frozen=True)
class Peak:
    """The most bytes that live at once on the first rank, and ``phase: operator`` then.

    The batch is left out, and so are buffers, but for those of a graph without gradients.
    """

    n_bytes: int
    at: str


def peak_of(plan: StagePlan, graph: Graph, given: Mapping[str, torch.Tensor] | None = None) -> Peak:
    """Return the peak of a step of one microbatch, for a graph with a loss or of a pipeline's stage.

    Of a graph without gradients it is that of a forward, with the buffers; outputs live to its end.

    Tensors that arrive from earlier stages live to the end of the forward at least, as do those that are sent on, and
    then as long as autograd keeps them. The gradients of both live to the end of the backward.

    Args:
        plan: the plan of the graph.
        graph: the stage.
        given: values of buffers and inputs, in shards of the first rank; without them all tensors are fake.

    Raises:
        MeshError: this process already belongs to a process group.
    """
    program = lower(graph, plan)
    stored_as = {node.target: getattr(torch, graph.stored(node).dtype) for _, node in graph.of_kind("param")}
    fake = FakeTensorMode(allow_non_fake_inputs=True) if given is None else contextlib.nullcontext()
    with fake_world(plan.mesh), fake, _WaitsInPlace(), spmd.no_typecheck(), as_last_rank():
        stored = {
            slot.name: torch.zeros(
                local_shape(slot.shape, plan.params[slot.name].stored, plan.mesh), dtype=stored_as[slot.name]
            ).requires_grad_(slot.needs_grad)
            for slot in program.slots if slot.kind == "param"
        }  # fmt: skip
        outside = {slot.name: _outside(slot, given, plan) for slot in program.slots if slot.kind != "param"}
        by = {node.target: stepped_by(graph, node, plan.optimizer) for _, node in graph.of_kind("param")}
        moments = {node.target: graph.moments(node).item_bytes for _, node in graph.of_kind("param")}
        states = [
            torch.empty(optimizer_state_bytes(by[name], x.numel(), moments[name]), dtype=torch.uint8)
            for name, x in stored.items() if x.requires_grad and not plan.params[name].on_host
        ]  # fmt: skip
        count = Allocations(EMPTIED)
        for name in graph.arriving:
            count.note(outside[name])  # no name of this function may hold it
        for x in (*(x for name, x in stored.items() if not plan.params[name].on_host), *states):
            count.note(x)
        for name, x in stored.items():
            if plan.params[name].on_host:
                count.ignore(x)
        for slot in program.slots:
            if slot.kind == "buffer" and graph.forward_only:
                count.note(outside[slot.name])
        with count:
            count.phase = "gathering parameters"
            used, per_use = _gathered(stored, program, plan, count)
            wanted: list[Arrived] = []
            for name in graph.arriving:
                if torch.is_floating_point(outside[name]):
                    outside[name] = _arrived(outside[name], wanted)
            values = [outside[slot.name] if slot.kind != "param" else used[slot.name] for slot in program.slots]
            count.phase = "forward"
            results = program.runnable(*values)
            for name in graph.arriving:
                del outside[name]
            ends = range(graph.sends) if graph.loss is None else (*range(graph.sends), graph.loss)
            roots = [x for x in (results[k] for k in ends) if isinstance(x, torch.Tensor) and x.requires_grad]
            assert roots or graph.forward_only, "a step begins at a loss or at what a stage sends on"
            del values, results
            if roots:
                _backward(roots, count)
            del roots
            wanted.clear()
            count.phase = "step"
            for name, x in stored.items():
                if by[name].startswith("adam") and x.grad is not None:
                    (x.grad.sqrt() / 1.0).add_(1e-8)  # what Adam divides by
            _step_on_matrices(graph, plan)
    largest = max((x.untyped_storage().nbytes() for x in per_use), default=0)
    return Peak(count.peak_bytes + 2 * largest, count.at)


def _step_on_matrices(graph: Graph, plan: StagePlan) -> None:
    """Make what the fullest rank has while whole matrices are gathered, stepped on and scattered."""
    n, sent = prod(plan.mesh.sizes), []
    for _, node in matrices_of(graph, plan.optimizer):
        stored = plan.params[node.target].stored
        cut = prod(size for p, size in zip(stored, plan.mesh.sizes, strict=True) if p.dim is not None)
        sent.append(WholeMatrix(node.out.shape, cut, 0.0))
    earlier: list[torch.Tensor] = []
    for load in loads(sent, n):
        sizes = load.stored_bytes, load.gathered_bytes, load.gathered_bytes
        pieces, came, whole = (torch.empty(round(size), dtype=torch.uint8) for size in sizes)
        del came, pieces
        beside = torch.empty(round(load.step_bytes), dtype=torch.uint8)
        del beside
        leaving = [torch.empty(round(size), dtype=torch.uint8) for size in (load.scattered_bytes, load.stored_bytes)]
        earlier = [whole, *leaving]
    del earlier


def _backward(roots: list[torch.Tensor], count: Allocations) -> None:
    """Run the backward from some tensors, which are given up here."""
    count.phase = "backward"
    gradients = [x.new_zeros(x.shape) for x in roots]  # contiguous, as they arrive
    edges = [get_gradient_edge(x) for x in roots]
    roots.clear()
    torch.autograd.backward(edges, gradients)


def has_backward(graph: Graph) -> bool:
    """Return whether a graph has a loss, or sends something on for which a gradient comes back."""
    ends = [*graph.outputs[: graph.sends], *([graph.outputs[graph.loss]] if graph.loss is not None else [])]
    return any(isinstance(x, Ref) and graph.nodes[x.node].needs_grad and graph.spec(x).is_float for x in ends)


def in_pipeline(peaks: Sequence[Peak | None], reports: Sequence[Report], plans: Sequence[StagePlan]) -> Peak | None:
    """Return the most that a rank has at once, from the peaks of one microbatch of each of its stages.

    One stage runs a microbatch, and all others in flight count with what they keep, as do older versions of weights,
    which this step of one microbatch does not make. Tensors in transit between stages
    are not counted. None if nothing was counted.
    """
    kept = [
        plan.in_flight * report.kept_bytes + report.price.version_bytes
        for plan, report in zip(plans, reports, strict=True)
    ]
    prices = [report.price for report in reports]
    state = [price.state_bytes for price in prices]
    there = sum(kept) + sum(state)
    running = [
        Peak(there - state[s] - reports[s].kept_bytes + peak.n_bytes, peak.at)
        for s, peak in enumerate(peaks) if peak is not None and plans[s].in_flight
    ]  # fmt: skip
    return max(running, key=lambda peak: peak.n_bytes, default=None)


def over_limit(peak: Peak, plan: StagePlan, cluster: Cluster, asked: int | None, said_bytes: int) -> str | None:
    """Return a message where a step has more at once than the limit of its plan; None if it has not.

    Args:
        peak: the peak of the step.
        plan: the plan of a stage on the device.
        cluster: the cluster of the plan.
        asked: the requested memory limit in bytes; None for what the devices have.
        said_bytes: the plan's prediction.
    """
    limit = device_limit(cluster, plan.devices, asked)
    if peak.n_bytes <= limit:
        return None
    whose = "the memory limit that was asked for" if asked is not None else "what may be filled of the device"
    return (
        f"memory: a step has {show_bytes(peak.n_bytes)} at once ({peak.at}), {peak.n_bytes / limit - 1:.1%} more than "
        f"{whose}, {show_bytes(limit)}; the plan says {show_bytes(said_bytes)}. Make the plan with a "
        f"memory limit of {int(limit * limit / peak.n_bytes)} bytes or less"
    )


def _arrived(x: torch.Tensor, wanted: list[Arrived]) -> torch.Tensor:
    """Return what a stage reads of a tensor that arrived, and add the place of its gradient to ``wanted``."""
    read, there = arriving(x)
    wanted.append(there)
    return read


class _WaitsInPlace(TorchDispatchMode):
    """A mode in which waiting for a collective returns its buffer; without values torch makes a second one."""

    def __torch_dispatch__(self, func: OpOverload, _types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        """Return the buffer that is waited for."""
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            return args[0]
        return func(*args, **(kwargs or {}))


def _gathered(
    stored: Mapping[str, torch.Tensor], program: Program, plan: StagePlan, count: Allocations
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the parameters as the program takes them, and the copies that live for one use, which are not counted."""
    used: dict[str, torch.Tensor] = {}
    per_use: list[torch.Tensor] = []
    for slot in (slot for slot in program.slots if slot.kind == "param"):
        choice = plan.params[slot.name]
        piece = _copied_in(stored[slot.name]) if choice.on_host else stored[slot.name]
        x = used[slot.name] = _used(piece, slot, choice, plan)
        if choice.on_host and x.untyped_storage()._cdata != piece.untyped_storage()._cdata:
            count.ignore(piece)  # it is freed when it is gathered
        if _is_gathered_per_use(choice, x, stored[slot.name]):
            count.ignore(x)
            per_use.append(x)
    return used, per_use


def _copied_in(x: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device of what is stored on the host, whose gradient leaves the device."""
    copy = x.detach().clone().requires_grad_(x.requires_grad)
    if x.requires_grad:
        copy.register_post_accumulate_grad_hook(_leaves)
    return copy


def _leaves(x: torch.Tensor) -> None:
    """Give up a gradient that is copied out to the host."""
    x.grad = None


def _is_gathered_per_use(choice: ParamChoice, used: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a copy lives for one use only.

    It is then there with the next one, which is prefetched: the two largest are counted for the whole step.
    """
    return choice.lifetime == "use" and used.untyped_storage()._cdata != stored.untyped_storage()._cdata


def _outside(slot: Slot, given: Mapping[str, torch.Tensor] | None, plan: StagePlan) -> torch.Tensor:
    """Return a buffer, an input or the seed."""
    if slot.kind == "seed":
        return torch.zeros((), dtype=torch.int64)
    if given is not None:
        return given[slot.name]
    return torch.empty(local_shape(slot.shape, slot.state, plan.mesh), dtype=getattr(torch, slot.dtype))


def _used(x: torch.Tensor, slot: Slot, choice: ParamChoice, plan: StagePlan) -> torch.Tensor:
    """Return a stored parameter in the placement in which the program takes it.

    It is a leaf of its own where that is another one: its gradient is then reduced to the stored one at once.
    """
    steps = path(choice.stored, choice.used)
    assert steps is not None
    gathered = x.to(getattr(torch, slot.dtype))  # of a master copy, what the program reads
    for axis, src, dst in steps:
        if plan.mesh.size(axis) > 1:
            function, arguments = state_step(slot.shape, src, dst, plan.mesh)
            gathered = function(gathered, *arguments)  # type: ignore[operator]
    if gathered is x or not x.requires_grad:
        return gathered
    leaf = gathered.detach().requires_grad_()

    def reduce(leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        gathered.backward(gradient)  # holds no more than its adjoint steps need

    leaf.register_post_accumulate_grad_hook(reduce)
    return leaf
