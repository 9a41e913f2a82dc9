"""Parts of a step's seconds, collective by collective, and the bytes of each kind.

The parts of a stage add up to the result of :func:`autopar.planner.inter_op.simulating.phases.phases`, and the parts of
a step to its seconds; what the operators and collectives do not explain (a profile's executor, moves between stages of
one group) is a part of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.hidden_seconds import Hidden, hidden
from autopar.planner.intra_op.building.parameter_load import parameter_load
from autopar.planner.intra_op.building.price import Pricer, pricer
from autopar.planner.intra_op.memory.ledger import Ledger, use_of_link, waiting_seconds
from autopar.planner.intra_op.memory.walked_ledger import ledger
from autopar.plans.plan import Plan, StagePlan, reshard_key, segment_numbers
from autopar.plans.stage_graphs import StageGraph
from autopar.report.on_host import parameter_copies
from autopar.rules.local_calls import collectives_inside, cuts_of
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, grads_of, strategy_named
from autopar.words.graph import Graph, Node, Ref, Spec
from autopar.words.placements import State, Step
from autopar.words.shards import elements_moved
from cost_models.host_link import UNUSED, HostLinkUse
from cost_models.schedules import Timeline
from hardware_profiles import Cluster

FORWARD, BACKWARD, AGAIN, SLICES = "forward compute", "backward compute", "recomputed forwards", "slices and copies"
HOST_COPIES = "copies between device and host, of parameters"
BESIDE, IDLE, LATER = (
    "executor, and moves within a group",
    "idle: bubbles and transfers",
    "waiting at the end of the step",
)


OPTIMIZER = "optimizer"


def _sums() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclass
class StageTally:
    """Seconds and traffic of one stage.

    Attributes:
        seconds: the seconds of one microbatch, by kind: :data:`FORWARD`, ..., ``all_reduce over tensor``.
        forward_moves, backward_moves: the part of these that collectives take in each pass.
        once: once per step, by kind: exposed collectives of parameters, and the optimizer.
        traffic: ``{(axis, kind of collective): bytes of buffers}`` of a whole step.
    """

    seconds: defaultdict[str, float] = field(default_factory=_sums)
    forward_moves: float = 0.0
    backward_moves: float = 0.0
    once: defaultdict[str, float] = field(default_factory=_sums)
    traffic: defaultdict[tuple[str, str], float] = field(default_factory=_sums)

    def collective(self, kind: str, axis: str, seconds: float, n_bytes: float, backward: bool, times: int) -> None:
        """Count one collective of a microbatch, of which a step has ``times``."""
        self.seconds[f"{kind} over {axis}"] += seconds
        self.traffic[axis, kind] += n_bytes * times
        if backward:
            self.backward_moves += seconds
        else:
            self.forward_moves += seconds


def stage_tally(graph: Graph, stage: StagePlan, priced: Pricer) -> StageTally:
    """Return the seconds and traffic of a stage."""
    tally, rules = StageTally(), rules_of(graph)
    chosen: dict[int, Strategy] = {}
    for i, node in enumerate(graph.nodes):
        rule = rules[i]
        if node.kind == "op" and rule is not None:
            chosen[i] = strategy_named(graph, node, rule, stage.ops[node.name])
            compute = priced.compute(graph, node, rule, chosen[i])
            tally.seconds[FORWARD] += compute.forward
            tally.seconds[BACKWARD] += compute.total - compute.forward
            _inside(tally, graph, stage, priced, node, rule, chosen[i])
        for out, spec in enumerate(node.outs):
            if spec is not None:
                for src, dst in stage.reshard_paths.get(reshard_key(graph, Ref(i, out)), ()):
                    _reshard(tally, spec, node.needs_grad and spec.is_float, src, dst, stage, priced)
    segment_of = segment_numbers(graph, stage.recompute)
    for i, less in hidden(graph, rules, priced, chosen, stage.reshard_paths, segment_of).items():
        _beside_others(tally, graph, stage, priced, i, chosen[i], less)
    link = UNUSED
    if stage.memory:
        holds = ledger(graph, rules, stage.mesh, chosen, stage.reshard_paths, stage.memory, kernels=priced.kernels)
        link = use_of_link(graph, rules, priced, chosen, holds)
        _again(tally, graph, stage, priced, chosen, holds)
    _parameters(tally, graph, stage, priced, chosen, link)
    return tally


def _parameters(
    tally: StageTally, graph: Graph, stage: StagePlan, priced: Pricer, chosen: dict[int, Strategy], link: HostLinkUse
) -> None:
    """Count the exposed collectives of parameters, their copies between device and host, and the optimizer's step."""
    owned = {i: stage.params[node.target] for i, node in graph.of_kind("param")}
    load = parameter_load(graph, rules_of(graph), priced, chosen, owned, stage.microbatches, stage.optimizer, link)
    shown = [waits / alone if alone else 0.0 for waits, alone in zip(load.exposed(), load.collectives, strict=True)]
    for i, choice in owned.items():
        node = graph.nodes[i]
        for axis, kind, n_bytes, is_gather in P.param_collectives(
            node.out, node.needs_grad, choice, stage.mesh, graph.precision
        ):
            seconds = P.bucketed_seconds(priced.axes[axis], kind, n_bytes, priced.costs.bucket_bytes)
            name = f"{kind} over {axis}, of parameters"
            for place in P.places_of(choice, node.needs_grad, is_gather):
                if place < 2:
                    tally.once[name] += seconds * shown[place]
                    tally.traffic[axis, kind] += n_bytes
                    continue
                tally.seconds[name] += seconds * shown[place]
                tally.traffic[axis, kind] += n_bytes * stage.microbatches
                if place == 2:
                    tally.forward_moves += seconds * shown[place]
                else:
                    tally.backward_moves += seconds * shown[place]
        if choice.on_host:
            copies = parameter_copies(graph, node, choice, priced)
            tally.once[HOST_COPIES] += copies.gathers * shown[0] + copies.reductions * shown[1]
            forward, backward = copies.forward_each * shown[2], copies.backward_each * shown[3]
            tally.seconds[HOST_COPIES] += forward + backward
            tally.forward_moves, tally.backward_moves = tally.forward_moves + forward, tally.backward_moves + backward
    if stage.price.optimizer_seconds:
        tally.once[OPTIMIZER] += stage.price.optimizer_seconds


