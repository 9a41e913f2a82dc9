"""Rows of actions that cannot be run are refused with the reason."""

from __future__ import annotations

import pytest
from zoo import ZOO

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.runtime.pipelines.schedule_check import check_rows
from cost_models.schedules import SCHEDULES, build, forward_only, loop_placement, parse
from cost_models.schedules.asynchronous import ASYNCHRONOUS


def stages(n: int):  # type: ignore[no-untyped-def]
    case = ZOO["mlp"]()
    graph = capture(case.model, case.args, case.kwargs).graph
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    return cut(graph, [ops[k * len(ops) // n] for k in range(1, n)])


def test_every_synchronous_schedule_can_be_run() -> None:
    for name in SCHEDULES:
        n = 2 * SCHEDULES[name].fewest
        check_rows(build(name, n, 2, 4), stages(n))


def test_asynchronous_ones_are_not_run_as_if_they_were_synchronous() -> None:
    for name, make in ASYNCHRONOUS.items():
        with pytest.raises(PlanError, match=rf"'{name}' updates weights while microbatches are in flight"):
            check_rows(make(2, 4).schedule, stages(2))


def test_what_never_ends_or_trains_nothing() -> None:
    with pytest.raises(PlanError, match="has no backward"):
        check_rows(forward_only(2, 4, loop_placement(2, 2)), stages(2))
    rows = parse("schedule mine stages 2 microbatches 1\nrank 0 holds 0 1: 0F0 1F0 0B0 1B0")
    with pytest.raises(PlanError, match=r"never ends[\s\S]*rank 0 waits at action 2, 0B0, for 1B0"):
        check_rows(rows, stages(2))
    with pytest.raises(PlanError, match=r"2 stages for|3 stages for"):
        check_rows(build("1f1b", 3, 3, 2), stages(2))
