"""Which gathered copies a plan gathers again in the backward: as few seconds as possible for the bytes that it lacks.

What a copy frees is read off two ledgers of the plan, one that keeps every copy and one that gathers every one again.
Copies are taken in the order of seconds per byte until the plan fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from autopar.graph import Graph
from autopar.plan import StagePlan, route_key, segment_numbers
from autopar.planner.intra_op.ledger import Ledger, ledger
from autopar.planner.intra_op.price import Pricer
from autopar.regather import gathers
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named


def gathering_everything_again(
    graph: Graph, plan: StagePlan, decided: Callable[[Collection[str]], StagePlan]
) -> StagePlan:
    """The plan that keeps no gathered copy that it can gather again, or the plan itself if that frees nothing.

    Args:
        decided: the plan of the same cuts with these copies gathered again.
    """
    keys = gathers(graph, plan.mesh, plan.routes, segment_numbers(graph, plan.recompute))
    every = decided(keys) if keys else plan
    return every if every.price.memory_bytes < plan.price.memory_bytes else plan


def within(
    graph: Graph, plan: StagePlan, pricer: Pricer, limit: float, decided: Callable[[Collection[str]], StagePlan]
) -> StagePlan:
    """The plan with as many copies gathered again as it needs to fit ``limit`` bytes; all of them if it does not."""
    over = plan.price.memory_bytes - limit
    every = gathering_everything_again(graph, plan, decided) if over > 0 else plan
    if every is plan or every.price.memory_bytes > limit:
        return every
    kept, freed = _ledger(graph, plan, ()), _ledger(graph, plan, every.gather_again)
    before, after = _bytes_by_node(kept), _bytes_by_node(freed)
    seconds: dict[int, float] = {}
    for ref, a, b in freed.steps_again:
        more = pricer.step_parts(graph.spec(ref), False, a, b)[0]
        seconds[ref.node] = seconds.get(ref.node, 0.0) + more
    gain = {node: before.get(node, 0) - after.get(node, 0) for node in seconds}
    chosen: list[str] = []
    for node in sorted((n for n in gain if gain[n] > 0), key=lambda n: (seconds[n] / gain[n], n)):
        names = {route_key(graph, ref) for ref, _, _ in freed.steps_again if ref.node == node}
        chosen.extend(sorted(names))
        over -= plan.in_flight * gain[node]
        if over <= 0:
            break
    some = decided(chosen)
    return some if some.price.memory_bytes <= limit else every


def _ledger(graph: Graph, plan: StagePlan, again: Collection[str]) -> Ledger:
    rules = rules_of(graph)
    chosen = {i: strategy_named(graph, node, rules[i], plan.ops[node.name]) for i, node in graph.of_kind("op")}
    return ledger(graph, rules, plan.mesh, chosen, plan.routes, plan.recompute, again, plan.make_again)


def _bytes_by_node(holds: Ledger) -> dict[int, int]:
    by_node: dict[int, int] = {}
    for entry in holds.entries:
        if entry.decision == "keep":
            by_node[entry.since] = by_node.get(entry.since, 0) + entry.n_bytes
    return by_node


__all__ = ["gathering_everything_again", "within"]
