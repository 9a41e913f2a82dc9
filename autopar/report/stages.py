"""Plans of several stages as rows, and the parts of a step's seconds."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.inter_op.replan import limit_of_stage
from autopar.plans.plan import Plan
from autopar.plans.prices import bytes_together
from autopar.report import Facts
from autopar.words.graph import Graph
from autopar.words.labels import op_labels
from cost_models.schedules import Timeline
from hardware_profiles import Cluster


def stage_rows(graph: Graph, plan: Plan, timeline: Timeline, cluster: Cluster) -> list[Facts]:
    """Return one row per stage: seconds of one microbatch, and bytes of a device.

    ``limit_bytes`` is the stage's limit: the requested one, or that of the device less what other stages of its group
    hold. ``device_bytes`` is the sum of all stages of the group, ``device_limit_bytes`` the limit of that.
    """
    labels, t = op_labels(graph), timeline.times
    group = plan.schedule.rank_of_stage
    on_device = [bytes_together([plan.stages[s].price for s in of]) for of in plan.schedule.stages_of_rank]
    rows = []
    for number, choice in enumerate(plan.stages):
        price = choice.price
        limit = limit_of_stage(plan, number, cluster, plan.pins.memory_limit_bytes)
        rows.append({
            "stage": number, "group": group[number], "first": choice.first, "begins_at": labels[choice.first],
            "devices": list(choice.devices), "mesh": choice.mesh.size_of,
            "forward_seconds": t.forward_seconds[number], "input_seconds": t.input_seconds[number],
            "weight_seconds": t.weight_seconds[number], "backward_seconds": t.backward_seconds[number],
            "step_seconds": price.exposed_seconds + price.optimizer_seconds,
            "parameter_seconds": price.parameter_seconds, "hidden_seconds": price.hidden_seconds,
            "optimizer_seconds": price.optimizer_seconds, "in_flight": choice.in_flight,
            "parameter_bytes": price.parameter_bytes, "gradient_bytes": price.gradient_bytes,
            "optimizer_bytes": price.optimizer_bytes, "gathered_bytes": price.gathered_bytes,
            "version_bytes": price.version_bytes,
            "activation_bytes": price.activation_bytes, "microbatch_bytes": choice.kept_bytes,
            "working_bytes": price.working_bytes, "memory_bytes": price.memory_bytes, "limit_bytes": limit,
            "device_bytes": on_device[group[number]],
            "device_limit_bytes": limit + on_device[group[number]] - price.memory_bytes,
        })  # fmt: skip
    return rows


def step_anatomy(plan: Plan, timeline: Timeline) -> Facts:
    """Return the four parts of a step's seconds, which add up to it.

    ``even_seconds`` would be enough if all groups computed equally long; ``uneven_seconds`` is what the slowest group
    computes more; ``waiting_seconds`` it waits for others and for transfers; ``once_seconds`` are the optimizer and the
    exposed collectives of parameters.
    """
    busy = timeline.busy_seconds
    mean, longest = sum(busy) / len(busy), max(busy)
    once = plan.seconds - timeline.makespan_seconds
    return {
        "seconds": plan.seconds, "even_seconds": mean, "uneven_seconds": longest - mean,
        "waiting_seconds": timeline.makespan_seconds - longest, "once_seconds": once,
        "bubble_fraction": timeline.bubble_fraction, "busy_seconds": list(busy), "busiest_group": busy.index(longest),
    }  # fmt: skip


def fullest(rows: Sequence[Facts]) -> Facts:
    """Return the first stage of the group whose devices are the fullest relative to their limit."""
    return max(rows, key=share_filled)


def share_filled(row: Facts) -> float:
    """Return the used fraction of the memory limit of a stage's devices."""
    return float(row["device_bytes"] / row["device_limit_bytes"])
