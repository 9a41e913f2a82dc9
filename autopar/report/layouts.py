"""Layouts next to each other: seconds, bubble, memory, tokens per second, model-flops utilization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.plans.plan import Plan
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from cost_models.operator_cost import COMPUTE_KINDS, peak_flops
from cost_models.schedules import Timeline
from hardware_profiles import Cluster

BACKWARD = 2
"""Contractions of the backward for each of the forward: of the inputs and of the weights."""


@dataclass(frozen=True)
class LayoutRow:
    """One layout.

    Attributes:
        bubble: idle share of all groups of devices.
        memory_bytes: bytes of the fullest device.
        tokens_per_second: elements of the largest integer input of a step; rows of the batch if there is none.
        utilisation: share of the devices' peak used by the model's own contractions, without recomputation.
        on_front: no other row is faster with as little memory.
        devices: number of devices that compute.
        words: the layout in the terms of trainers; empty if nobody asked for them.
    """

    what: str
    seconds: float
    bubble: float
    memory_bytes: float
    tokens_per_second: float
    utilisation: float
    on_front: bool = False
    devices: int = 1
    words: str = ""


def layout_row(what: str, plan: Plan, timeline: Timeline, graph: Graph, cluster: Cluster) -> LayoutRow:
    """Return the row of a plan; ``graph`` is of one microbatch."""
    m = plan.microbatches
    devices = sorted({d for stage in plan.stages for d in stage.devices})
    flops = m * model_flops(graph)
    shares, makes = flops_by_dtype(graph), Counter(map(cluster.device, devices))
    peak = sum(n * sum(peak_flops(make, dtype) * share for dtype, share in shares.items()) for make, n in makes.items())
    used = flops / (plan.seconds * peak) if plan.seconds and peak else 0.0
    tokens = m * tokens_of(graph) / plan.seconds
    return LayoutRow(
        what, plan.seconds, timeline.bubble_fraction, plan.memory_bytes, tokens, used, devices=len(devices)
    )


def model_flops(graph: Graph) -> float:
    """Return the floating-point operations of a microbatch's contractions, forward and backward."""
    return sum(_flops(graph).values())


def flops_by_dtype(graph: Graph) -> dict[str, float]:
    """Return the share of each dtype in the contractions' operations."""
    by_dtype = _flops(graph)
    total = sum(by_dtype.values())
    return {dtype: flops / total for dtype, flops in by_dtype.items()} if total else {"float32": 1.0}


def _flops(graph: Graph) -> Mapping[str, float]:
    by_dtype: dict[str, float] = {}
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        if node.kind == "op" and rule is not None and rule.kind in COMPUTE_KINDS:
            times = 1 + (BACKWARD if node.needs_grad else 0)
            dtype = graph.spec(node.refs[0]).dtype
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + times * rule.flops_at({})
    return by_dtype


def tokens_of(graph: Graph) -> int:
    """Return the tokens of a batch: elements of its largest integer input, or rows if there is none."""
    whole, rows = 0, 1
    for _, node in graph.of_kind("input"):
        if node.out.shape:
            rows = max(rows, int(node.out.shape[0]))
            if not node.out.is_float:
                whole = max(whole, prod(node.out.shape))
    return whole or rows


def with_front(rows: Sequence[LayoutRow]) -> list[LayoutRow]:
    """Return the rows, fastest first, with those marked that no other row beats in both time and memory."""
    marked: list[LayoutRow] = []
    least = float("inf")
    for row in sorted(rows, key=lambda r: (r.seconds, r.memory_bytes)):
        marked.append(LayoutRow(**{**vars(row), "on_front": row.memory_bytes < least}))
        least = min(least, row.memory_bytes)
    return marked
