"""Rows of actions that cannot be run are refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo import ZOO

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.runtime.pipelines.schedule_check import check_rows
from cost_models.schedules import ASYNCHRONOUS_KINDS, SCHEDULES, build, forward_only, loop_placement, parse


def stages(n: int):  # type: ignore[no-untyped-def]
    case = ZOO["mlp"]()
    graph = capture(case.model, case.args, case.kwargs).graph
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    return cut(graph, [ops[k * len(ops) // n] for k in range(1, n)])


def test_every_synchronous_schedule_can_be_run() -> None:
    for name in SCHEDULES:
        n = 2 * SCHEDULES[name].fewest
        check_rows(build(name, n, 2, 4), stages(n))


def test_asynchronous_ones_run_by_the_rows_of_their_first_step() -> None:
    for name in ASYNCHRONOUS_KINDS:
        schedule = build(name, 2, 2, 4)
        check_rows(schedule, stages(2))
        others = replace(build("gpipe", 2, 2, 4), name=name)
        with pytest.raises(PlanError, match=rf"'{name}' has other rows than those of its first step"):
            check_rows(others, stages(2))
        with pytest.raises(ValueError, match=rf"{name} needs at least as many microbatches a step as stages, not 1"):
            build(name, 2, 2, 1)


def test_what_asynchronous_ones_cannot_train() -> None:
    case = ZOO["gpt2"]()  # its embedding is the head
    graph = capture(case.model, case.args, case.kwargs).graph
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    tied = cut(graph, [ops[len(ops) // 2]])
    with pytest.raises(PlanError, match=r"wte.weight' is read by stages 0, 1, whose weights schedule 'pipedream"):
        check_rows(build("pipedream", 2, 2, 4), tied)
    check_rows(build("1f1b", 2, 2, 4), tied)


def test_what_never_ends_or_trains_nothing() -> None:
    with pytest.raises(PlanError, match="has no backward"):
        check_rows(forward_only(2, 4, loop_placement(2, 2)), stages(2))
    rows = parse("schedule mine stages 2 microbatches 1\nrank 0 holds 0 1: 0F0 1F0 0B0 1B0")
    with pytest.raises(PlanError, match=r"never ends[\s\S]*rank 0 waits at action 2, 0B0, for 1B0"):
        check_rows(rows, stages(2))
    with pytest.raises(PlanError, match=r"2 stages for|3 stages for"):
        check_rows(build("1f1b", 3, 3, 2), stages(2))
