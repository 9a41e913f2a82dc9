"""What ``parallelize(..., on_change="recapture")`` needs when values have changed: a new plan, and a comparison.

The programs themselves are :mod:`autopar.runtime.programs`.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.comparison import compare_with_eager
from autopar.graph import Graph
from autopar.labels import matches, op_labels
from autopar.plan import Plan, StagePlan
from autopar.planner.intra_op.options import Options
from autopar.planning import Outcome, on_mesh, wishes_of
from autopar.runtime.programs import Compare, PlanAgain
from autopar.spreading import agreed
from hardware_profiles import Cluster


def planner_of(plan: Plan, cluster: Cluster, group: Any) -> PlanAgain:
    """Makes plans on the mesh of ``plan`` with the wishes that it remembers; rank 0 plans, all ranks call it."""
    wishes = wishes_of(plan)

    def plan_again(new: Captured, stored: Mapping[str, str]) -> StagePlan:
        def decide() -> Outcome:
            options = for_graph(wishes, new.graph, stored)
            return Outcome(on_mesh(new.graph, cluster, plan.mesh, options, plan.cluster, plan.pins), new)

        return agreed(decide, new, group)[1].only()

    return plan_again


def for_graph(wishes: Options, graph: Graph, stored: Mapping[str, str]) -> Options:
    """The wishes that concern a graph, with every parameter stored as it is.

    What names only operators and parameters that the graph does not have (a branch that is not taken) is left out.

    Args:
        stored: placements, such as ``S0,I``, by the name of the parameter.
    """
    labels = op_labels(graph)
    names = [node.target for _, node in graph.of_kind("param")]
    ops = [node for node in graph.nodes if node.kind == "op"]
    constraints = {
        pattern: axes
        for pattern, axes in (wishes.constraints or {}).items()
        if any(matches(pattern, node, labels[node.name]) for node in ops)
    }
    asked = {p: how for p, how in (wishes.params or {}).items() if any(fnmatchcase(name, p) for name in names)}
    kept: dict[str, str] = {}
    for name in names:
        if name in stored:
            lifetimes = [how.split()[1:] for pattern, how in asked.items() if fnmatchcase(name, pattern)]
            kept[glob.escape(name)] = " ".join([stored[name], *(lifetimes[-1] if lifetimes else [])])
    inputs = {node.target for _, node in graph.of_kind("input")}
    recompute = [p for p in wishes.recompute if any(fnmatchcase(node.module, p) for node in ops)]
    return replace(
        wishes, constraints=constraints or None, params={**asked, **kept} or None,
        inputs={k: v for k, v in (wishes.inputs or {}).items() if k in inputs} or None,
        outputs={k: v for k, v in (wishes.outputs or {}).items() if k < len(graph.outputs)} or None,
        recompute=tuple(recompute),
    )  # fmt: skip


def comparer_of(args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any], group: Any) -> Compare:
    """Compares new captures with the model on a batch with values, on rank 0."""

    def compare(new: Captured, model: torch.nn.Module) -> None:
        if dist.get_rank(group) == 0:
            compare_with_eager(new, model, args, kwargs, targets)

    return compare


__all__ = ["comparer_of", "for_graph", "planner_of"]
