"""Plans for the buckets of a model that are made together: what each computes by, and how parameters are stored.

Buckets of short and of long sequences want other cuts: rows where there are many, heads or positions where one sequence
fills the machine. Programs of all of them read the same parameters. So a layout, how every parameter is stored, is
either the same for several buckets, which are then planned with it fixed; or it changes between two steps, which moves
parameters and optimizer state. Layouts to choose from are those that each bucket would have by itself; what a trace of
steps takes under a choice is the seconds of its steps and of its changes, and the choice that takes least is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import inf

from autopar.capture import Captured
from autopar.errors import InfeasibleError, PlanError
from autopar.parallelizing.replanning import for_graph, stored_as
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.stage_pins import allows
from autopar.planner.intra_op.building.price import Pricer, pricer
from autopar.planner.intra_op.mesh_plan import Options, device_limit, plan_graph, repriced
from autopar.planner.intra_op.pins.small_parameters import note_on_small
from autopar.planner.plan_notes import notes_on
from autopar.planner.planning import Outcome, options_of
from autopar.plans.offload_options import parse_offload
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.request import PlanRequest
from autopar.plans.stepped_by import stepped_by
from autopar.rules.experts.expert_load import with_load
from autopar.runtime.variants.buckets import Size
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh, mesh_shapes
from autopar.words.placements import INVARIANT, State, path
from cost_models.optimizer_bytes import optimizer_state_bytes
from hardware_profiles import Cluster

MOST_CHOICES = 4096
"""Ways to give buckets layouts of which all are looked at; of more, one bucket is changed at a time."""
Layout = Mapping[str, State]
"""How parameters are stored, by name."""


@dataclass(frozen=True)
class BucketPlans:
    """Plans of the buckets of a model on one mesh.

    Attributes:
        plans: the plans by rows and length.
        layouts: the number of each bucket's layout; equal numbers are the same layout.
        seconds: seconds of the steps of the trace and of the changes of layout between them.
        switching_seconds: the part of `seconds` for changes of layout.
        switches: changes of layout in the trace.
        single_seconds: seconds of the trace under the best single plan: one cut of every operator for all buckets.
        single: the bucket whose plan that is; where none fits for all, the seconds are infinite.
        fixed_seconds: seconds of the trace with the best single layout, under which each bucket has a plan of its own.
    """

    plans: Mapping[Size, StagePlan]
    layouts: Mapping[Size, int]
    seconds: float
    switching_seconds: float
    switches: int
    single_seconds: float
    single: Size
    fixed_seconds: float


def plan_buckets(
    graphs: Mapping[Size, Graph], trace: Sequence[Size], cluster: Cluster, mesh: Mesh, options: Options | None = None
) -> BucketPlans:
    """Return the plans of all buckets under which a trace of steps takes least.

    Args:
        graphs: the graph of a step of each bucket, of one model.
        trace: the buckets in the order of their steps.
        options: wishes that hold for all.

    Raises:
        InfeasibleError: a bucket has no plan at all.
        PlanError: parameters may be stored on the host, which buckets cannot agree on.
    """
    request = options or Options()
    if request.offload.is_auto:
        request = replace(request, offload=request.offload.of_activations)
    if request.offload.of_parameters:
        raise PlanError(
            f"offload={request.offload.text}: plans of buckets are made one by one, and each would keep other "
            "parameters on the host; leave offload out with shapes='buckets', or pad all batches to one shape"
        )
    buckets = [size for size in graphs if size in set(trace)]
    alone = {size: plan_graph(graphs[size], cluster, mesh, request) for size in buckets}
    layouts: list[Layout] = []
    for plan in alone.values():
        if (layout := _layout(plan)) not in layouts:
            layouts.append(layout)

    limit = device_limit(cluster, range(mesh.n_devices), request.memory_limit_bytes)

    @cache
    def like(size: Size, owner: Size) -> StagePlan | None:
        """Return a bucket's steps with every operator cut as in the plan of another; None if that does not fit."""
        if size == owner:
            return alone[owner]
        again = repriced(graphs[size], cluster, mesh, request, [alone[owner]])
        return again[0] if again is not None and again[0].price.memory_bytes <= limit else None

    @cache
    def under(size: Size, number: int) -> StagePlan | None:
        """Return the best plan of a bucket with a layout that is given; None if none fits."""
        plans = [plan for owner in buckets if _layout(alone[owner]) == layouts[number] and (plan := like(size, owner))]
        if _layout(alone[size]) != layouts[number]:
            needs_grad = {node.target: node.needs_grad for _, node in graphs[size].of_kind("param")}
            pins = {name: stored_as(state, needs_grad[name]) for name, state in layouts[number].items()}
            with contextlib.suppress(InfeasibleError):
                plans.append(plan_graph(graphs[size], cluster, mesh, for_graph(request, graphs[size], pins, mesh)))
        return min(plans, key=lambda plan: plan.price.seconds, default=None)

    def step(size: Size, number: int) -> float:
        plan = under(size, number)
        return inf if plan is None else plan.price.seconds

    prices, graph = pricer(cluster, mesh), graphs[buckets[0]]

    @cache
    def change(a: int, b: int) -> float:
        return 0.0 if a == b else relayout_seconds(graph, layouts[a], layouts[b], prices, request.optimizer)

    def takes(chosen: Mapping[Size, int]) -> tuple[float, float]:
        switching = sum(change(chosen[a], chosen[b]) for a, b in pairwise(trace))
        return sum(step(size, chosen[size]) for size in trace) + switching, switching

    best = min(_choices(buckets, len(layouts), lambda chosen: takes(chosen)[0]), key=lambda chosen: takes(chosen)[0])
    seconds, switching = takes(best)
    if seconds == inf:
        raise InfeasibleError("buckets: no layout of parameters fits all of them, and between them none can be changed")
    plans = {}
    for size in buckets:
        plan = under(size, best[size])
        assert plan is not None
        plans[size] = plan
    of_one = {
        owner: sum(plan.price.seconds if (plan := like(size, owner)) else inf for size in trace) for owner in buckets
    }  # fmt: skip
    single = min(of_one, key=lambda owner: of_one[owner])
    fixed = min(sum(step(size, number) for size in trace) for number in range(len(layouts)))
    switches = sum(best[a] != best[b] for a, b in pairwise(trace))
    return BucketPlans(plans, best, seconds, switching, switches, of_one[single], single, fixed)


