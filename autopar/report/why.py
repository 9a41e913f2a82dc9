"""The price of every strategy of an op, its neighbours staying as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isinf

from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.building.space import in_all_ways, strategies
from autopar.planner.intra_op.plan_completion import needs
from autopar.planner.intra_op.reshard import reshard_path
from autopar.plans.plan import ParamChoice, StagePlan, reshard_key
from autopar.rules.option_names import as_written
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, strategy_in_plan
from autopar.words.graph import Graph, Ref
from autopar.words.labels import matches, op_labels
from autopar.words.placements import State


@dataclass(frozen=True)
class Alternative:
    """Seconds of one strategy of an op, forward and backward; infinite if its neighbours cannot be reached.

    Attributes:
        cuts: axis -> factor; ``replicate`` where none is sharded.
        compute_seconds: seconds of the op, collectives inside it included.
        reshard_seconds: seconds of resharding its inputs and outputs from and to its neighbours' placements.
        parameter_seconds: gradient reductions and gathers of its parameters.
        stored_bytes: parameters, gradients and optimizer state of its parameters on one rank.
    """

    cuts: dict[str, str]
    chosen: bool
    compute_seconds: float
    reshard_seconds: float
    parameter_seconds: float
    stored_bytes: int

    @property
    def seconds(self) -> float:
        """The sum of the three parts."""
        return self.compute_seconds + self.reshard_seconds + self.parameter_seconds


def find_ops(graph: Graph, pattern: str) -> list[int]:
    """Return the numbers of the ops that a pattern names."""
    labels = op_labels(graph)
    return [i for i, node in enumerate(graph.nodes) if node.kind == "op" and matches(pattern, node, labels[node.name])]


def alternatives(graph: Graph, plan: StagePlan, priced: Pricer, i: int) -> list[Alternative]:
    """Return every strategy of node ``i``, cheapest first."""
    rules = rules_of(graph)
    node, rule, mesh = graph.nodes[i], rules[i], plan.mesh
    assert rule is not None
    chosen: dict[int, Strategy] = {}
    for k, n in enumerate(graph.nodes):
        if n.kind == "op":
            rule_there = rules[k]
            assert rule_there is not None
            chosen[k] = strategy_in_plan(graph, n, rule_there, plan.ops[n.name], mesh)
    owned = {k: plan.params[n.target] for k, n in graph.of_kind("param")}
    outputs = {k: state for k, state in enumerate(plan.outputs) if state is not None}
    rows = []
    every = [s for one in strategies(graph, node, rule, mesh) for s in in_all_ways(graph, node, rule, mesh, one)]
    for strategy in every:
        decided = {**chosen, i: strategy}
        kept, parameter_seconds, stored = _params(graph, plan, priced, i, strategy, owned)
        made_as, wanted, _ = needs(graph, mesh, decided, {**owned, **kept}, plan.buffers, plan.inputs, outputs)
        reshard = 0.0
        for ref in {*node.refs, *(Ref(i, k) for k, o in enumerate(node.outs) if o is not None)}:
            if ref in wanted:
                reshard += _route_seconds(graph, plan, priced, ref, made_as[ref], wanted[ref], strategy is chosen[i])
        compute, inside = priced.op(graph, node, rule, strategy)
        cuts = {axis: as_written(name) for (axis, _), name in zip(mesh, strategy.names, strict=True)}
        same = strategy.names == chosen[i].names
        rows.append(Alternative(cuts, same, compute + inside, reshard, parameter_seconds, stored))
    return sorted(rows, key=lambda r: (r.seconds, not r.chosen, sorted(r.cuts.items())))


def _route_seconds(
    graph: Graph, plan: StagePlan, priced: Pricer, ref: Ref, made_as: State, goals: Mapping[State, None], same: bool
) -> float:
    node, spec = graph.nodes[ref.node], graph.spec(ref)
    grad = node.needs_grad and spec.is_float
    if same:
        return sum(priced.step(spec, grad, a, b) for a, b in plan.reshard_paths.get(reshard_key(graph, ref), ()))
    cheapest = reshard_path(spec.shape, plan.mesh, grad, made_as, list(goals), partial(priced.step, spec, grad))
    return float("inf") if cheapest is None else cheapest[0]


def _params(
    graph: Graph, plan: StagePlan, priced: Pricer, i: int, strategy: Strategy, owned: Mapping[int, ParamChoice]
) -> tuple[dict[int, ParamChoice], float, int]:
    """Return ``(choice, seconds, stored bytes)`` of the parameters that node ``i`` reads, at their best storage.

    A parameter with the same use keeps its storage. Another takes the fastest storage that needs no more memory than
    now, if there is one; else the smallest.
    """
    kept: dict[int, ParamChoice] = {}
    seconds, stored = 0.0, 0
    for ref, state in zip(graph.nodes[i].refs, strategy.ins, strict=True):
        node = graph.nodes[ref.node]
        if node.kind != "param" or ref.node in kept:
            continue
        use = state.started(node.needs_grad)
        now = owned[ref.node]

        def cost(choice: ParamChoice, node=node) -> P.ParamCost:  # type: ignore[no-untyped-def]
            return P.cost(P.ParamInStep.of(graph, node, plan.optimizer, plan.microbatches), choice, priced)

        others = [now] if use == now.used else [
            replace(choice, on_host=now.on_host) for choice in P.choices(node.out, node.needs_grad, [use], plan.mesh)
        ]  # fmt: skip
        limit = cost(now).n_bytes
        fitting = [c for c in others if cost(c).n_bytes <= limit]
        if fitting:
            kept[ref.node] = min(fitting, key=lambda c: (cost(c).seconds, cost(c).n_bytes))
        elif others:
            kept[ref.node] = min(others, key=lambda c: (cost(c).n_bytes, cost(c).seconds))
        else:
            kept[ref.node] = now
        price = cost(kept[ref.node])
        seconds += price.seconds
        stored += price.parameter_bytes + price.gradient_bytes + price.optimizer_bytes
    return kept, seconds, stored


def possible(rows: list[Alternative]) -> list[Alternative]:
    """Return the alternatives whose neighbours can be reached."""
    return [r for r in rows if not isinf(r.seconds)]
