"""What a stage of a pipeline does beside its ops: gradients that are added up, parameters that are stepped.

How long that takes, and what else the executor does, is the cost source's business (:mod:`cost_models.costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.plans.plan import StagePlan
from autopar.rules.notation import Rule
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph, Ref
from autopar.words.pieces import local_shape
from autopar.words.placements import State, whole_state
from cost_models.costs import StageWork


def beside_ops(graph: Graph, rules: Sequence[Rule | None], plan: StagePlan) -> StageWork:
    """What one rank does on a stage beside operators."""
    summed: list[tuple[int, float]] = []
    for ref, readers in graph.consumers.items():
        spec = graph.spec(ref)
        node = graph.nodes[ref.node]
        if node.needs_grad and spec.is_float and node.kind != "buffer":
            paths = sum(graph.nodes[i].needs_grad for i, _ in readers)
            if paths > 1:
                shape = local_shape(spec.shape, _made_in(plan, graph, rules, ref), plan.mesh)
                summed.append((paths - 1, prod(shape) * spec.item_bytes))
    parameters: list[tuple[float, float]] = []
    for _, node in graph.of_kind("param"):
        if node.needs_grad:
            choice = plan.params[node.target]
            shapes = (local_shape(node.out.shape, s, plan.mesh) for s in (choice.used, choice.stored))
            used, stored = (prod(shape) * node.out.item_bytes for shape in shapes)
            parameters.append((used, stored))
    n_ops = sum(n.kind == "op" and n.needs_grad for n in graph.nodes)
    return StageWork(summed, parameters, n_ops, plan.microbatches, plan.optimizer)


def _made_in(plan: StagePlan, graph: Graph, rules: Sequence[Rule | None], ref: Ref) -> State:
    """The state in which a tensor is made."""
    node = graph.nodes[ref.node]
    if node.kind == "param":
        return plan.params[node.target].used
    if node.kind == "input":
        return plan.inputs.get(node.target, whole_state(plan.mesh))
    rule = rules[ref.node]
    assert rule is not None  # an operator without one has no gradient
    before = sum(out is not None for out in node.outs[: ref.out])
    return strategy_named(graph, node, rule, plan.ops[node.name]).outs[before]


__all__ = ["beside_ops"]
