"""The load of routed experts in a graph, where rules, and with them prices, find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from autopar.errors import PlanError, closest
from autopar.plans.plan import Plan
from autopar.rules.experts.expert_block import BLOCK, TRAVEL
from autopar.rules.experts.experts import EXPERTS
from autopar.rules.option_names import factor_and_block
from autopar.words.graph import Graph, Node
from autopar.words.labels import matches, op_labels
from autopar.words.load_shares import EVERY, Load, busiest, uniform

ROUTED = (EXPERTS, BLOCK)
EVEN = 1e-3
"""A rank that has at most this part more than an equal share is not told of."""
NAMED = 3
"""Modules that a note names."""
NONE = (
    "the model has none: experts with a capacity (einsum('sec,sm->ecm', ...), bmm) and those that compute every token "
    "have as many rows each, whatever the router says; they are cut as a batch of matrices"
)


def experts_of(graph: Graph, node: Node) -> int:
    """Return the number of experts of an operator of routed experts."""
    return next(graph.spec(ref).shape[0] for ref in node.refs[1:2])


def with_load(graph: Graph, loads: Mapping[str, Load]) -> Graph:
    """Return the graph with the load of each operator of routed experts; a later pattern overrides an earlier one.

    Raises:
        PlanError: a pattern matches none, or the experts are more or fewer than those that the load is for.
    """
    if dict(loads) == graph.expert_load:
        return graph
    labels = op_labels(graph)
    routed = [node for node in graph.nodes if node.target in ROUTED]
    chosen: dict[str, Load] = {}
    for pattern, load in loads.items():
        those = [n for n in routed if pattern == EVERY or matches(pattern, n, labels[n.name])]
        if not those:
            modules = list(dict.fromkeys(n.module for n in routed))
            said = closest(pattern, modules) if modules else NONE
            raise PlanError(f"expert_load['{pattern}'] matches no routed experts; {said}")
        for node in those:
            if experts_of(graph, node) != len(load):
                raise PlanError(
                    f"expert_load['{pattern}'] is of {len(load)} experts, {node.where} has {experts_of(graph, node)}; "
                    "give one number for each, by patterns of modules where these have different numbers"
                )
            chosen[node.name] = load
    nodes = tuple(
        replace(node, load=chosen.get(node.name, ())) if node.target in ROUTED else node for node in graph.nodes
    )
    return replace(graph, nodes=nodes, expert_load=dict(loads))


def notes_on_load(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Say, for each way in which a plan cuts experts unevenly, which rank has the most rows, and how many."""
    told: dict[str, list[str]] = {}
    for node, axes, n in _cut_by_expert(graph, plan):
        rank, share = busiest(node.load or uniform(experts_of(graph, node)), n)
        if share * n > 1 + EVEN:
            text = (
                f"rank {rank} of the {n} along {' x '.join(axes)} is the slowest, with {share:.1%} of the rows (an "
                f"equal share is {1 / n:.1%})"
            )
            told.setdefault(text, []).append(node.module or "<model>")
    notes = []
    for text, modules in told.items():
        names = list(dict.fromkeys(modules))
        shown = ", ".join(f"'{name}'" for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        notes.append(f"experts of {shown}{more}: {text}")
    return tuple(notes)


def _cut_by_expert(graph: Graph, plan: Plan) -> Iterator[tuple[Node, list[str], int]]:
    """Yield operators of routed experts that a plan cuts by expert, the axes that do so, and into how many pieces."""
    for stage in plan.stages:
        for name, options in stage.ops.items():
            node = graph.nodes[graph.index[name]]
            if node.target in ROUTED:
                cut = [
                    (axis, size) for option, (axis, size) in zip(options, stage.mesh, strict=True)
                    if factor_and_block(option)[0] in ("e", TRAVEL) and size > 1
                ]  # fmt: skip
                if cut:
                    yield node, [axis for axis, _ in cut], prod(size for _, size in cut)
