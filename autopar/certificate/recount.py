"""The certificate of a plan: its claims, recomputed without the solver and without the pricer.

The plan is lowered, and the emitted program is run once on fake tensors (shapes only), forward and backward. A
dispatch mode counts every collective that is issued, with its group and its bytes, and recomputed segments run twice;
operators are priced from their actual local shapes. This gives the seconds; the shapes of parameters give the stored
bytes; autograd's saved tensors the activations (:mod:`autopar.certificate.activations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod

import spmd_types as spmd
import torch
import torch.fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.certificate.activations import watch_of
from autopar.certificate.priced_run import CollectiveCount, PricedRun, attention_flops, expert_flops
from autopar.lower.emit import lower, used_shape
from autopar.lower.program import Program
from autopar.lower.typecheck import typecheck
from autopar.plans.plan import StagePlan
from autopar.plans.prices import Price
from autopar.plans.stepped_by import matrices_of, stepped_by
from autopar.rules.function import PREFIX
from autopar.rules.kernels import as_on_gpu, kernels_of
from autopar.rules.lowering_helpers.joined_axes import group_along
from autopar.rules.lowering_helpers.lowering_trial import Begun, ToOther, as_last_rank
from autopar.rules.proving.many_ranks import fake_world
from autopar.rules.registry import rules_of
from autopar.rules.strategy import joinable_axes, strategy_named
from autopar.torch_private import FakeTensorMode
from autopar.words.graph import ITEM_BYTES, Graph, Ref
from autopar.words.placements import State, Step, whole_state
from autopar.words.shards import elements_moved, local_shape
from cost_models import optimizer_state_bytes
from cost_models.chunked_exchange import ChunkedExchange
from cost_models.costs import Axis, Costs, OpSeconds, StageWork, costs_of
from cost_models.host_link import HostCopies, HostLinkUse, copies_of, devices_of_a_host, host_copies
from cost_models.host_step import host_step_seconds
from cost_models.joined_axes import JOINED, JoinableAxes
from cost_models.matrix_steps import WholeMatrix, iteration_seconds, loads
from cost_models.optimizer_bytes import MUON
from cost_models.parameter_overlap import (
    HIDES_ALL,
    NO_COPIES,
    TENSOR,
    Computing,
    HostSeconds,
    ParameterSeconds,
    Shares,
    exposed,
    shares_of,
    tensor_exposed,
)
from hardware_profiles import Cluster, Device


@dataclass
class Report:
    """The result of a check.

    Attributes:
        price: the recounted part of a plan's price: seconds and collectives from the program, parameters, gradients and
            optimizer state from the stored shapes, and kept activations of all microbatches in flight and of the
            largest recomputed segment, by storage under autograd's hooks. Transient bytes are not recounted.
        kept_bytes: activations that one microbatch keeps from its forward to its backward.
        collectives: the number of each ``(axis, kind)`` in forward and backward, parameters included.
        failures: claims of the plan that do not hold; empty for a certified plan.
    """

    price: Price = field(default_factory=Price)
    kept_bytes: int = 0
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True without failures."""
        return not self.failures


def check(plan: StagePlan, graph: Graph, cluster: Cluster, *, tolerance: float = 0.01, types: bool = False) -> Report:
    """Certify a plan. The process must not be in a process group: a fake one is created.

    Args:
        plan: the plan of the graph.
        graph: the stage.
        cluster: the cluster of the plan.
        tolerance: accepted relative difference of the plan's seconds from the recounted ones.
        types: have spmd-types check the program too.

    Raises:
        PlanError: an operator's types do not fit.
        MeshError: this process already belongs to a process group.
    """
    program = lower(graph, plan)
    report = Report()
    costs, device = costs_of(cluster), cluster.slowest(plan.devices)
    kernels = kernels_of(cluster, device)
    axes = JoinableAxes(costs, plan.mesh.size_of, plan.devices)
    with fake_world(plan.mesh) as mesh:
        names = {str(mesh.get_group(name).group_name): name for name in plan.mesh.names}
        several = joinable_axes(graph, plan.mesh)
        names |= {str(group_along(joined).group_name): JOINED.join(joined) for joined in several}
        if types:
            typecheck(program)
        with as_on_gpu() if kernels.gpu else nullcontext():
            host = copies_of(cluster, device)
            computing, link = _recount(
                program, plan, graph, device, costs, axes, names, report, tensor_exposed(cluster), host
            )  # fmt: skip
    parameter_bytes, gradient_bytes, optimizer_bytes = _stored(plan, graph)
    buffer_bytes = _buffers(plan, graph) if graph.forward_only else 0
    collectives = _parameters(plan, graph, axes, costs.bucket_bytes, frozenset(), report, HIDES_ALL)
    collectives = collectives.plus(_host_copies(plan, graph, cluster, device, frozenset()).both)
    first = _first_parameters(graph, costs.bucket_bytes)
    shares = shares_of(cluster)
    may_hide = _parameters(plan, graph, axes, costs.bucket_bytes, first, None, shares)
    copies = _host_copies(plan, graph, cluster, device, first) if shares.gathers > 0 else NO_COPIES
    may_hide = may_hide.plus(copies.both)
    seconds = collectives.of_step(plan.microbatches)
    waits = exposed(collectives, may_hide, computing, shares, copies, link).of_step(plan.microbatches)
    overhead, once = _beside_operators(plan, graph, costs, device)
    of_host = _of_host(plan, graph)
    if of_host:
        once += host_step_seconds(plan.optimizer, sum(of_host.values()), host_of(cluster, device))
    report.price = replace(
        report.price, parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes,
        buffer_bytes=buffer_bytes, version_bytes=_older_versions(plan, graph),
        parameter_seconds=seconds, hidden_seconds=seconds - waits, overhead_seconds=overhead, optimizer_seconds=once,
    )  # fmt: skip
    _claims(plan, report, tolerance)
    if not kernels.fused:  # the program that is run here writes what fused kernels keep inside
        _activations(plan, graph, report)
    return report


