"""When within a step a plan's seconds are spent: the forward of a microbatch, its two backward halves, once a step.

This is what a pipeline is simulated with. The gradients of a contraction's weights can be computed later than those of
its inputs; everything else of the backward belongs to the first half, recomputed forwards included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.inter_op.simulating.reduction_and_step import beside_ops
from autopar.planner.intra_op.building.hidden_seconds import Hidden, hidden
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.ledger import seconds_again
from autopar.planner.intra_op.memory.memory_walk import ledger
from autopar.plans.plan import StagePlan, route_key, segment_numbers
from autopar.rules.lowering_helpers.meanwhile import any_in_parts
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, strategy_named
from autopar.words.graph import Graph, Ref
from cost_models.costs import OpSeconds


@dataclass(frozen=True)
class Phases:
    """Seconds of one microbatch on one stage, and of what happens once a step.

    ``again_seconds`` are those of recomputed forwards: part of ``input_seconds``. The runtime does not split a
    backward that recomputes: what is made again for the inputs' gradients would have to wait for those of the weights.
    ``split_seconds`` are what a split backward takes more than a whole one, as far as a profile knows.
    """

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    step_seconds: float
    again_seconds: float = 0.0
    split_seconds: float = 0.0

    @property
    def backward_seconds(self) -> float:
        """The whole backward of a microbatch."""
        return self.input_seconds + self.weight_seconds - self.split_seconds


def phases(
    graph: Graph, plan: StagePlan, pricer: Pricer, rules: Sequence[Rule | None] | None = None
) -> Phases:  # fmt: skip
    """The phases of a plan; their sum over a step is the plan's price, and what a profile knows beside it.

    Args:
        rules: of the graph, where they are at hand.
    """
    forward = total = weights = 0.0
    second = bool(plan.memory)  # something is done again in the backward
    rules = rules_of(graph) if rules is None else rules
    every = second or any_in_parts(rules)  # whether strategies of all nodes are asked for
    memo: dict[object, OpSeconds] = {}
    splits: list[float] = []
    chosen: dict[int, Strategy] = {}
    for i, node in enumerate(graph.nodes):
        rule = rules[i]
        if node.kind == "op" and rule is not None:
            key = (
                id(rule),
                plan.ops[node.name],
                node.needs_grad,
                tuple(graph.nodes[r.node].needs_grad for r in node.refs),
            )
            if key not in memo or every:
                chosen[i] = strategy_named(graph, node, rule, plan.ops[node.name])
            if key not in memo:
                memo[key] = pricer.phases(graph, node, rule, chosen[i])
            spent = memo[key]
            forward, total, weights = forward + spent.forward, total + spent.total, weights + spent.weights
            splits.append(spent.split)
    for i, node in enumerate(graph.nodes):
        for out, spec in enumerate(node.outs):
            if spec is None:
                continue
            grad = node.needs_grad and spec.is_float
            for src, dst in plan.routes.get(route_key(graph, Ref(i, out)), ()):
                there, back = pricer.step_parts(spec, grad, src, dst)
                forward, total = forward + there, total + there + back
    beside = Hidden()
    if every:
        segment_of = segment_numbers(graph, plan.recompute)
        beside = sum(hidden(graph, rules, pricer, chosen, plan.routes, segment_of).values(), Hidden())
    forward, total = forward - beside.forward, total - beside.total
    again = 0.0
    if second:
        holds = ledger(graph, rules, plan.mesh, chosen, plan.routes, plan.memory, kernels=pricer.kernels)
        again = sum(seconds_again(graph, rules, pricer, chosen, plan.routes, holds))
    total += again
    inputs = max(0.0, total - forward - weights)  # rounding: all of it may be the weights'
    later = beside.backward - beside.split  # gradients of weights that a split backward computes beside nothing
    ops = Phases(forward, inputs + later, weights, plan.price.parameter_seconds, again, later)
    return _with_overheads(ops, sum(splits), graph, rules, plan, pricer)


def _with_overheads(
    ops: Phases, split_seconds: float, graph: Graph, rules: Sequence[Rule | None], plan: StagePlan, pricer: Pricer
) -> Phases:
    """The phases with what the executor does beside the ops, and with halves that take longer, where the cost source
    knows of these.

    Args:
        ops: what operators and collectives take.
        split_seconds: what the halves of all operators take more, each by itself.
    """
    extra = pricer.costs.stage(lambda: beside_ops(graph, rules, plan))
    if extra is None:
        return ops
    backward = ops.backward_seconds + extra.backward
    if any(node.needs_grad for _, node in graph.of_kind("input")):
        weights = ops.weight_seconds + extra.weights
        inputs = ops.input_seconds + split_seconds + extra.inputs + extra.summed
    else:  # nobody waits for a gradient of this stage: all of its backward is that of its weights
        inputs = extra.inputs
        weights = ops.backward_seconds + extra.weights + extra.summed
    return Phases(
        ops.forward_seconds + extra.forward, inputs, weights, ops.step_seconds + extra.step,
        ops.again_seconds, inputs + weights - backward,
    )  # fmt: skip


__all__ = ["Phases", "phases"]
