"""A check that the rows of any schedule can be run, and its stages next to each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.errors import PlanError
from autopar.plans.device_groups import stored_differently
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph
from autopar.plans.weight_versions import check_asynchronous
from cost_models.schedules import Deadlock, Edge, Schedule, simulate, times


def check_rows(schedule: Schedule, graphs: Sequence[StageGraph]) -> None:
    """Refuse a schedule that a step of training cannot follow.

    Raises:
        PlanError: an action is missing or twice, ranks wait for each other, there is no backward, weights change with
            microbatches in flight in a way that cannot be run, a rank takes messages too far from the order in which
            they are sent, or a stage whose buffers follow the batches takes these in another order.
    """
    check_asynchronous(schedule, graphs)
    if schedule.forward_only:
        raise PlanError(f"schedule '{schedule.name}' has no backward, so it trains nothing; evaluate() needs no plan")
    pairs = sorted({(stage_edge.source, g.number) for g in graphs for stage_edge in g.takes})
    try:
        simulate(schedule.validate(), times(len(graphs), edges=[Edge(a, b) for a, b in pairs]))
    except Deadlock as error:
        raise PlanError(f"the schedule never ends; change the order of its rows\n{error}") from None
    except ValueError as error:
        raise PlanError(str(error)) from None
    for graph in graphs:
        order = [a.microbatch for _, a in schedule.actions() if a.stage == graph.number and a.kind == "F"]
        if graph.graph.updates and order != sorted(order):
            raise PlanError(
                f"stage {graph.number} runs microbatches {order} forward and changes buffers "
                f"({next(iter(graph.graph.updates))}, ..), which follow the batches in order; order them"
            )


def check_buffers(plan: Plan, names: Collection[str]) -> None:
    """Refuse a plan whose stages on the same devices store a buffer in several ways: a rank has one tensor for all.

    Args:
        names: the names of the model's buffers. Tensors that its code makes are each stage's own.

    Raises:
        PlanError: with the buffer, the stages, and how each stores it.
    """
    for of_group in plan.schedule.stages_of_rank:
        stages = [(plan.stages[s].mesh, plan.stages[s].buffers) for s in of_group]
        for name in stored_differently(stages):
            if name in names:
                ways = ", ".join(
                    f"stage {s} as {plan.stages[s].buffers[name].text}"
                    for s in of_group if name in plan.stages[s].buffers
                )  # fmt: skip
                raise PlanError(
                    f"buffer '{name}' is read by stages on the same devices, which store it in several ways: {ways}; "
                    "a rank has one tensor for all of them. Write the same placement into 'buffers' of these stages "
                    "of the plan file (R on every axis always fits), or plan the model again"
                )