def _recount(
    program: Program,
    plan: StagePlan,
    graph: Graph,
    device: Device,
    costs: Costs,
    axes: Mapping[str, Axis],
    names: Mapping[str, str],
    report: Report,
    tensor: float,
    host: HostCopies | None,
) -> tuple[Computing, HostLinkUse]:
    """Count a microbatch into ``report``, and return the computation of operators that depend on parameters.

    And with it what activations do on the link to the host.

    ``tensor`` is the exposed share of collectives of tensor parallelism, ``host`` the device's copies to its host.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), spmd.no_typecheck():
        values = []
        for slot in program.slots:
            dtype = getattr(torch, slot.dtype)
            value = torch.empty(used_shape(slot, program.mesh), dtype=dtype)
            values.append(value.requires_grad_(slot.needs_grad))
        counter = CollectiveCount()
        # the attention of this process's device is not in torch's table
        formulas = {
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
            torch.ops.autopar.expert_linear: expert_flops,
            torch.ops.autopar.expert_linear_in_order: expert_flops,
        }
        flops = FlopCounterMode(display=False, custom_mapping=formulas)
        watch = watch_of(program, values, graph.arriving)
        pricer = PricedRun(program, graph, device, flops, costs, watch, counter, host)
        with counter, flops, as_last_rank(flops.get_total_flops) as pricer.counted:
            with watch.on():
                flat = pricer.run(*values)
            report.kept_bytes = sum(watch.kept().values())
            ends = [flat[graph.loss]] if graph.loss is not None else flat[: graph.sends]
            wanting = [value for value in ends if isinstance(value, torch.Tensor) and value.requires_grad]
            if wanting:
                torch.autograd.backward(wanting, [torch.ones_like(value) for value in wanting])
    link = pricer.copies.use()
    moved = sum(pricer.copy_seconds) + sum(link.waits)
    for group, kind, n_bytes in counter.seen:
        axis = names[group]
        report.collectives[axis, kind] += 1
        moved += axes[axis].seconds(kind, n_bytes) * (tensor if kind in TENSOR else 1.0)
    moved += _message_seconds(pricer.counted.messages, pricer.beside, axes)
    moved -= _hidden_seconds(pricer.counted.begun, pricer.windows, axes)
    moved -= _hidden_in_chunks(pricer, axes)
    for message in pricer.counted.messages:
        report.collectives[message.axis, "send_recv"] += message.times
    report.price = Price(
        plan.microbatches * sum(pricer.seconds), plan.microbatches * moved,
        activation_bytes=plan.in_flight * report.kept_bytes + pricer.again_bytes, again_bytes=pricer.again_bytes,
    )  # fmt: skip
    return Computing(sum(op.forward for op in pricer.hot), sum(op.total - op.forward for op in pricer.hot)), link


def _message_seconds(
    messages: Sequence[ToOther], beside: Mapping[int, OpSeconds], axes: Mapping[str, Axis]
) -> float:
    """Return the seconds of messages in a step: all that are waited for; of others what exceeds their call's compute.

    ``beside`` has that compute by the identity of a call.
    """
    seconds, hidden = 0.0, dict[tuple[int, bool], float]()
    for message in messages:
        spent = message.times * axes[message.axis].seconds("send_recv", message.n_bytes)
        if message.beside is None:
            seconds += spent
        else:
            place = (id(message.beside), message.backward)
            hidden[place] = hidden.get(place, 0.0) + spent
    for (call, backward), spent in hidden.items():
        compute = beside[call].total - beside[call].forward if backward else beside[call].forward
        seconds += max(0.0, spent - compute)
    return seconds


def _hidden_seconds(
    begun: Sequence[Begun], windows: Mapping[object, list[OpSeconds]], axes: Mapping[str, Axis]
) -> float:
    """Return the seconds of collectives that overlap computation: the shorter of both, of all that overlap together.

    ``windows`` has by passage what was computed in the forward between its beginning and its end, in one list for those
    that began together; the backward goes through it in reverse order.
    """
    waits: dict[tuple[int, bool], float] = {}
    computed = {id(window): window for window in windows.values()}
    for passage, axis, n_bytes, backward, _, chunks, _ in begun:
        if passage in windows and chunks == 1:
            place = id(windows[passage]), backward
            waits[place] = waits.get(place, 0.0) + axes[axis].seconds("all_to_all", n_bytes)
    return sum(
        min(spent, sum(op.total - op.forward if backward else op.forward for op in computed[window]))
        for (window, backward), spent in waits.items()
    )


def _hidden_in_chunks(pricer: PricedRun, axes: Mapping[str, Axis]) -> float:
    """Return the seconds of exchanges in chunks that overlap the products between their two ways, and others beside."""
    ways: dict[object, tuple[ChunkedExchange, ChunkedExchange]] = {}
    beside: dict[tuple[object, bool], list[OpSeconds]] = {}
    for begun in pricer.counted.begun:
        if begun.chunks > 1:
            both = list(ways.get(begun.trip, (ChunkedExchange(chunks=begun.chunks),) * 2))
            name, spent = "back" if begun.home else "there", axes[begun.axis].seconds("all_to_all", begun.n_bytes)
            both[begun.backward] = both[begun.backward]._replace(**{name: getattr(both[begun.backward], name) + spent})
            ways[begun.trip] = both[0], both[1]
            beside.setdefault((begun.trip, begun.home), pricer.windows.get(begun.passage, []))
    seconds = 0.0
    for trip, (forward, backward) in ways.items():
        own = pricer.computed[trip]
        others = [beside.get((trip, home), []) for home in (False, True)]
        there, back = (sum(op.forward for op in window) for window in others)
        seconds += forward.there + forward.back + own.forward + there + back
        seconds -= forward.forward(own.forward, there, back)
        if backward.there or backward.back:
            products = own.total - own.forward
            there, back = (sum(op.total - op.forward for op in window) for window in others)
            seconds += backward.there + backward.back + products + there + back
            seconds -= backward.backward(products, there, back)
    return seconds


def _stored(plan: StagePlan, graph: Graph) -> tuple[int, int, int]:
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


def _older_versions(plan: StagePlan, graph: Graph) -> int:
    """Return the bytes of the versions of weights on one rank, as the program reads them, beside the newest."""
    return (plan.versions.number - 1) * sum(
        prod(local_shape(node.out.shape, plan.params[node.target].used, plan.mesh)) * node.out.item_bytes
        for _, node in graph.of_kind("param") if node.needs_grad
    )  # fmt: skip


def _buffers(plan: StagePlan, graph: Graph) -> int:
    """Return the bytes of buffers on one rank."""
    return sum(
        prod(local_shape(node.out.shape, plan.buffers[node.target], plan.mesh)) * node.out.item_bytes
        for _, node in graph.of_kind("buffer")
    )


def _first_parameters(graph: Graph, bucket_bytes: float) -> frozenset[str]:
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


def _beside_operators(plan: StagePlan, graph: Graph, costs: Costs, device: Device) -> tuple[float, float]:
    """Return seconds beside operators: of all microbatches, and once a step."""

    def work() -> StageWork:
        summed, parameters = [], []
        for ref, readers in graph.consumers.items():
            node, spec = graph.nodes[ref.node], graph.spec(ref)
            gradients = sum(graph.nodes[i].needs_grad for i, _ in readers)
            if gradients > 1 and node.needs_grad and spec.is_float and node.kind != "buffer":
                shape = local_shape(spec.shape, _made_in(plan, graph, ref), plan.mesh)
                summed.append((gradients - 1, prod(shape) * spec.item_bytes))
        for _, node in graph.of_kind("param"):
            if node.needs_grad:
                choice = plan.params[node.target]
                used, stored = (prod(local_shape(node.out.shape, s, plan.mesh)) for s in (choice.used, choice.stored))
                on_device = 0 if choice.on_host else stored
                parameters.append((used * node.out.item_bytes, on_device * graph.stored(node).item_bytes))
        n_ops = sum(n.kind == "op" and n.needs_grad for n in graph.nodes)
        of_matrices, seconds = 0, 0.0
        if plan.optimizer == MUON:
            of_matrices, seconds = _whole_matrices(plan, graph, costs, device)
        return StageWork(
            summed, parameters, n_ops, plan.microbatches, plan.optimizer, forward_only=graph.forward_only,
            matrix_bytes=of_matrices, matrix_seconds=seconds,
        )  # fmt: skip

    extra = costs.stage(work)
    return (plan.microbatches * (extra.forward + extra.backward), extra.step) if extra is not None else (0.0, 0.0)


def _whole_matrices(plan: StagePlan, graph: Graph, costs: Costs, device: Device) -> tuple[int, float]:
    """Return the stored bytes on one rank of what Muon steps on, and the seconds of these steps on owners."""
    n_bytes, matrices, n = 0, [], len(plan.devices)
    for _, node in matrices_of(graph, plan.optimizer):
        shape, stored = node.out.shape, plan.params[node.target].stored
        n_bytes += prod(local_shape(shape, stored, plan.mesh)) * graph.stored(node).item_bytes
        cut = [size for p, size in zip(stored, plan.mesh.sizes, strict=True) if p.dim is not None]
        matrices.append(WholeMatrix(shape, prod(cut), iteration_seconds(costs, device, shape)))
    together = costs.axes({"all": n}, plan.devices)["all"]
    seconds = 0.0
    for load in loads(matrices, n):
        seconds += load.seconds
        for sent in (load.gathered_bytes, load.scattered_bytes):
            seconds += together.seconds("all_to_all", sent) if sent else 0.0
    return n_bytes, seconds


def _made_in(plan: StagePlan, graph: Graph, ref: Ref) -> State:
    """Return the state in which a tensor with a gradient is made."""
    node = graph.nodes[ref.node]
    if node.kind == "param":
        return plan.params[node.target].used
    if node.kind == "input":
        return plan.inputs.get(node.target, whole_state(plan.mesh))
    before = sum(out is not None for out in node.outs[: ref.out])
    return strategy_named(graph, node, rules_of(graph)[ref.node], plan.ops[node.name]).outs[before]


def _parameters(
    plan: StagePlan, graph: Graph, axes: Mapping[str, Axis], bucket_bytes: float, without: frozenset[str],
    report: Report | None, shares: Shares,
) -> ParameterSeconds:  # fmt: skip
    """Return seconds of the collectives between stored and used placements, by when they run.

    Their number in a step follows from the parameter's lifetime. Parameters in ``without`` are left out, as are
    collectives that ``shares`` overlap with nothing; ``report``, if any, counts the collectives.
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
                if report is not None:
                    report.collectives[name, f"parameter {kind}"] += times
                if not (shares.gathers if is_gather else shares.reductions):
                    continue
                gathers += seconds * (is_gather and not use)
                reductions += seconds * (not is_gather and not use)
                forward_each += seconds * (is_gather and use)
                backward_each += seconds * (use and (node.needs_grad or not is_gather))
    return ParameterSeconds(gathers, reductions, forward_each, backward_each)


