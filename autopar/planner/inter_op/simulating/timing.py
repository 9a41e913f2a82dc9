"""Input of the simulator from stages with their plans: seconds of phases and of transfers between stages, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.intra_op.building.price import pricer
from autopar.plans.plan import StagePlan
from autopar.plans.stage_graphs import StageGraph
from autopar.plans.transfer import Load, Side, loads, transfer
from autopar.words.graph import Spec
from autopar.words.placements import State, path
from cost_models.costs import costs_of
from cost_models.schedules import ASYNCHRONOUS_KINDS, Edge, Schedule, Timeline, Times, simulate, times
from cost_models.schedules.asynchronous import steady, updates_of_step
from hardware_profiles import Cluster


@dataclass(frozen=True)
class OnceAStep:
    """Seconds of every group of devices before, behind and after the actions of a schedule.

    Attributes:
        gathers: seconds of gathers of parameters, before the first action.
        reductions: seconds of reductions of gradients, behind the last one.
        optimizer: after the reductions of all groups.
    """

    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    optimizer: tuple[float, ...]

    @staticmethod
    def of(stages: Sequence[Parts], groups: Sequence[Sequence[int]]) -> OnceAStep:
        """Return the seconds of groups, from those of their stages."""
        def total(of_stage: Callable[[Parts], float]) -> tuple[float, ...]:
            return tuple(sum(of_stage(stages[s]) for s in of_group) for of_group in groups)

        return OnceAStep(
            total(lambda p: p.gather_seconds), total(lambda p: p.reduction_seconds),
            total(lambda p: p.optimizer_seconds),
        )  # fmt: skip

    def more(self, timeline: Timeline) -> float:
        """Return the seconds that a step takes more than its schedule.

        While a group waits for its first microbatch it gathers, and the last group to be done is not the one that is
        done first with its gradients.
        """
        starts = [row[0] if row else 0.0 for row in timeline.starts]
        ends = [row[-1] if row else 0.0 for row in timeline.ends]
        before = max(max(0.0, gather - start) for gather, start in zip(self.gathers, starts, strict=True))
        behind = max(end + reduction for end, reduction in zip(ends, self.reductions, strict=True)) - max(ends)
        return before + behind + max(self.optimizer)

    def seconds(self, timeline: Timeline) -> float:
        """Return the seconds of a whole step."""
        return timeline.makespan_seconds + self.more(timeline)


def step_of(schedule: Schedule, timing: Times, once: OnceAStep) -> tuple[Timeline, float]:
    """Return a step action by action, and its seconds; of an asynchronous schedule, a step in a full pipeline."""
    if schedule.name in ASYNCHRONOUS_KINDS:
        of_group = [sum(parts) for parts in zip(once.gathers, once.reductions, once.optimizer, strict=True)]
        each = [updates_of_step(schedule) * of_group[schedule.rank_of_stage[s]] for s in range(schedule.n_stages)]
        timeline = steady(schedule, timing, each)
        return timeline, timeline.makespan_seconds
    timeline = simulate(schedule, timing)
    return timeline, once.seconds(timeline)


class Parts(Protocol):
    """Seconds of a stage once a step."""

    @property
    def gather_seconds(self) -> float:
        """Gathers of parameters."""

    @property
    def reduction_seconds(self) -> float:
        """Reductions of gradients."""

    @property
    def optimizer_seconds(self) -> float:
        """The optimizer's step."""


