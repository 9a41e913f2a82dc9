"""What stages with their plans give a simulator: seconds of phases and of what crosses between stages, and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.graph import Spec
from autopar.pipeline import StageChoice
from autopar.placements import State, path
from autopar.plan import StagePlan
from autopar.planner.inter_op.phases import phases
from autopar.planner.intra_op.price import pricer
from autopar.staging import StageGraph
from autopar.transfer import Load, Side, loads, transfer
from cost_models.pipeline import Edge, Schedule, Times, times
from hardware_profiles import Cluster


def timing_of(
    graphs: Sequence[StageGraph], choices: Sequence[StageChoice], schedule: Schedule, cluster: Cluster
) -> tuple[Times, float]:
    """What a schedule is simulated with, and the seconds that follow it once a step (gradients, gathers)."""
    own = [
        phases(stage.graph, choice.plan, pricer(cluster, choice.mesh, choice.devices))
        for stage, choice in zip(graphs, choices, strict=True)
    ]
    edges: dict[tuple[int, int], list[float]] = {}
    group = schedule.rank_of_stage
    for c in _crossings(graphs, choices, cluster):
        row = edges.setdefault((c.source, c.target), [0.0, 0.0])
        if group[c.source] == group[c.target]:  # not on the way between groups: the ranks themselves are busy with it
            a, b = own[c.source], own[c.target]
            own[c.source] = replace(a, input_seconds=a.input_seconds + c.backward_seconds)
            own[c.target] = replace(b, forward_seconds=b.forward_seconds + c.forward_seconds)
            continue
        row[0] += c.forward_seconds
        row[1] += c.backward_seconds
    whole = [bool(c.plan.recompute) for c in choices]  # a backward that recomputes is not split
    timing = times(
        len(graphs), [p.forward_seconds for p in own],
        [p.backward_seconds if w else p.input_seconds for w, p in zip(whole, own, strict=True)],
        [0.0 if w else p.weight_seconds for w, p in zip(whole, own, strict=True)],
        backward_seconds=[p.backward_seconds for p in own],
        edges=[Edge(*ends, *seconds) for ends, seconds in sorted(edges.items())],
        activation_bytes=[c.plan.kept_bytes for c in choices],
        static_bytes=[_static_bytes([choices[s].plan for s in held]) for held in schedule.stages_of_rank],
    )  # fmt: skip
    return timing, max(sum(own[s].step_seconds for s in held) for held in schedule.stages_of_rank)


def _static_bytes(plans: Sequence[StagePlan]) -> float:
    """What a group's stages hold all the time, and the segment that runs again: one at a time."""
    held = sum(p.price.memory_bytes - p.price.activation_bytes for p in plans)
    return held + max(p.price.again_bytes for p in plans)


@dataclass(frozen=True)
class _Crossing:
    """Seconds in which a tensor gets from one stage to another, and its gradient back."""

    source: int
    target: int
    forward_seconds: float
    backward_seconds: float


def _crossings(graphs: Sequence[StageGraph], choices: Sequence[StageChoice], cluster: Cluster) -> Iterator[_Crossing]:
    """One of every tensor that a stage takes from another."""
    for graph in graphs:
        here = choices[graph.number]
        for name, number in graph.takes:
            there = choices[number]
            node = next(n for _, n in graph.graph.of_kind("input") if n.target == name)
            out = there.plan.outputs[graphs[number].gives.index(name)]
            assert out is not None
            source, target = Side(out, there.mesh, there.devices), Side(here.plan.inputs[name], here.mesh, here.devices)
            yield _Crossing(
                number, graph.number, crossing_seconds(node.out, source, target, cluster),
                crossing_seconds(node.out, target, source, cluster) if node.needs_grad else 0.0,
            )  # fmt: skip


def crossing_seconds(spec: Spec, source: Side, target: Side, cluster: Cluster) -> float:
    """Seconds of what the runtime does with a tensor that crosses: the messages of the rank that sends or receives
    longest, one after the other, and the gathers where it is wanted whole.

    All messages are priced on the way from the first rank of one side to the first of the other.
    """
    near, far = source.devices, target.devices
    if not {*near} & {*far}:  # then it does not matter which devices they are
        near = tuple(range(len(source.devices)))
        far = tuple(range(len(near), len(near) + len(target.devices)))
    steps, busy = _crossing(spec, Side(source.state, source.mesh, near), Side(target.state, target.mesh, far))
    priced = pricer(cluster, target.mesh, target.devices)
    seconds = sum(priced.step_parts(spec, False, a, b)[0] for a, b in steps)
    if busy:
        a, b = source.devices[0], target.devices[0]
        if a == b:  # within a group
            b = next(d for d in target.devices if d != a)
        wire = pricer(cluster, (("pair", 2),), (a, b)).axes["pair"]
        seconds += max(n.n_messages * wire.seconds("send_recv", n.n_bytes / n.n_messages) for n in busy)
    return seconds


@lru_cache(maxsize=4096)
def _crossing(spec: Spec, source: Side, target: Side) -> tuple[tuple[tuple[State, State], ...], tuple[Load, ...]]:
    """The gathers at the target, and what ranks send and receive."""
    found = transfer(spec, source, target)
    steps = path(found.landing, target.state)
    assert steps is not None
    return tuple((a, b) for _, a, b in steps), loads(found)


__all__ = ["crossing_seconds", "timing_of"]
