"""Plans of stages, shared between stages that differ only in names, on devices of the same types.

Microbatches in flight are counted up to a round number, so that stages at different places in a schedule are alike too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.exact.transplant import structure, transplant
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.mesh_plan import Earlier, Options, device_limit, plan_graph
from autopar.planner.intra_op.pins.pinned_choices import PinnedChoices
from autopar.planner.intra_op.within_memory import against
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster


@dataclass
class StagePlans:
    """Plans of stages on groups of a cluster's devices that were made so far."""

    cluster: Cluster
    _plans: dict[tuple[object, ...], dict[int, tuple[Graph, StagePlan, float]]] = field(
        default_factory=dict, init=False
    )
    """By what was asked, and microbatches in flight: the plan with its graph, and the gap that was good enough."""
    _earlier: dict[tuple[object, ...], tuple[Graph, Earlier]] = field(default_factory=dict, init=False)
    _nearly_free: dict[tuple[object, ...], list[tuple[Graph, StagePlan]]] = field(default_factory=dict, init=False)

    def plan(
        self, graph: Graph, mesh: Mesh, options: Options, devices: tuple[int, ...], exact: bool = False
    ) -> StagePlan:
        """Return the plan of a stage; stages alike in all but names, on devices alike, are solved once.

        A plan for more microbatches in flight serves for fewer too, if its memory does not bind; where it does, it is
        solved for a round number of them, and so for few different ones; or for just as many as there are (``exact``).
        One that was good enough where less was asked is solved again.
        """
        kinds = tuple(self.cluster.device(d).name for d in devices)
        requested = segments_of(graph, rules_of(graph), options.recompute)
        places = tuple((graph.index[first], graph.index[last]) for first, last in requested)
        begins = tuple(graph.index[name] for name in options.blocks)
        pinned = places_of_pins(graph, mesh, options)
        key = structure(graph), mesh, kinds, options.memory_limit_bytes, places, begins, pinned, options.versions
        by_in_flight = self._plans.setdefault(key, {})
        wanted = options.in_flight
        target = wanted if exact else rounded(wanted)
        for n, (first, plan, looked_for) in sorted(by_in_flight.items(), key=lambda entry: entry[0]):
            near = looked_for <= options.memory_gap or _gap(plan) <= options.memory_gap
            if (n == target and near) or (n > wanted and _is_free(plan)):
                alike = plan if first is graph else transplant(plan, first, graph)
                return replace(alike.with_in_flight(wanted), devices=devices)
        of_any_limit = *key[:3], places, begins, pinned, options.versions
        first, earlier = self._earlier.setdefault(of_any_limit, (graph, Earlier()))
        for by, plan in self._nearly_free.get(of_any_limit, ()):
            alike = _that_fits(plan, options, device_limit(self.cluster, devices, options.memory_limit_bytes))
            if alike is not None and _gap(alike) <= options.memory_gap:
                return replace(alike if by is graph else transplant(alike, by, graph), devices=devices)
        if first is not graph:
            free = transplant(earlier.free, first, graph) if earlier.free is not None else None
            earlier = Earlier(free, earlier.ends)

        def planned(in_flight: int) -> StagePlan:
            request = replace(options, in_flight=in_flight)
            return plan_graph(graph, self.cluster, mesh, request, devices=devices, earlier=earlier)

        n = target
        try:
            plan = planned(n)
        except InfeasibleError:
            if n == wanted:
                raise
            n, plan = wanted, planned(wanted)
        by_in_flight[n] = graph, plan, options.memory_gap
        near = _against_free(plan, earlier.free, min(EFFORT.free_gap, options.memory_gap))
        if near is not None:
            self._nearly_free.setdefault(of_any_limit, []).append((graph, near))
        return plan.with_in_flight(wanted)


def rounded(in_flight: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again."""
    power = 1 << (in_flight - 1).bit_length()  # the next power of two
    between = power * 3 // 4
    return between if power >= 4 and between >= in_flight else power


def places_of_pins(graph: Graph, mesh: Mesh, options: Options) -> tuple[object, ...]:
    """Return the pins by the places of nodes in the graph: the same for stages whose pins differ in names alone."""
    if not (options.constraints or options.params or options.inputs or options.outputs):
        return ()
    pins = PinnedChoices(graph, rules_of(graph), mesh, options)
    ops = {graph.index[name]: tuple(sorted(of_axes.items())) for name, of_axes in pins.ops.items()}
    params = {i: pins.params[node.target] for i, node in graph.of_kind("param") if node.target in pins.params}
    inputs = {i: (options.inputs or {}).get(node.target) for i, node in graph.of_kind("input")}
    outputs = tuple(sorted((options.outputs or {}).items()))
    return tuple(sorted(ops.items())), tuple(params.items()), tuple(inputs.items()), outputs


def pace_of(plan: StagePlan) -> float:
    """Return the seconds of a microbatch, forward and backward."""
    return plan.price.microbatch_seconds / plan.microbatches


def _gap(plan: StagePlan) -> float:
    """Return how far a plan may be from its bound."""
    return plan.solution.gap if plan.solution is not None else 0.0


def _that_fits(plan: StagePlan, options: Options, limit: float) -> StagePlan | None:
    """Return a plan with the microbatches in flight of the options; None if it is larger then.

    Also None if it was weighed for fewer than all microbatches, where all are wanted.
    """
    if plan.in_flight < options.microbatches <= options.in_flight:
        return None
    alike = plan.with_in_flight(options.in_flight)
    return alike if alike.price.memory_bytes <= limit else None


def _against_free(plan: StagePlan, free: StagePlan | None, gap: float) -> StagePlan | None:
    """Return the plan, measured against the fastest one of any memory; None if it is further from that than the gap."""
    if free is None or free.solution is None or plan.solution is None:
        return None
    solution = against(free.solution.objective_seconds * (1 - free.solution.gap), plan, gap)
    return replace(plan, solution=solution) if solution.gap <= gap else None


def _is_free(plan: StagePlan) -> bool:
    """Return whether a plan is the optimum, and would be with more memory too."""
    return plan.solution is not None and plan.solution.status == "optimal" and not plan.solution.binds
