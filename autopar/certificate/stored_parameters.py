"""Parameters and buffers of a plan, from their stored shapes: bytes on one rank, and seconds of their way to their use.

These are the collectives between stored and used placements, and copies between the host and the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

from autopar.plans.plan import StagePlan
from autopar.plans.stepped_by import stepped_by
from autopar.words.graph import ITEM_BYTES, Graph
from autopar.words.placements import Step
from autopar.words.shards import elements_moved, local_shape
from cost_models import optimizer_state_bytes
from cost_models.costs import Axis
from cost_models.host_link import host_of
from cost_models.parameter_overlap import NO_COPIES, HostSeconds, ParameterSeconds, Shares
from hardware_profiles import Cluster, Device


def stored_bytes(plan: StagePlan, graph: Graph) -> tuple[int, int, int]:
    """Return the bytes of parameters, their gradients and the optimizer's state on one rank."""
    parameters = gradients = optimizer = 0
    for _, node in graph.of_kind("param"):
        if plan.params[node.target].on_host:
            continue
        n = prod(local_shape(node.out.shape, plan.params[node.target].stored, plan.mesh))
        each = graph.stored(node).item_bytes
        parameters += n * each
        if node.needs_grad:
            gradients += n * each
            by = stepped_by(graph, node, plan.optimizer)
            optimizer += optimizer_state_bytes(by, n, graph.moments(node).item_bytes, 1)
    return parameters, gradients, optimizer


def version_bytes(plan: StagePlan, graph: Graph) -> int:
    """Return the bytes of the versions of weights on one rank, as the program reads them, beside the newest."""
    return (plan.versions.number - 1) * sum(
        prod(local_shape(node.out.shape, plan.params[node.target].used, plan.mesh)) * node.out.item_bytes
        for _, node in graph.of_kind("param") if node.needs_grad
    )  # fmt: skip


def buffer_bytes(plan: StagePlan, graph: Graph) -> int:
    """Return the bytes of buffers on one rank."""
    return sum(
        prod(local_shape(node.out.shape, plan.buffers[node.target], plan.mesh)) * node.out.item_bytes
        for _, node in graph.of_kind("buffer")
    )


def trained_on_host_bytes(plan: StagePlan, graph: Graph) -> int:
    """Return the bytes of trained parameters that are stored on the host, on one rank."""
    return sum(
        prod(local_shape(node.out.shape, plan.params[node.target].stored, plan.mesh)) * graph.stored(node).item_bytes
        for _, node in graph.of_kind("param") if node.needs_grad and plan.params[node.target].on_host
    )  # fmt: skip


def first_parameters(graph: Graph, bucket_bytes: float) -> frozenset[str]:
    """Return the parameters that operators read first, as many as begin within a bucket; at least one."""
    first: dict[str, int] = {}
    for node in graph.nodes:
        if node.kind == "op" and first and sum(first.values()) >= bucket_bytes:
            break
        for ref in node.refs if node.kind == "op" else ():
            read = graph.nodes[ref.node]
            if read.kind == "param":
                first[read.target] = read.out.n_bytes
    return frozenset(first)


def parameter_seconds(
    plan: StagePlan, graph: Graph, axes: Mapping[str, Axis], bucket_bytes: float, without: frozenset[str],
    counted: Counter[tuple[str, str]] | None, shares: Shares,
) -> ParameterSeconds:  # fmt: skip
    """Return seconds of the collectives between stored and used placements, by when they run.

    Their number in a step follows from the parameter's lifetime. Parameters in ``without`` are left out, as are
    collectives that ``shares`` overlap with nothing; ``counted``, if any, gets the number of each ``(axis, kind)``.
    """
    gathers = reductions = forward_each = backward_each = 0.0
    for _, node in graph.of_kind("param"):
        choice, state = plan.params[node.target], plan.params[node.target].stored
        for a in range(len(plan.mesh) - 1, -1, -1):
            name, size = plan.mesh[a]
            if state[a] == choice.used[a] or size == 1 or node.target in without:
                continue
            step = Step(a, state, state.changed(a, choice.used[a]))
            forward, backward = step.collectives
            state = step.dst
            moved = elements_moved(node.out.shape, step.src, step.dst, plan.mesh)
            policy = graph.precision
            back = ITEM_BYTES[policy.summed(node.out.dtype)] if policy is not None else node.out.item_bytes
            use = choice.lifetime == "use"
            often = plan.microbatches if use else 1
            forth = often * (2 if use and node.needs_grad else 1)
            own = graph.policy_of(node)
            is_narrow = own is not None and own.narrow is not None and own.narrow_gathers
            sent = own.narrow.item_bytes if own is not None and own.narrow is not None and is_narrow else 0
            gather = forward, forth, sent or node.out.item_bytes, True
            reduction = backward if node.needs_grad else None, often, back, False
            for kind, times, each, is_gather in (gather, reduction):
                if kind is None:
                    continue
                n_bytes = moved * each
                whole = max(n_bytes, bucket_bytes)
                seconds = axes[name].seconds(kind, whole) * n_bytes / whole
                if counted is not None:
                    counted[name, f"parameter {kind}"] += times
                if not (shares.gathers if is_gather else shares.reductions):
                    continue
                gathers += seconds * (is_gather and not use)
                reductions += seconds * (not is_gather and not use)
                forward_each += seconds * (is_gather and use)
                backward_each += seconds * (use and (node.needs_grad or not is_gather))
    return ParameterSeconds(gathers, reductions, forward_each, backward_each)


def host_copy_seconds(
    plan: StagePlan, graph: Graph, cluster: Cluster, device: Device, without: frozenset[str]
) -> HostSeconds:
    """Return the seconds of copies between host and device, of all parameters stored there but those ``without``."""
    seconds = NO_COPIES
    for _, node in graph.of_kind("param"):
        choice = plan.params[node.target]
        if not choice.on_host or node.target in without:
            continue
        host = host_of(cluster, device)
        n_bytes = prod(local_shape(node.out.shape, choice.stored, plan.mesh)) * graph.stored(node).item_bytes
        there, back = host.to_device(n_bytes), host.to_host(n_bytes) if node.needs_grad else 0.0
        if choice.lifetime == "step":
            copied = HostSeconds(ParameterSeconds(there), ParameterSeconds(0.0, back))
        else:
            again = there if node.needs_grad else 0.0
            copied = HostSeconds(ParameterSeconds(0.0, 0.0, there, again), ParameterSeconds(0.0, 0.0, 0.0, back))
        seconds = seconds.plus(copied)
    return seconds
