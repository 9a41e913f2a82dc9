"""What stages with their plans give a simulator: seconds of phases and of what crosses between stages, and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.pipeline import StageChoice
from autopar.placements import local_shape
from autopar.plan import Plan
from autopar.planner.phases import phases
from autopar.planner.price import Pricer, pricer
from autopar.staging import StageGraph
from cost_models import mesh_axes
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
    whole = [bool(c.plan.recompute) for c in choices]  # a backward that recomputes is not split
    timing = times(
        len(graphs), [p.forward_seconds for p in own],
        [p.backward_seconds if w else p.input_seconds for w, p in zip(whole, own, strict=True)],
        [0.0 if w else p.weight_seconds for w, p in zip(whole, own, strict=True)],
        backward_seconds=[p.backward_seconds for p in own],
        edges=_edges(graphs, choices, cluster), activation_bytes=[c.plan.kept_bytes for c in choices],
        static_bytes=[_static_bytes([choices[s].plan for s in held]) for held in schedule.stages_of_rank],
    )  # fmt: skip
    return timing, max(sum(own[s].step_seconds for s in held) for held in schedule.stages_of_rank)


def _static_bytes(plans: Sequence[Plan]) -> float:
    """What a group's stages hold all the time, and the segment that runs again: one at a time."""
    held = sum(p.price.memory_bytes - p.price.activation_bytes for p in plans)
    return held + max(p.price.again_bytes for p in plans)


def _edges(graphs: Sequence[StageGraph], choices: Sequence[StageChoice], cluster: Cluster) -> list[Edge]:
    """Seconds on the wire between stages: every piece crosses once, and is gathered where it is wanted whole."""
    found: dict[tuple[int, int], list[float]] = {}
    for graph in graphs:
        here = choices[graph.number]
        for name, source in graph.takes:
            there = choices[source]
            node = next(n for _, n in graph.graph.of_kind("input") if n.target == name)
            out = there.plan.outputs[graphs[source].gives.index(name)]
            assert out is not None
            arriving = here.plan.inputs[name]
            row = found.setdefault((source, graph.number), [0.0, 0.0])
            if there.devices != here.devices:
                pair = mesh_axes(cluster, {"pair": 2}, [there.devices[0], here.devices[0]])["pair"]
                wire = pair.seconds("send_recv", node.out.n_bytes / min(len(there.devices), len(here.devices)))
                row[0] += wire
                row[1] += wire if node.needs_grad else 0.0
            row[0] += _gather(node.out.shape, node.out.item_bytes, arriving, here, cluster)
            row[1] += _gather(node.out.shape, node.out.item_bytes, out, there, cluster) if node.needs_grad else 0.0
    return [Edge(a, b, forward, backward) for (a, b), (forward, backward) in sorted(found.items())]


def _gather(
    shape: tuple[int, ...], item_bytes: int, state: tuple[str, ...], choice: StageChoice, cluster: Cluster
) -> float:
    priced: Pricer = pricer(cluster, choice.mesh, choice.devices)
    n_bytes = prod(local_shape(shape, state, choice.mesh)) * item_bytes
    axes = [a for p, (a, size) in zip(state, choice.mesh, strict=True) if p[0] != "S" and size > 1]
    return sum(priced.axes[a].seconds("all_gather", n_bytes) for a in axes)


__all__ = ["timing_of"]
