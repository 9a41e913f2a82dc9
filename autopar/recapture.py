"""What a parallel module needs when shapes or values have changed: a new plan, and a comparison.

The programs themselves are :mod:`autopar.runtime.programs`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.comparison import FAILS, compare_with_eager
from autopar.errors import CaptureError
from autopar.graph import Graph, Node
from autopar.labels import matches, op_labels
from autopar.placements import Mesh
from autopar.plan import Plan, StagePlan
from autopar.planner.intra_op.options import Options
from autopar.planning import Outcome, on_only_mesh, wishes_of
from autopar.rules.notation import Rule
from autopar.rules.option_names import factor_and_block, option_written
from autopar.rules.registry import rules_of
from autopar.rules.strategy import options_of, why_not_cut
from autopar.runtime.programs import Batch, Compare, PlanAgain
from autopar.spreading import agreed
from hardware_profiles import Cluster


def planner_of(plan: Plan, cluster: Callable[[], Cluster], group: Any) -> PlanAgain:
    """Makes plans on the mesh of ``plan`` with the wishes that it remembers; rank 0 plans, all ranks call it.

    Args:
        cluster: gives the hardware that plans are for; called when one is made.
    """
    wishes = wishes_of(plan)

    def plan_again(new: Captured, stored: Mapping[str, str]) -> StagePlan:
        def decide() -> Outcome:
            options = for_graph(wishes, new.graph, stored, plan.mesh)
            return Outcome(on_only_mesh(new.graph, cluster(), plan.mesh, options, plan.cluster, plan.pins), new)

        return agreed(decide, new, group)[1].only()

    return plan_again


def for_graph(wishes: Options, graph: Graph, stored: Mapping[str, str], mesh: Mesh) -> Options:
    """The wishes that concern a graph, with every parameter stored as it is.

    What names only operators and parameters that the graph does not have (a branch that is not taken), or factors that
    none of its operators can be cut along (the rows of a batch of one), is left out.

    Args:
        stored: placements, such as ``S0,I``, by the name of the parameter.
    """
    labels = op_labels(graph)
    names = [node.target for _, node in graph.of_kind("param")]
    ops = [node for node in graph.nodes if node.kind == "op"]
    rules = {node.name: rule for node, rule in zip(graph.nodes, rules_of(graph), strict=True) if node.kind == "op"}
    constraints: dict[str, Mapping[str, str]] = {}
    for pattern, factors in (wishes.constraints or {}).items():
        there = [(node, rules[node.name]) for node in ops if matches(pattern, node, labels[node.name])]
        borne = {
            axis: factor
            for axis, factor in factors.items()
            if any(rule is not None and _offers(graph, node, rule, mesh, axis, factor) for node, rule in there)
        }
        if borne:
            constraints[pattern] = borne
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


def _offers(graph: Graph, node: Node, rule: Rule, mesh: Mesh, axis: str, factor: str) -> bool:
    """Whether an operator can be cut along a factor, or copied, on an axis of the mesh."""
    name = option_written(factor)
    if name not in options_of(graph, node, rule, rule.blocks_on(mesh)):
        return False
    cut, block = factor_and_block(name)
    return cut not in rule.sizes or not why_not_cut(rule, cut, [(dict(mesh)[axis], block)])


def comparer_of(group: Any) -> Compare:
    """Compares new captures with the model on the batch of the call, on rank 0.

    What it makes raises a CaptureError where they differ, or where the model itself fails on the batch.
    """

    def compare(new: Captured, model: torch.nn.Module, batch: Batch) -> None:
        if dist.get_rank(group) == 0:
            args, kwargs, targets = batch
            note = compare_with_eager(new, model, args, kwargs, targets).note
            if note.startswith(FAILS):
                raise CaptureError(note)

    return compare


__all__ = ["comparer_of", "for_graph", "planner_of"]