def _host_copies(
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


def _of_host(plan: StagePlan, graph: Graph) -> dict[str, int]:
    """Return the bytes of trained parameters that are stored on the host, on one rank, by name."""
    return {
        node.target: prod(local_shape(node.out.shape, plan.params[node.target].stored, plan.mesh))
        * graph.stored(node).item_bytes
        for _, node in graph.of_kind("param") if node.needs_grad and plan.params[node.target].on_host
    }  # fmt: skip


def host_of(cluster: Cluster, device: Device) -> HostCopies:
    """Return the way from a device to its host, which all devices of a machine share."""
    return host_copies(device, devices_of_a_host(cluster))


def _claims(plan: StagePlan, report: Report, tolerance: float) -> None:
    counted, said = report.price, plan.price
    for what in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "version_bytes"):
        mine, theirs = getattr(counted, what), getattr(said, what)
        if mine != theirs:
            report.failures.append(f"{what}: the plan says {theirs}, its stored shapes give {mine}")
    if abs(counted.seconds - said.seconds) > tolerance * max(counted.seconds, said.seconds):
        parts = ", ".join(
            f"{what} {getattr(said, f'{what}_seconds'):.4g} and {getattr(counted, f'{what}_seconds'):.4g}"
            for what in ("compute", "activation", "parameter", "hidden", "overhead", "optimizer")
        )
        report.failures.append(
            f"seconds: the plan says {said.seconds:.6g}, the emitted program {counted.seconds:.6g} ({parts})"
        )


def _activations(plan: StagePlan, graph: Graph, report: Report) -> None:
    """Compare what autograd keeps, to the byte.

    Not for a user's own function, of which only the user's rule says what it keeps.
    """
    if any(node.target.startswith(PREFIX) for node in graph.nodes):
        return
    for what, mine, theirs in (
        ("of a microbatch", report.kept_bytes, plan.kept_bytes),
        ("while a segment runs again", report.price.again_bytes, plan.price.again_bytes),
    ):
        if mine != theirs:
            report.failures.append(
                f"activation bytes {what}: the plan says {theirs}, autograd holds {mine} in the emitted program"
            )
