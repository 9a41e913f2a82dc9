"""Shares of a plan's compute that were priced from measurements and by corrected formulas."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.intra_op.building.price import Pricer, pricer
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph
from cost_models.costs import costs_of
from hardware_profiles import Cluster


def shares(graph: Graph, plan: StagePlan, priced: Pricer) -> tuple[float, float]:
    """Return ``(measured, computed)`` seconds of a microbatch's ops, forward and backward."""
    measured = computed = 0.0
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        if node.kind == "op" and rule is not None:
            strategy = strategy_named(graph, node, rule, plan.ops[node.name])
            seconds = priced.compute(graph, node, rule, strategy)
            if seconds.from_profile:
                measured += seconds.total
            else:
                computed += seconds.total
    return measured, computed


def coverage(graphs: Sequence[Graph], plans: Sequence[StagePlan], cluster: Cluster) -> dict[str, float | str] | None:
    """Return the measured share of a plan's price, over all stages; None if the cost source only computes."""
    provenance = costs_of(cluster).provenance
    if not provenance:
        return None
    rows = [
        shares(graph, plan, pricer(cluster, plan.mesh, plan.devices)) for graph, plan in zip(graphs, plans, strict=True)
    ]
    measured, computed = (sum(row[i] for row in rows) for i in (0, 1))
    return {
        "measured_seconds": measured, "computed_seconds": computed, "date": str(provenance["date"]),
        "processor": str(provenance["processor"]),
    }  # fmt: skip


def line(facts: dict[str, float | str]) -> str:
    """Return the coverage as a line of text."""
    measured, computed = float(facts["measured_seconds"]), float(facts["computed_seconds"])
    share = measured / (measured + computed) if measured + computed else 0.0
    return (
        f"ops priced from measurements: {share:.1%} of their seconds; the rest by formulas corrected by these "
        f"(profile of {facts['date']}, {facts['processor']})"
    )
