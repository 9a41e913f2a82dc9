"""Seconds of collectives that overlap with computation (:mod:`~autopar.rules.lowering_helpers.overlapped_steps`).

A collective and the computation that overlaps with it take as long as the longer of the two, so the shorter one is
hidden. In the backward the gradients of a product's weights overlap too, unless a schedule computes them later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.planner.intra_op.building.price import Pricer
from autopar.plans.plan import StagePlan, segment_numbers
from autopar.rules.lowering_helpers.overlapped_steps import OverlappedStep, ReshardPaths, any_in_parts, beside
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy, strategy_named
from autopar.words.graph import Graph


class Hidden(NamedTuple):
    """Seconds of a microbatch that are no part of its price although operators and collectives take them.

    Attributes:
        forward, backward: seconds of the forward and of the backward.
        split: seconds of the backward if gradients of weights are computed later.
    """

    forward: float = 0.0
    backward: float = 0.0
    split: float = 0.0

    @property
    def total(self) -> float:
        """Seconds that are hidden in both passes."""
        return self.forward + self.backward

    def __add__(self, more: Hidden) -> Hidden:  # type: ignore[override]
        return Hidden(*(a + b for a, b in zip(self, more, strict=True)))


def hidden(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy],
    reshard_paths: ReshardPaths, segment_of: Mapping[int, int],
) -> dict[int, Hidden]:  # fmt: skip
    """Return what is hidden of the collectives of each operator that overlaps with others, by its number."""
    memo: dict[object, Hidden] = {}
    seconds: dict[int, Hidden] = {}
    for overlap in beside(graph, rules, pricer.mesh, chosen, reshard_paths, segment_of):
        runs = overlap.op, *overlap.first, *overlap.last
        key = tuple([(graph.alike[k], id(chosen[k])) for k in runs]), len(overlap.first)
        if key not in memo:
            memo[key] = hidden_of(graph, rules, pricer, chosen, overlap)
        seconds[overlap.op] = memo[key]
    return seconds


def hidden_in(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, plan: StagePlan, i: int
) -> tuple[tuple[int, ...], float]:
    """Return the operators that overlap with the collectives of operator ``i``, and the hidden seconds, both passes."""
    if not any_in_parts([rules[i]]):
        return (), 0.0
    chosen = {k: strategy_named(graph, node, rules[k], plan.ops[node.name]) for k, node in graph.of_kind("op")}
    segment_of = segment_numbers(graph, plan.recompute)
    for overlap in beside(graph, rules, pricer.mesh, chosen, plan.reshard_paths, segment_of):
        if overlap.op == i:
            spent = hidden_of(graph, rules, pricer, chosen, overlap)
            return (*overlap.first, *overlap.last), spent.total
    return (), 0.0


def hidden_of(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy], overlap: OverlappedStep
) -> Hidden:
    """Return what is hidden of the collectives of one operator."""
    rule = rules[overlap.op]
    assert rule is not None
    node, strategy = graph.nodes[overlap.op], chosen[overlap.op]
    first, last = (_computed(graph, rules, pricer, chosen, others) for others in (overlap.first, overlap.last))
    forth, back = pricer.chunked(graph, node, rule, strategy)
    if forth.chunks > 1:
        own = pricer.compute(graph, node, rule, strategy)
        behind = own.total - own.forward
        alone = back.backward(behind)
        return Hidden(
            forth.forward(own.forward) + first.forward + last.forward
            - forth.forward(own.forward, first.forward, last.forward),
            alone + first.backward + last.backward - back.backward(behind, first.backward, last.backward),
            alone + first.split + last.split - back.backward(behind, first.split, last.split),
        )  # fmt: skip
    waits, total = pricer.waits(graph, node, rule, strategy), Hidden()
    for when, beside_it in (("first", first), ("last", last)):
        total += Hidden(*map(min, (waits[when][0], waits[when][1], waits[when][1]), beside_it))
    return total


def _computed(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy], others: Sequence[int]
) -> Hidden:
    """Return the seconds that operators compute, which may be hidden."""
    total = Hidden()
    for k in others:
        rule = rules[k]
        assert rule is not None
        spent = pricer.compute(graph, graph.nodes[k], rule, chosen[k])
        behind = spent.total - spent.forward
        total += Hidden(spent.forward, behind, behind - spent.weights)
    return total
