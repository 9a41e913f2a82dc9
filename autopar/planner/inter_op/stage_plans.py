"""Plans of stages, which are shared: stages alike in all but names, on devices alike, are solved once.

Microbatches in flight are counted up to a round number, so that stages at different places in a schedule are alike too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.meshes import Mesh
from autopar.plan import StagePlan
from autopar.planner.inter_op.transplant import structure, transplant
from autopar.planner.intra_op.mesh_plan import Earlier, Options, plan_graph
from autopar.planner.intra_op.recompute import segments_of
from autopar.rules.registry import rules_of
from hardware_profiles import Cluster


@dataclass
class StagePlans:
    """Those on groups of a cluster's devices that were made so far."""

    cluster: Cluster
    _plans: dict[tuple[object, ...], dict[int, tuple[Graph, StagePlan, float]]] = field(
        default_factory=dict, init=False
    )
    """By what was asked, and microbatches in flight: the plan with its graph, and the gap that was good enough."""
    _earlier: dict[tuple[object, ...], tuple[Graph, Earlier]] = field(default_factory=dict, init=False)

    def plan(
        self, graph: Graph, mesh: Mesh, options: Options, devices: tuple[int, ...], exact: bool = False
    ) -> StagePlan:
        """The plan of a stage; stages alike in all but names, on devices alike, are solved once.

        A plan for more microbatches in flight serves for fewer too, if its memory does not bind; where it does, it is
        solved for a round number of them, and so for few different ones; or for just as many as there are (``exact``).
        One that was good enough where less was asked is solved again.
        """
        if is_pinned(options):
            return plan_graph(graph, self.cluster, mesh, options, devices=devices)
        kinds = tuple(self.cluster.device(d).name for d in devices)
        asked_again = segments_of(graph, rules_of(graph), options.recompute)
        places = tuple((graph.index[first], graph.index[last]) for first, last in asked_again)
        begins = tuple(graph.index[name] for name in options.blocks)
        key = structure(graph), mesh, kinds, options.memory_limit_bytes, places, begins
        by_in_flight = self._plans.setdefault(key, {})
        wanted = options.in_flight
        target = wanted if exact else rounded(wanted)
        for n, (first, plan, looked_for) in sorted(by_in_flight.items(), key=lambda entry: entry[0]):
            near = looked_for <= options.memory_gap or _gap(plan) <= options.memory_gap
            if (n == target and near) or (n > wanted and _is_free(plan)):
                alike = plan if first is graph else transplant(plan, first, graph)
                return replace(alike.with_in_flight(wanted), devices=devices)
        first, earlier = self._earlier.setdefault((*key[:3], places, begins), (graph, Earlier()))
        if first is not graph:
            free = transplant(earlier.free, first, graph) if earlier.free is not None else None
            earlier = Earlier(free, earlier.ends)

        def planned(in_flight: int) -> StagePlan:
            asked = replace(options, in_flight=in_flight)
            return plan_graph(graph, self.cluster, mesh, asked, devices=devices, earlier=earlier)

        n = target
        try:
            plan = planned(n)
        except InfeasibleError:
            if n == wanted:
                raise
            n, plan = wanted, planned(wanted)
        by_in_flight[n] = graph, plan, options.memory_gap
        return plan.with_in_flight(wanted)


def rounded(in_flight: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again."""
    power = 1 << (in_flight - 1).bit_length()  # the next power of two
    between = power * 3 // 4
    return between if power >= 4 and between >= in_flight else power


def is_pinned(options: Options) -> bool:
    """Whether the plan of a stage is its own: pins may name what is in it."""
    return bool(options.constraints or options.params or options.inputs or options.outputs)


def pace_of(plan: StagePlan) -> float:
    """Seconds of a microbatch, forward and backward."""
    return (plan.price.compute_seconds + plan.price.activation_seconds) / plan.microbatches


def _gap(plan: StagePlan) -> float:
    """How far a plan may be from its bound."""
    return plan.solution.gap if plan.solution is not None else 0.0


def _is_free(plan: StagePlan) -> bool:
    """Whether a plan is the optimum, and would be with more memory too."""
    return plan.solution is not None and plan.solution.status == "optimal" and not plan.solution.binds


__all__ = ["StagePlans", "is_pinned", "pace_of", "rounded"]
