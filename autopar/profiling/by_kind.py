"""Seconds by kind of operator: predicted by the plan, and measured on the device by torch's profiler."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autopar.allocations import Allocations
from autopar.lower.freed_tensors import EMPTIED
from autopar.planner.intra_op.building.price import pricer
from autopar.plans.clusters import get_cluster
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import cut
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.torch_private import pytree
from autopar.words.graph import Graph
from autopar.words.trees import PyTree

COLLECTIVE = "collective"
KINDS = (
    ("optimizer", ("_fused_", "_foreach_")),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention", "attention")),
    ("matmul", ("mm", "matmul", "linear", "einsum", "bmm", "baddbmm", "addmm", "_grouped")),
    ("conv", ("conv", "cudnn_convolution")),
    ("norm", ("layer_norm", "rms_norm", "batch_norm", "group_norm")),
    ("embedding", ("embedding", "index_select", "gather", "scatter", "index", "take")),
    ("loss", ("nll_loss", "log_softmax", "cross_entropy")),
    ("copy", ("copy_", "clone", "contiguous", "to_copy", "fill_", "zero_", "cat", "Memcpy", "Memset", "memcpy")),
    (COLLECTIVE, ("c10d", "nccl", "gloo:")),
)
"""Kinds by parts of their operators' names; the first match counts, all others are pointwise."""


def kind_of(operator: str) -> str:
    """Return the kind of an operator by its name, such as ``aten.linear.default`` or ``aten::addmm``."""
    name = operator.replace("aten.", "").replace("aten::", "")
    for kind, parts in KINDS:
        if any(part in name for part in parts):
            return kind
    return "pointwise"


def predicted(graph: Graph, plan: Plan) -> list[dict[str, float]]:
    """Return a step's seconds by kind as the plan prices them, on a rank of each group.

    Forward and backward are added; collectives are one kind of their own.
    """
    cluster, groups = get_cluster(plan.cluster), []
    graphs = [part.graph for part in cut(graph, plan.starts)]
    for of_group in plan.schedule.stages_of_rank:
        seconds: defaultdict[str, float] = defaultdict(float)
        for s in of_group:
            stage, there = plan.stages[s], graphs[s]
            priced = pricer(cluster, stage.mesh, stage.devices)
            for node, rule in zip(there.nodes, rules_of(there), strict=True):
                if node.kind == "op" and rule is not None:
                    strategy = strategy_named(there, node, rule, stage.ops[node.name])
                    spent = priced.compute(there, node, rule, strategy).total
                    seconds[kind_of(node.target)] += spent * stage.microbatches
            price = stage.price
            seconds[COLLECTIVE] += price.activation_seconds + price.parameter_seconds
        groups.append(dict(seconds))
    return groups


def measured(
    step: Callable[[], object], device: str, times: int = 1
) -> tuple[dict[str, float], list[list[str | float]]]:
    """Return a step's seconds by kind on the device, and its twenty longest operators.

    The operators are ``[name, seconds, calls]`` of one step. On CPUs the seconds are those of the operators themselves.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints its start and stop
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(times):
            step()
        if on_gpu:
            torch.accelerator.synchronize()
    seconds: defaultdict[str, float] = defaultdict(float)
    longest = []
    for event in profiler.key_averages():
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) * 1e-6 / times
        if spent and event.key != "Command Buffer Full" and _counts(event, on_gpu):
            seconds[kind_of(event.key)] += spent
            longest.append([event.key[:90], spent, event.count // times])
    longest.sort(key=lambda row: -row[1])
    return dict(seconds), longest[:20]


def peak_bytes(
    step: Callable[[], object], held: Iterable[torch.Tensor], batch: PyTree, device: str
) -> int:  # fmt: skip
    """Return the peak bytes on this rank during a step.

    On an accelerator its allocator counts; on CPUs operators' allocations are counted, without ``batch``, which is the
    caller's. ``held`` are parameters and optimizer state.
    """
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        step()
        torch.accelerator.synchronize()
        return int(torch.accelerator.max_memory_allocated())
    count = Allocations(EMPTIED)
    for x in pytree.tree_leaves(batch):
        if isinstance(x, torch.Tensor):
            count.ignore(x)
    for x in held:
        count.note(x)
    with count:
        step()
    return count.peak_bytes


def _counts(event: Any, on_gpu: bool) -> bool:
    """Return True for an operator, or a kernel that no operator launched: each second is counted once."""
    name = event.key
    if on_gpu:  # kernels of aten operators are counted with the operator; others (Triton, graphs) by themselves
        return event.device_type == torch.autograd.DeviceType.CPU
    return name.startswith(("aten::", "gloo:"))


def beside(mine: dict[str, float], plans: dict[str, float]) -> str:
    """Return measured next to predicted milliseconds, largest first: ``matmul 12.1 (plan 10.9)``."""
    kinds = sorted({*mine, *plans}, key=lambda k: -mine.get(k, 0.0))
    return ", ".join(f"{k} {1e3 * mine.get(k, 0.0):.2f} (plan {1e3 * plans.get(k, 0.0):.2f})" for k in kinds[:8])
