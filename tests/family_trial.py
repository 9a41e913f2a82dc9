"""What autopar makes of one family of models: captured, compared, planned for four devices, and run on four ranks.

:func:`trial` goes through the steps of a :class:`~zoo.Case` and yields what each showed, so that a caller has the
first results where a later step crashes or takes too long. ``make zoo`` (``benchmarks/families.py``) runs it for all
families, each in a process of its own; tests run it for a few.

==============  =======================================================================================================
``captured``    the model became a graph
``same``        loss, gradients and buffers of the graph are the model's own on a second batch
``planned``     a plan for 2x2 devices was found; with it come the shares of FLOPs and the collectives
``equal``       four ranks in this process and one device: loss, gradients, and weights after two steps
``staged``      the same for two stages of one device, with two microbatches where the batch has rows to part
==============  =======================================================================================================
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from zoo import Case

from autopar.capture import Captured, capture
from autopar.capture.microbatches import first_part
from autopar.capture.passes import observed, summary
from autopar.comparison import compare_with_eager
from autopar.comparison.program_vs_eager import (
    Difference,
    beside_rounding,
    compare,
    doubled,
    inputs_of,
    one_device,
    promoted,
    state_of,
    train,
    verify_pipeline,
)
from autopar.errors import AutoparError
from autopar.lower.emit import lower
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.planning import can_be_cut, in_stages
from autopar.plans.pins import Pins
from autopar.plans.plan import StagePlan
from autopar.plans.request import PlanRequest
from autopar.progress import heard
from autopar.rules.discovery import why_not_found
from autopar.rules.local_calls import cuts_of
from autopar.rules.registry import rules_of, source_of_rule
from autopar.rules.strategy import strategy_in_plan
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster, load_cluster

CLUSTER = Path(__file__).parent.parent / "benchmarks" / "clusters" / "small-models.toml"
MESH = Mesh.of(data=2, tensor=2)
LIMIT = 1e-9
"""The largest relative difference of double precision that is rounding."""
LONG = 300
"""Characters of an error that a result keeps."""

Result = dict[str, Any]


def trial(case: Case, stages: bool = True) -> Iterator[Result]:
    """Go through all steps with one model; every result has ``step``, ``ok`` and ``seconds`` of the CPU.

    Raises nothing of the model's or autopar's making: an error is a result whose ``ok`` is False, and the steps that
    need what it should have made are left out.
    """
    done: dict[str, Any] = {}

    def run(step: str, make: Any) -> Result:
        began = time.process_time()
        try:
            result = {"step": step, "ok": True, **make()}
        except Exception as error:
            kind = "" if isinstance(error, AutoparError) else f"{type(error).__name__}: "
            result = {"step": step, "ok": False, "why": (kind + str(error))[:LONG]}
        return {**result, "seconds": round(time.process_time() - began, 2)}

    def captured() -> Result:
        with heard(lambda text: None), observed() as runs:  # as the command line has it
            done["captured"] = capture(case.model, case.args, case.kwargs)
        graph = done["captured"].graph
        ways = sorted({node.source for node in graph.ways})
        fired = [run.name for run in summary(runs) if run.changed]
        return {"ops": sum(n.kind == "op" for n in graph.nodes), "guarded": ways, "passes": fired, **_sources(graph)}

    def same() -> Result:
        comparison = compare_with_eager(done["captured"], case.model, *case.batch2, bounded=False)
        return {"ok": not comparison.note, "worst": comparison.worst, "why": comparison.note}

    def planned() -> Result:
        done["double"] = promoted(done["captured"])
        graph = done["double"].graph
        done["plan"] = plan_graph(graph, load_cluster(CLUSTER), MESH)
        return {**flops_cut(graph, done["plan"]), "collectives": collectives(graph, done["plan"])}

    def equal() -> Result:
        double: Captured = done["double"]
        weights, buffers = map(doubled, state_of(done["captured"], case.model))
        inputs = doubled(inputs_of(done["captured"], *case.batch))
        reference = train(double, one_device(double.graph), weights, buffers, inputs)
        difference = compare("2x2", train(double, done["plan"], weights, buffers, inputs), reference)
        single = one_device(double.graph)

        def one(weights: Any, shaken: bool) -> Any:
            return train(double, single, weights, buffers, inputs, shaken=shaken)

        return _verdict(beside_rounding(difference, reference, one, weights))

    def staged() -> Result:
        return _staged(case, load_cluster(CLUSTER))

    for step, make in (("captured", captured), ("same", same), ("planned", planned), ("equal", equal)):
        result = run(step, make)
        yield result
        if not result["ok"] and step in ("captured", "planned"):
            return
    if stages and can_be_cut(done["captured"].graph, case.batch):
        yield run("staged", staged)


def _staged(case: Case, cluster: Cluster) -> Result:
    """Two stages of one device each; two microbatches, where the inputs have rows in common (a graph's nodes and edges
    have not)."""
    tensors = [x for x in [*case.args, *case.kwargs.values()] if isinstance(x, torch.Tensor) and x.ndim]
    parts = 2 if len({len(x) for x in tensors}) == 1 else 1
    args, kwargs = first_part(case.batch, parts)
    part = capture(case.model, args, kwargs)
    asked = PlanRequest(Pins(stages=2, mesh=Mesh.of(tensor=1)), microbatches=parts)
    outcome = in_stages({parts: part.graph}, cluster, 2, asked, cluster.name)
    difference = verify_pipeline(part, case.model, args, kwargs, outcome.plan)
    return _verdict(difference)


def _verdict(difference: Difference) -> Result:
    """The result of a comparison; where the model magnifies rounding, ``why`` begins with how much."""
    if difference.worst <= LIMIT:
        return {"ok": True, "worst": difference.worst, "why": ""}
    why = f"rounding alone makes {difference.rounding:.1e}; " if difference.shows_nothing else ""
    return {"ok": False, "worst": difference.worst, "why": (why + str(difference))[:LONG]}


def _sources(graph: Graph) -> Result:
    """Which operators have a rule that was found, which have none and why, and the shares of FLOPs of the three."""
    targets: dict[str, set[str]] = {"discovered": set(), "none": set()}
    whys: dict[str, str] = {}
    work = Counter({"written": 0.0, "discovered": 0.0, "none": 0.0})
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        if node.kind == "op" and rule is not None:
            source = source_of_rule(node, rule)
            work[source] += rule.flops_at({})
            if source != "written":
                targets[source].add(node.target)
            if source == "none" and node.target not in whys:
                whys[node.target] = why_not_found(node, graph)
    total = max(sum(work.values()), 1.0)
    return {
        "discovered": sorted(targets["discovered"]), "whole": {t: whys[t] for t in sorted(targets["none"])},
        "flops": total, "flops_by_rule": {source: round(n / total, 4) for source, n in work.items()},
    }  # fmt: skip


def flops_cut(graph: Graph, plan: StagePlan) -> Result:
    """How much of the forward's FLOPs is cut.

    Returns:
        ``cut``, the share in ops that some axis cuts; ``cut_most``, in ops that every axis cuts; ``rank``, the part of
        all FLOPs that one rank computes (0.25 of four is the least); ``not_cut``, FLOPs by operator in those that no
        axis cuts, as shares, the largest first.
    """
    total = some = all_axes = rank = 0.0
    left: Counter[str] = Counter()
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        if node.kind != "op" or rule is None:
            continue
        flops = rule.flops_at({})
        strategy = strategy_in_plan(graph, node, rule, plan.ops[node.name], plan.mesh)
        pieces, _ = cuts_of(rule, strategy.options, plan.mesh)
        mine = rule.flops_at(pieces)
        n_cut = sum(option.name.partition("*")[0] in rule.sizes for option in strategy.options)
        total, rank = total + flops, rank + mine
        some += flops if n_cut else 0.0
        all_axes += flops if n_cut == len(plan.mesh) else 0.0
        if not n_cut and flops:
            left[node.target] += flops
    total = max(total, 1e-9)
    return {
        "cut": some / total, "cut_most": all_axes / total, "rank": rank / total,
        "not_cut": {target: round(n / total, 4) for target, n in left.most_common(5)},
    }  # fmt: skip


def collectives(graph: Graph, plan: StagePlan) -> dict[str, int]:
    """How often each kind of collective stands in the forward of a plan's program."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    nodes = lower(graph, plan).module.graph.nodes
    called = Counter(
        getattr(node.target, "__name__", "").removesuffix("_pieces") for node in nodes if node.op == "call_function"
    )
    return {name: called[name] for name in names if called[name]}


__all__ = ["CLUSTER", "LIMIT", "MESH", "collectives", "flops_cut", "trial"]

