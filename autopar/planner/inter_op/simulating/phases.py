"""Phases of a plan's seconds within a step: the forward of a microbatch, its two backward halves, once a step.

This is what a pipeline is simulated with. The gradients of a contraction's weights can be computed later than those of
its inputs; everything else of the backward belongs to the first half, recomputed forwards included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.planner.intra_op.building.hidden_seconds import Hidden, hidden
from autopar.planner.intra_op.building.parameter_load import NOTHING, ParameterLoad, beside_ops, parameter_load
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.ledger import recompute_seconds, use_of_link
from autopar.planner.intra_op.memory.walked_ledger import ledger
from autopar.planner.intra_op.plan_completion import needs
from autopar.plans.plan import StagePlan, reshard_key, segment_numbers
from autopar.rules.lowering_helpers.overlapped_steps import any_in_parts
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, strategy_named
from autopar.words.graph import Graph, Ref
from cost_models.costs import OpSeconds, StageSeconds, StageWork
from cost_models.host_link import UNUSED


@dataclass(frozen=True)
class Phases:
    """Seconds of one microbatch on one stage, and of what happens once a step.

    Collectives of parameters are counted by what is waited for: of those in every microbatch, in the phases of a
    microbatch. Once a step, ``gather_seconds`` come before the first forward, ``reduction_seconds`` follow the last
    backward, and ``optimizer_seconds`` follow the reductions of all stages.

    ``recompute_seconds`` are those of recomputed forwards: part of ``input_seconds``. The runtime does not split a
    backward that recomputes: what is recomputed for the inputs' gradients would have to wait for those of the weights.
    ``split_seconds`` are what a split backward takes more than a whole one, as far as a profile knows.
    """

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    gather_seconds: float = 0.0
    reduction_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    recompute_seconds: float = 0.0
    split_seconds: float = 0.0
    load: ParameterLoad = NOTHING

    @property
    def backward_seconds(self) -> float:
        """The whole backward of a microbatch."""
        return self.input_seconds + self.weight_seconds - self.split_seconds

    @property
    def step_seconds(self) -> float:
        """All that happens once a step."""
        return self.gather_seconds + self.reduction_seconds + self.optimizer_seconds


def phases(
    graph: Graph, plan: StagePlan, pricer: Pricer, rules: Sequence[Rule | None] | None = None
) -> Phases:  # fmt: skip
    """Return the phases of a plan; their sum over a step is the plan's price. ``rules`` may be given if they are known.

    ``rules``: of the graph, where they are at hand.
    """
    forward = total = weights = 0.0
    second = bool(plan.memory)  # something is done again in the backward
    rules = rules_of(graph) if rules is None else rules
    every = second or any_in_parts(rules)  # whether strategies of all nodes are asked for
    memo: dict[object, tuple[Strategy, OpSeconds]] = {}
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
                pricer.of_kernel(graph, node),
            )
            if key not in memo:
                strategy = strategy_named(graph, node, rule, plan.ops[node.name])
                memo[key] = strategy, pricer.phases(graph, node, rule, strategy)
            same, spent = memo[key]
            chosen[i] = strategy_named(graph, node, rule, plan.ops[node.name]) if every else same
            forward, total, weights = forward + spent.forward, total + spent.total, weights + spent.weights
            splits.append(spent.split)
    for i, node in enumerate(graph.nodes):
        for out, spec in enumerate(node.outs):
            if spec is None:
                continue
            grad = node.needs_grad and spec.is_float
            for src, dst in plan.reshard_paths.get(reshard_key(graph, Ref(i, out)), ()):
                there, back = pricer.step_parts(spec, grad, src, dst)
                forward, total = forward + there, total + there + back
    beside = Hidden()
    if every:
        segment_of = segment_numbers(graph, plan.recompute)
        beside = sum(hidden(graph, rules, pricer, chosen, plan.reshard_paths, segment_of).values(), Hidden())
    forward, total = forward - beside.forward, total - beside.total
    again, link = 0.0, UNUSED
    if second:
        holds = ledger(graph, rules, plan.mesh, chosen, plan.reshard_paths, plan.memory, kernels=pricer.kernels)
        again = sum(recompute_seconds(graph, rules, pricer, chosen, plan.reshard_paths, holds))
        link = use_of_link(graph, rules, pricer, chosen, holds)
        forward += link.waits[0]  # the rest of `again` is the backward's
    total += again
    inputs = max(0.0, total - forward - weights)  # rounding: all of it may be the weights'
    later = beside.backward - beside.split  # gradients of weights that a split backward computes beside nothing
    owned = {i: plan.params[node.target] for i, node in graph.of_kind("param")}
    load = parameter_load(graph, rules, pricer, chosen, owned, plan.microbatches, plan.optimizer, link)
    waits = load.exposed()
    ops = Phases(
        forward + waits.forward_each, inputs + later + waits.backward_each, weights, waits.gathers, waits.reductions,
        optimizer_seconds=load.host_seconds, recompute_seconds=again, split_seconds=later, load=load,
    )  # fmt: skip

    def work() -> StageWork:
        outputs = {k: state for k, state in enumerate(plan.outputs) if state is not None}
        made_as, _, _ = needs(graph, plan.mesh, chosen, owned, plan.buffers, plan.inputs, outputs)
        return beside_ops(graph, pricer, owned, made_as, plan.microbatches, plan.optimizer)

    return _with_overheads(ops, sum(splits), graph, pricer.costs.stage(work))


def _with_overheads(ops: Phases, split_seconds: float, graph: Graph, extra: StageSeconds | None) -> Phases:
    """Return the phases with the executor's overheads, and with longer halves, where the cost source has these.

    ``ops`` are the phases of operators and collectives, ``split_seconds`` what the halves of all operators take more,
    ``extra`` the overheads.
    """
    if extra is None:
        return ops
    backward = ops.backward_seconds + extra.backward
    if any(node.needs_grad for _, node in graph.of_kind("input")):
        weights = ops.weight_seconds + extra.weights
        inputs = ops.input_seconds + split_seconds + extra.inputs + extra.summed
    else:  # nobody waits for a gradient of this stage: all of its backward is that of its weights
        inputs = extra.inputs
        weights = ops.backward_seconds + extra.weights + extra.summed
    return replace(
        ops, forward_seconds=ops.forward_seconds + extra.forward, input_seconds=inputs, weight_seconds=weights,
        optimizer_seconds=ops.optimizer_seconds + extra.step, split_seconds=inputs + weights - backward,
    )  # fmt: skip