def _inside(
    tally: StageTally, graph: Graph, stage: StagePlan, priced: Pricer, node: Node, rule: Rule, strategy: Strategy
) -> None:
    """Count the collectives inside an operator; those that overlap its compute count by their exposed part."""
    pieces, axes = cuts_of(rule, strategy.options, stage.mesh)
    differentiable, sizes = any(grads_of(graph, node)[1]), stage.mesh.size_of
    comms = [
        (comm, axis, n_bytes * times, priced.axes[axis].seconds(comm.kind, n_bytes) * times)
        for comm, axis, n_bytes, times in collectives_inside(rule, pieces, axes, differentiable, sizes)
    ]
    alone = sum(seconds for *_, seconds in comms)
    if not alone:
        return
    shown = priced.op(graph, node, rule, strategy)[1] / alone
    for comm, axis, moved, seconds in comms:
        tally.collective(comm.kind, axis, seconds * shown, moved, comm.backward, stage.microbatches)


def _beside_others(
    tally: StageTally, graph: Graph, stage: StagePlan, priced: Pricer, i: int, strategy: Strategy, less: Hidden,
    again: bool = False,
) -> None:  # fmt: skip
    """Subtract the part of an operator's collectives that overlaps other operators, from each of them alike.

    ``again`` stands for a recomputed forward, in the backward.
    """
    rule = rules_of(graph)[i]
    assert rule is not None
    differentiable, sizes = any(grads_of(graph, graph.nodes[i])[1]), stage.mesh.size_of
    inside = collectives_inside(rule, *cuts_of(rule, strategy.options, stage.mesh), differentiable, sizes)
    may_hide = [
        (comm, axis, times * priced.axes[axis].seconds(comm.kind, n)) for comm, axis, n, times in inside if comm.when
    ]
    for backward, seconds in ((False, less.forward), (True, 0.0 if again else less.backward)):
        of_pass = [(comm, axis, spent) for comm, axis, spent in may_hide if comm.backward == backward]
        alone = sum(spent for *_, spent in of_pass)
        for comm, axis, spent in of_pass if seconds else ():
            tally.collective(comm.kind, axis, -seconds * spent / alone, 0, backward or again, stage.microbatches)


