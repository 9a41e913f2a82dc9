"""The collectives of a step that a plan says, by kind and group, for every rank: what run_folder.py counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from autopar.planner.layouts.pricing import PricedLayout
from autopar.plans.plan import StagePlan, reshard_key
from autopar.plans.stage_graphs import cut
from autopar.report.rows import step_rows
from autopar.rules.local_calls import collectives_inside, cuts_of
from autopar.rules.registry import rules_of
from autopar.rules.strategy import grads_of, strategy_named
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State, path
from autopar.words.shards import local_shape


def planned(priced: PricedLayout) -> list[Counter[str]]:
    """Return bytes by ``kind group`` for every rank, a group as ``first rank + stride x size``."""
    plan = priced.plan
    graphs = [part.graph for part in cut(priced.pinned.graph, plan.starts)]
    found: list[Counter[str]] = [Counter() for _ in range(plan.n_devices)]
    m = plan.microbatches
    for stage, graph in zip(plan.stages, graphs, strict=True):
        for kind, axis, n_bytes in [*of_operators(stage, graph, m), *of_parameters(stage, graph, m)]:
            for place, rank in enumerate(stage.devices):
                found[rank][f"{kind} {group(stage, place, axis)}"] += n_bytes
    for edge in plan.stage_edges:
        for target in edge.targets:
            a, b = plan.stages[edge.source], plan.stages[target]
            side, _ = edge.sides(plan.stages, target)
            n_bytes = prod(local_shape(edge.spec.shape, side.state, a.mesh)) * edge.spec.item_bytes * m
            for here, there in zip(a.devices, b.devices, strict=True):
                if here == there:
                    continue
                pair = f"{here}+{there - here}x2" if here < there else f"{there}+{here - there}x2"
                found[here][f"send {pair}"] += n_bytes
                found[there][f"recv {pair}"] += n_bytes
                if edge.needs_grad:
                    found[there][f"send {pair}"] += n_bytes
                    found[here][f"recv {pair}"] += n_bytes
    return found


def of_operators(stage: StagePlan, graph: Graph, m: int) -> Iterator[tuple[str, str, int]]:
    """Yield ``(kind, axis, bytes)`` of collectives between and inside operators, of all microbatches."""
    rules, sizes = rules_of(graph), stage.mesh.size_of
    for i, node in graph.of_kind("op"):
        if node.name in stage.ops:
            strategy = strategy_named(graph, node, rules[i], stage.ops[node.name])
            inside = collectives_inside(
                rules[i], *cuts_of(rules[i], strategy.options, stage.mesh), any(grads_of(graph, node)[1]), sizes
            )
            for comm, axis, n_bytes in inside:
                yield comm.kind, axis, m * n_bytes * comm.times(sizes[axis])
        for number, spec in enumerate(node.outs):
            if spec is not None:
                grad = node.needs_grad and spec.is_float
                for a, b in stage.reshard_paths.get(reshard_key(graph, Ref(i, number)), ()):
                    for row in step_rows(stage, spec, grad, a, b):
                        yield str(row["kind"]), str(row["axis"]), m * int(row["bytes"])


def of_parameters(stage: StagePlan, graph: Graph, m: int) -> Iterator[tuple[str, str, int]]:
    """Yield ``(kind, axis, bytes)`` of gathered parameters and reduced gradients of a step."""
    for _, node in graph.of_kind("param"):
        choice = stage.params[node.target]
        states: list[tuple[State, State]] = [(s.src, s.dst) for s in path(choice.stored, choice.used) or ()]
        forward, backward = (2 * m, m) if choice.lifetime == "use" else (1, 1)
        for a, b in states:
            for row in step_rows(stage, node.out, node.needs_grad, a, b):  # gathered in the format of computation
                if row["pass"] == "forward":
                    yield str(row["kind"]), str(row["axis"]), forward * int(row["bytes"])
            for row in step_rows(stage, graph.stored(node), node.needs_grad, a, b):
                if row["pass"] == "backward":
                    yield str(row["kind"]), str(row["axis"]), backward * int(row["bytes"])


def group(stage: StagePlan, place: int, axis: str) -> str:
    """Return the group of a device along an axis of its stage's mesh."""
    names, sizes = stage.mesh.names, [size for _, size in stage.mesh]
    at = names.index(axis)
    stride = prod(sizes[at + 1 :])
    first = place - (place // stride % sizes[at]) * stride
    return f"{stage.devices[first]}+{stride}x{sizes[at]}"