def on_best_mesh(
    graphs: Mapping[Size, Graph], trace: Sequence[Size], cluster: Cluster, n: int, request: PlanRequest
) -> BucketPlans:
    """Call :func:`plan_buckets` on the mesh that is asked for, or on the best shape of ``n`` devices.

    Raises:
        InfeasibleError: there is none.
    """
    options = options_of(request)
    pinned = request.pins.mesh
    shapes = [pinned] if pinned is not None else mesh_shapes(n, request.max_axes, options.named_axes)
    best: BucketPlans | None = None
    infeasible: InfeasibleError | None = None
    for mesh in shapes:
        if request.pins.mesh is None and not allows(mesh, options):
            continue
        try:
            plans = plan_buckets(graphs, trace, cluster, mesh, options)
        except InfeasibleError as error:
            infeasible = infeasible or error
            continue
        if best is None or plans.seconds < best.seconds * (1 - EFFORT.faster_by):
            best = plans
    if best is None:
        raise infeasible or InfeasibleError("buckets: no mesh shape has the axes that are asked for")
    return best


@dataclass(frozen=True)
class BucketsTogether:
    """Plans of all buckets on one mesh, for a module that begins with one of them.

    Attributes:
        outcome: the plan with which it begins.
        by_graph: all plans, by the fingerprints of their graphs.
        changes: buckets store parameters in different ways.
    """

    outcome: Outcome
    by_graph: Mapping[str, StagePlan]
    changes: bool


def find(
    captured: Captured, trace: Sequence[Size], capture_of: Callable[[Size], Captured], cluster: Cluster, n: int,
    request: PlanRequest, name: str,
) -> BucketsTogether:  # fmt: skip
    """Return the plans of the buckets of a model that is called with one of them first.

    Args:
        captured: the capture of the bucket that comes first.
        trace: the buckets in the order in which they come.
        capture_of: captures a call of a bucket.
        cluster, n, asked, name: as for :func:`autopar.planner.planning.find`.

    Raises:
        InfeasibleError: nothing fits.
    """
    order = [(int(rows), int(length)) for rows, length in trace]
    load = request.pins.expert_load
    graphs = {size: with_load(capture_of(size).graph, load) for size in dict.fromkeys(order)}
    plans = on_best_mesh(graphs, order, cluster, n, request)
    by_graph = {graphs[size].fingerprint: plan for size, plan in plans.plans.items()}
    own = by_graph[captured.graph.fingerprint]
    notes = *notes_on(captured.graph), *note_on_small(captured.graph, request.pins.params, [own])
    if parse_offload(request.pins.offload).is_auto:
        notes = *notes, "offload: activations alone may wait on the host: buckets would keep other parameters there"
    first = Plan.alone(own, name, request.pins, notes)
    return BucketsTogether(Outcome(first, captured), by_graph, len(set(plans.layouts.values())) > 1)


def relayout_seconds(graph: Graph, src: Layout, dst: Layout, prices: Pricer, optimizer: str) -> float:
    """Return what it takes to move all parameters, and the optimizer's state with them, from one layout to another."""
    seconds = 0.0
    for _, node in graph.of_kind("param"):
        before, after = src.get(node.target), dst.get(node.target)
        if before is None or after is None or before == after:
            continue
        n_bytes = node.out.item_bytes
        by = stepped_by(graph, node, optimizer)
        tensors = 1 + (optimizer_state_bytes(by, 1, n_bytes, 0) // n_bytes if node.needs_grad else 0)
        seconds += tensors * sum(prices.step(node.out, False, a, b) for _, a, b in steps_between(before, after))
    return seconds


def steps_between(src: State, dst: State) -> list[tuple[int, State, State]]:
    """Return the changes of single axes that bring a stored tensor from one state to another.

    They lead through the whole tensor if there is no other way.
    """
    whole = State(INVARIANT for _ in src)
    src, dst = (State(p if p.is_shard else INVARIANT for p in state) for state in (src, dst))
    steps = path(src, dst)
    if steps is None:
        steps = [*(path(src, whole) or ()), *(path(whole, dst) or ())]
    return [(axis, a, b) for axis, a, b in steps]


def _layout(plan: StagePlan) -> Layout:
    return {name: choice.stored for name, choice in plan.params.items()}


def _choices(
    buckets: Sequence[Size], layouts: int, takes: Callable[[Mapping[Size, int]], float]
) -> Iterator[dict[Size, int]]:
    """Return ways to give buckets layouts: all or, if too many, those on the way down from one layout for all."""
    if layouts ** len(buckets) <= MOST_CHOICES:
        for numbers in product(range(layouts), repeat=len(buckets)):
            yield dict(zip(buckets, numbers, strict=True))
        return
    for first in range(layouts):
        chosen = dict.fromkeys(buckets, first)
        better = True
        while better:
            better = False
            for size, number in product(buckets, range(layouts)):
                changed = {**chosen, size: number}
                if takes(changed) < takes(chosen):
                    chosen, better = changed, True
        yield chosen
