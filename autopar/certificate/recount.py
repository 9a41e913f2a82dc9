"""The certificate of a plan: its claims, recomputed without the solver and without the pricer.

The plan is lowered, and the emitted program is run once on fake tensors (:mod:`.microbatch_run`), which gives the
seconds; the shapes of parameters give the stored bytes; autograd's saved tensors the activations
(:mod:`autopar.certificate.activations`).
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from autopar.certificate.beside_operators import beside_operators
from autopar.certificate.microbatch_run import run_of_microbatch
from autopar.certificate.stored_parameters import (
    buffer_bytes,
    first_parameters,
    host_copy_seconds,
    parameter_seconds,
    stored_bytes,
    trained_on_host_bytes,
    version_bytes,
)
from autopar.lower.emit import lower
from autopar.lower.typecheck import typecheck
from autopar.plans.plan import StagePlan
from autopar.plans.prices import Price
from autopar.rules.function import PREFIX
from autopar.rules.kernels import as_on_gpu, kernels_of
from autopar.rules.lowering_helpers.joined_axes import group_along
from autopar.rules.proving.many_ranks import fake_world
from autopar.rules.strategy import joinable_axes
from autopar.words.graph import Graph
from cost_models.costs import costs_of
from cost_models.host_link import host_of
from cost_models.host_step import host_step_seconds
from cost_models.joined_axes import JOINED, JoinableAxes
from cost_models.parameter_overlap import HIDES_ALL, NO_COPIES, exposed, shares_of
from hardware_profiles import Cluster


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

    price: Price
    kept_bytes: int
    collectives: Counter[tuple[str, str]]
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
            run = run_of_microbatch(program, plan, graph, cluster, axes, names)
    counted = Counter(run.collectives)
    collectives = parameter_seconds(plan, graph, axes, costs.bucket_bytes, frozenset(), counted, HIDES_ALL)
    collectives = collectives.plus(host_copy_seconds(plan, graph, cluster, device, frozenset()).both)
    first = first_parameters(graph, costs.bucket_bytes)
    shares = shares_of(cluster)
    may_hide = parameter_seconds(plan, graph, axes, costs.bucket_bytes, first, None, shares)
    copies = host_copy_seconds(plan, graph, cluster, device, first) if shares.gathers > 0 else NO_COPIES
    may_hide = may_hide.plus(copies.both)
    seconds = collectives.of_step(plan.microbatches)
    waits = exposed(collectives, may_hide, run.computing, shares, copies, run.link).of_step(plan.microbatches)
    overhead, once = beside_operators(plan, graph, costs, device)
    of_host = trained_on_host_bytes(plan, graph)
    if of_host:
        once += host_step_seconds(plan.optimizer, of_host, host_of(cluster, device))
    parameter_bytes, gradient_bytes, optimizer_bytes = stored_bytes(plan, graph)
    price = replace(
        run.price, parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes,
        buffer_bytes=buffer_bytes(plan, graph) if graph.forward_only else 0, version_bytes=version_bytes(plan, graph),
        parameter_seconds=seconds, hidden_seconds=seconds - waits, overhead_seconds=overhead, optimizer_seconds=once,
    )  # fmt: skip
    report = Report(price, run.kept_bytes, counted)
    _claims(plan, report, tolerance)
    if not kernels.fused:  # the program that is run here writes what fused kernels keep inside
        _activations(plan, graph, report)
    return report


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