def timing_of(
    graphs: Sequence[StageGraph], stages: Sequence[StagePlan], schedule: Schedule, cluster: Cluster,
    alike: Sequence[int] = (),
) -> tuple[Times, OnceAStep]:  # fmt: skip
    """Return the times that a schedule is simulated with, and those that a step takes in addition.

    ``alike`` has for each stage the first one with the same plan of the same operators, on devices alike, where that is
    known: its phases are found once.
    """
    first = list(alike) or list(range(len(stages)))
    by_first = {
        k: phases(graphs[k].graph, stages[k], pricer(cluster, stages[k].mesh, stages[k].devices)) for k in set(first)
    }
    of_stage = [by_first[k] for k in first]
    edges: dict[tuple[int, int], list[float]] = {}
    group = schedule.rank_of_stage
    transfers = [(stage_edge, graph.number) for graph in graphs for stage_edge in graph.takes]
    for stage_edge, target in transfers:
        source = stage_edge.source
        made_as, wanted = stage_edge.sides(stages, target)
        there = stage_edge_seconds(stage_edge.spec, made_as, wanted, cluster)
        back = stage_edge_seconds(stage_edge.spec, wanted, made_as, cluster) if stage_edge.needs_grad else 0.0
        row = edges.setdefault((source, target), [0.0, 0.0])
        if not cluster.software.hides_transfers and group[source] != group[target]:  # senders wait for their messages
            of_stage[source] = replace(of_stage[source], forward_seconds=of_stage[source].forward_seconds + there)
            of_stage[target] = replace(of_stage[target], input_seconds=of_stage[target].input_seconds + back)
            continue
        if group[source] == group[target]:  # not on the way between groups: the ranks themselves are busy with it
            of_stage[source] = replace(of_stage[source], input_seconds=of_stage[source].input_seconds + back)
            of_stage[target] = replace(of_stage[target], forward_seconds=of_stage[target].forward_seconds + there)
            continue
        row[0] += there
        row[1] += back
    whole = [stage.whole_backward for stage in stages]
    timing = times(
        len(graphs), [p.forward_seconds for p in of_stage],
        [p.backward_seconds if w else p.input_seconds for w, p in zip(whole, of_stage, strict=True)],
        [0.0 if w else p.weight_seconds for w, p in zip(whole, of_stage, strict=True)],
        backward_seconds=[p.backward_seconds for p in of_stage],
        edges=[Edge(*ends, *seconds) for ends, seconds in sorted(edges.items())],
        activation_bytes=[stage.kept_bytes for stage in stages],
        static_bytes=[_static_bytes([stages[s] for s in of_group]) for of_group in schedule.stages_of_rank],
    )  # fmt: skip
    return timing, OnceAStep.of(of_stage, schedule.stages_of_rank)


def _static_bytes(plans: Sequence[StagePlan]) -> float:
    """Return the persistent bytes of a group's stages, and at most their transient bytes: of one at a time."""
    return sum(p.price.stored_bytes for p in plans) + max(p.transient_bytes for p in plans)


def stage_edge_seconds(spec: Spec, source: Side, target: Side, cluster: Cluster) -> float:
    """Return the seconds of a transfer between stages: messages of the busiest rank, one by one, and gathers.

    All messages are priced on the route from the first rank of one side to the first of the other.
    """
    steps, busy = _apart(spec, source, target)
    priced = pricer(cluster, target.mesh, target.devices)
    seconds = sum(priced.step_parts(spec, False, a, b)[0] for a, b in steps)
    if busy:
        a, b = source.devices[0], target.devices[0]
        if a == b:  # within a group
            b = next(d for d in target.devices if d != a)
        costs = costs_of(cluster)
        seconds += max(n.n_messages * costs.transfer(a, b, n.n_bytes / n.n_messages) for n in busy)
    return seconds


def stage_edge_messages(spec: Spec, source: Side, target: Side) -> tuple[Load, ...]:
    """Return what each rank sends, and what each receives, of one transferred tensor; equal ones once."""
    return _apart(spec, source, target)[1]


def _apart(spec: Spec, source: Side, target: Side) -> tuple[tuple[tuple[State, State], ...], tuple[Load, ...]]:
    """Return :func:`_crossing`, computed once for all sides that differ only in their devices."""
    near, far = source.devices, target.devices
    if not {*near} & {*far}:  # then it does not matter which devices they are
        near = tuple(range(len(source.devices)))
        far = tuple(range(len(near), len(near) + len(target.devices)))
    return _crossing(spec, Side(source.state, source.mesh, near), Side(target.state, target.mesh, far))


@lru_cache(maxsize=4096)
def _crossing(spec: Spec, source: Side, target: Side) -> tuple[tuple[tuple[State, State], ...], tuple[Load, ...]]:
    """Return the gathers at the target, and what ranks send and receive."""
    moved = transfer(spec, source, target)
    steps = path(moved.landing, target.state)
    assert steps is not None
    return tuple((a, b) for _, a, b in steps), loads(moved)