def _reshard(
    tally: StageTally, spec: Spec, grad: bool, src: State, dst: State, stage: StagePlan, priced: Pricer,
    forward_only: bool = False,
) -> None:  # fmt: skip
    """Count one step of a reshard path: its collective, or the local slice in its place, in both directions."""
    step = Step.between(src, dst)
    axis = stage.mesh.name(step.axis)
    n_bytes = elements_moved(spec.shape, src, dst, stage.mesh) * spec.item_bytes
    ways = zip(step.collectives, priced.step_parts(spec, grad, src, dst), strict=True)
    for backward, (kind, seconds) in enumerate(ways):
        if backward and (forward_only or not grad):
            continue
        if kind is None:
            tally.seconds[SLICES] += seconds
        elif seconds:
            tally.collective(kind, axis, seconds, n_bytes, bool(backward), stage.microbatches)


def _again(
    tally: StageTally, graph: Graph, stage: StagePlan, priced: Pricer, chosen: dict[int, Strategy], holds: Ledger
) -> None:
    """Count recomputation in the backward."""
    rules = rules_of(graph)
    steps = list(holds.steps_again)
    tally.seconds[SLICES] += sum(waiting_seconds(graph, rules, priced, chosen, holds).values())
    segment_of = segment_numbers(graph, stage.recompute)
    runs_again = {i for segment in holds.segments if segment.active for i in segment.ops}
    for i, less in hidden(graph, rules, priced, chosen, stage.reshard_paths, segment_of).items():
        if i in runs_again:
            _beside_others(tally, graph, stage, priced, i, chosen[i], less, again=True)
    for segment in holds.segments:
        for i in segment.ops if segment.active else ():
            rule = rules[i]
            assert rule is not None
            compute, inside = priced.forward(graph, graph.nodes[i], rule, chosen[i])
            tally.seconds[AGAIN] += compute
            pieces, axes = cuts_of(rule, chosen[i].options, stage.mesh)
            comms = list(collectives_inside(rule, pieces, axes, False, stage.mesh.size_of))
            for comm, axis, n_bytes, times in comms:
                moved = n_bytes * times
                tally.collective(comm.kind, axis, inside / len(comms), moved, True, stage.microbatches)
        steps += segment.steps if segment.active else ()
    for ref, src, dst in steps:
        _reshard(tally, graph.spec(ref), False, src, dst, stage, priced, forward_only=True)


def tallies(graphs: Sequence[StageGraph], plan: Plan, cluster: Cluster) -> list[StageTally]:
    """Return the tallies of all stages."""
    return [
        stage_tally(part.graph, stage, pricer(cluster, stage.mesh, stage.devices))
        for part, stage in zip(graphs, plan.stages, strict=True)
    ]


def step_parts(plan: Plan, timeline: Timeline, of_stages: Sequence[StageTally]) -> dict[str, float]:
    """Return the seconds of a step by kind, averaged over all groups of devices; their sum is the step."""
    schedule, parts = plan.schedule, _sums()
    once_longest = plan.seconds - timeline.makespan_seconds
    for group, stages in enumerate(schedule.stages_of_rank):
        explained = 0.0
        for number in stages:
            for kind, seconds in of_stages[number].seconds.items():
                parts[kind] += seconds * plan.microbatches
                explained += seconds * plan.microbatches
        parts[BESIDE] += timeline.busy_seconds[group] - explained
        parts[IDLE] += timeline.idle_seconds[group]
        once = [item for number in stages for item in of_stages[number].once.items()]
        for kind, seconds in once:
            parts[kind] += seconds
        rest = once_longest - sum(seconds for _, seconds in once)
        parts[LATER if rest > 0 else IDLE] += rest  # what a group does once a step may pass while others compute
    least = 1e-9 * plan.seconds
    return {kind: total / schedule.n_ranks for kind, total in parts.items() if abs(total) / schedule.n_ranks > least}
