"""How much of a plan's compute was priced from measurements, and how much by corrected formulas."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import Graph
from autopar.plan import StagePlan
from autopar.planner.intra_op.price import Pricer, pricer
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from hardware_profiles import Cluster


def shares(graph: Graph, plan: StagePlan, priced: Pricer) -> tuple[float, float]:
    """``(measured, computed)`` seconds of a microbatch's ops, forward and backward."""
    measured = computed = 0.0
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        if node.kind == "op" and rule is not None:
            strategy = strategy_named(graph, node, rule, plan.ops[node.name])
            own = priced.shares(graph, node, rule, strategy)
            measured, computed = measured + own[0], computed + own[1]
    return measured, computed


def coverage(
    graphs: Sequence[Graph], plans: Sequence[StagePlan], cluster: Cluster, devices: Sequence[tuple[int, ...] | None]
) -> dict[str, float | str] | None:
    """What a profile knew of a plan (of all stages of a pipelined one); None without a profile."""
    if cluster.measured is None:
        return None
    rows = [
        shares(graph, plan, pricer(cluster, plan.mesh, own))
        for graph, plan, own in zip(graphs, plans, devices, strict=True)
    ]
    measured, computed = (sum(row[i] for row in rows) for i in (0, 1))
    said = cluster.measured.provenance
    return {
        "measured_seconds": measured, "computed_seconds": computed, "date": str(said["date"]),
        "processor": str(said["processor"]),
    }  # fmt: skip


def line(found: dict[str, float | str]) -> str:
    """That in words."""
    measured, computed = float(found["measured_seconds"]), float(found["computed_seconds"])
    share = measured / (measured + computed) if measured + computed else 0.0
    return (
        f"ops priced from measurements: {share:.1%} of their seconds, the rest by formulas corrected by them "
        f"(profile of {found['date']}, {found['processor']})"
    )


__all__ = ["coverage", "line", "shares"]
