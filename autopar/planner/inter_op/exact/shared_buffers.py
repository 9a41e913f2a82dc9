"""Buffers that several stages on the same devices read: a rank stores one tensor for all of them, so they agree on how.

Stages are solved one by one, and each would place a buffer (``inv_freq`` of a rotary embedding, a mask) as its own
operators want it. Where two stages of a group of devices differ, all of them store that buffer whole, and each cuts
what it reads out of it: a slice, which costs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.plan_completion import complete
from autopar.plans.device_groups import stored_differently
from autopar.plans.plan import StagePlan
from autopar.plans.stage_graphs import StageGraph
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph
from autopar.words.placements import State, whole_state
from cost_models.schedules import Schedule
from hardware_profiles import Cluster


def with_agreed_buffers(
    graphs: Sequence[StageGraph], stages: Sequence[StagePlan], schedule: Schedule, cluster: Cluster
) -> list[StagePlan]:
    """Return the stages' plans such that stages of a group of devices store each buffer in one placement."""
    agreed = list(stages)
    for of_group in schedule.stages_of_rank:
        names = stored_differently([(stages[s].mesh, stages[s].buffers) for s in of_group])
        for s in of_group:
            whole = {name: whole_state(stages[s].mesh) for name in names if name in stages[s].buffers}
            if any(stages[s].buffers[name] != state for name, state in whole.items()):
                agreed[s] = with_buffers(graphs[s].graph, stages[s], whole, cluster)
    return agreed


def with_buffers(graph: Graph, plan: StagePlan, changed: dict[str, State], cluster: Cluster) -> StagePlan:
    """Return the same decisions with some buffers, by name, stored in other placements, and priced anew."""
    rules = rules_of(graph)
    decided = {
        i: strategy_named(graph, node, rules[i], plan.ops[node.name])
        for i, node in enumerate(graph.nodes) if node.kind == "op"
    }  # fmt: skip
    params = {i: plan.params[node.target] for i, node in graph.of_kind("param")}
    outputs = {position: state for position, state in enumerate(plan.outputs) if state is not None}
    done = complete(
        graph, rules, pricer(cluster, plan.mesh, plan.devices), decided, params, outputs, inputs=plan.inputs,
        buffers={**plan.buffers, **changed}, optimizer=plan.optimizer, microbatches=plan.microbatches,
        in_flight=plan.in_flight, memory=plan.memory,
    )  # fmt: skip
    return replace(done, solution=plan.solution)
