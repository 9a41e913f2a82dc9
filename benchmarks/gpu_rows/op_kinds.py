"""Seconds by kind of operator: as the plan predicts them and as the profiler measures them on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

KINDS = (
    ("optimizer", ("_fused_", "_foreach_")),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention", "attention")),
    ("matmul", ("mm", "matmul", "linear", "einsum", "bmm", "baddbmm", "addmm", "_grouped")),
    ("conv", ("conv", "cudnn_convolution")),
    ("norm", ("layer_norm", "rms_norm", "batch_norm", "group_norm")),
    ("embedding", ("embedding", "index_select", "gather", "scatter", "index", "take")),
    ("loss", ("nll_loss", "log_softmax", "cross_entropy")),
    ("copy", ("copy_", "clone", "contiguous", "to_copy", "fill_", "zero_", "cat", "Memcpy", "Memset", "memcpy")),
    ("collective", ("c10d", "nccl")),
)
"""Kinds, and what is in the names of their operators; the first that fits counts. All others are pointwise."""


def kind_of(operator: str) -> str:
    """The kind of an operator by its name, such as ``aten.linear.default`` or ``aten::addmm``."""
    name = operator.replace("aten.", "").replace("aten::", "")
    for kind, parts in KINDS:
        if any(part in name for part in parts):
            return kind
    return "pointwise"


def predicted(graph: Any, plan: Any) -> dict[str, float]:
    """Seconds of a step's operators by kind, as the plan's cost source prices them, forward and backward."""
    from autopar.planner.intra_op.building.price import pricer
    from autopar.plans.clusters import get_cluster
    from autopar.rules.registry import rules_of
    from autopar.rules.strategy import strategy_named

    stage = plan.only()
    priced = pricer(get_cluster(plan.cluster), stage.mesh, stage.devices)
    seconds: defaultdict[str, float] = defaultdict(float)
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        if node.kind == "op" and rule is not None:
            strategy = strategy_named(graph, node, rule, stage.ops[node.name])
            seconds[kind_of(node.target)] += priced.compute(graph, node, rule, strategy).total * stage.microbatches
    return dict(seconds)


def measured(step: Callable[[], Any], device: str, times: int = 3) -> tuple[dict[str, float], list[list[Any]]]:
    """Seconds of a step's operators by kind, on the device (on processors: of the operators themselves).

    Returns:
        Seconds by kind, and the twenty operators that took longest as ``[name, seconds, calls]`` of one step.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(times):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    seconds: defaultdict[str, float] = defaultdict(float)
    longest = []
    for event in profiler.key_averages():
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) * 1e-6 / times
        if spent and event.key != "Command Buffer Full" and _counts(event, on_gpu):
            seconds[kind_of(event.key)] += spent
            longest.append([event.key[:90], spent, event.count // times])
    longest.sort(key=lambda row: -row[1])
    return dict(seconds), longest[:20]


def _counts(event: Any, on_gpu: bool) -> bool:
    """Whether an event is an operator or a kernel that no operator launched: each second is counted once."""
    name = event.key
    if on_gpu:  # kernels of aten operators are counted with the operator; the rest (Triton, graphs) stands alone
        return event.device_type == torch.autograd.DeviceType.CPU
    return name.startswith("aten::")


def beside(mine: dict[str, float], plans: dict[str, float]) -> str:
    """Both by kind in milliseconds, largest first: ``matmul 12.1 (plan 10.9)``."""
    kinds = sorted({*mine, *plans}, key=lambda k: -mine.get(k, 0.0))
    return ", ".join(f"{k} {1e3 * mine.get(k, 0.0):.2f} (plan {1e3 * plans.get(k, 0.0):.2f})" for k in kinds[:8])


__all__ = ["beside", "kind_of", "measured", "predicted"]
