"""Programs of a pipeline, by the shapes that it is called with and by the values that its model has.

A program is all that follows from one captured microbatch: graphs and plans of the stages, what crosses between them,
and what a rank does in a step (:class:`~autopar.runtime.pipelines.rank_actions.Work`) for each number of microbatches.
Parameters stay
where they are: another graph is cut where the first one was, and planned with every parameter stored as it is on the
ranks that have it. What these stages send each other may pass between other ranks than before; then all ranks make the
channels that are missing, together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph, cut
from autopar.rules.registry import drawing
from autopar.runtime.batches.batch import Batch
from autopar.runtime.batches.totals_ahead import totals_ahead
from autopar.runtime.gradients.reached import reached_by
from autopar.runtime.pipelines.rank_actions import Work
from autopar.runtime.pipelines.schedule_check import check_rows
from autopar.runtime.pipelines.ties import Tied, tie_wires, tied_parameters
from autopar.runtime.pipelines.wires import Wire, wires_of
from autopar.runtime.ranks.plan_groups import groups_of
from autopar.runtime.stages.stage import Buffers, Stage
from autopar.runtime.variants.program_cache import KEPT, AllWell, Fields
from autopar.runtime.variants.recaptured import (
    buffers_for,
    check_stored,
    differs,
    placed_buffers,
    planner_for,
    with_buffers_of,
)
from cost_models.schedules import with_microbatches

ReplanStages = Callable[[Captured, int], Plan]
"""Makes, for a captured microbatch and the number of them, a plan of the same stages, the same on all ranks."""
Lines = tuple[tuple[Wire, ...], tuple[Tied, ...]]
"""What crosses between stages, and what several groups of ranks hold."""
PROGRAM = (
    "captured", "parts", "plan", "has_evaluation",
    "drawing", "batch", "reached_by", "totals", "stages",
    "lines", "works", "trained",
)  # fmt: skip
"""What is another with other shapes or values."""


def fields_of(pm: Any) -> Fields:
    """Return what makes up the program that a pipeline runs now."""
    return {name: pm.__dict__[name] for name in PROGRAM}


def resume(pm: Any, fields: Fields) -> None:
    """Run a program again that was kept, with the current buffers."""
    now = _buffers_now(pm)
    for name, value in fields.items():
        setattr(pm, name, value)
    for stage in pm.stages.values():
        with_buffers_of(pm, stage, {name: now[name] for name in stage.buffers if name in now})


def work_of(pm: Any, microbatches: int) -> Work:
    """Return what this rank does in a step of `microbatches` of the program that runs now."""
    works: dict[int, Work] = pm.works
    work = works.pop(microbatches, None)
    if work is None:
        plan = pm.plan
        if microbatches != plan.microbatches:
            plan = replace(plan, schedule=with_microbatches(plan.schedule, microbatches))
            check_rows(plan.schedule, pm.parts)
        wires, tied = pm.lines
        work = Work(
            pm.parts,
            plan,
            pm.rank,
            pm.stages,
            wires,
            tied,
            pm.groups,
            pm.unfinished,
        )
    works[microbatches] = work
    while len(works) > KEPT:
        works.pop(next(iter(works)))
    return work


def take(pm: Any, new: Captured, count: int, replan: ReplanStages | None, all_well: AllWell) -> None:
    """Run ``new`` in the stages: under other plans, if it differs in more than literals.

    Args:
        count: microbatches of the step that follows.

    Raises:
        RunError: parameters would have to be elsewhere; on all ranks.
    """
    reason = differs(pm.captured, new)
    if not reason:
        with all_well():
            _with_other_literals(pm, new)
        return
    with all_well():
        planner = planner_for(reason, replan, "full_state_dict()")
    with all_well():  # rank 0's error is raised on all ranks
        plan = planner(new, count)
    with all_well():
        parts = cut(new.graph, plan.starts)
        check_rows(plan.schedule, parts)
        for s in pm.stages:
            check_stored(pm, plan.stages[s])
        lines = wires_of(parts, plan), tied_parameters(parts, plan)
        _check_ties(pm, new, lines[1])
    with all_well():
        wires, tied = lines
        pm.groups.make(groups_of(parts, plan, [*wires, *tie_wires(tied, plan).values()], tied))
    with all_well():
        now = _buffers_now(pm)
        stages = {}
        for s, before in pm.stages.items():
            graph, stage_plan, mesh = parts[s].graph, plan.stages[s], before.device_mesh
            wanted = {node.target for _, node in graph.of_kind("buffer")}
            there = {name: entry for name, entry in now.items() if name in wanted}
            there |= placed_buffers(pm, wanted - there.keys(), stage_plan.mesh)
            buffers = buffers_for(pm, new, graph, stage_plan, mesh, there)
            stages[s] = Stage(graph, stage_plan, mesh, pm, buffers, before.compile_args)
        pm.stages, pm.lines = stages, lines
        _run(pm, new, parts, plan)


def _with_other_literals(pm: Any, new: Captured) -> None:
    cuts = cut(new.graph, pm.plan.starts)  # crossings stay those that the wires know
    parts = tuple(replace(part, graph=c.graph) for part, c in zip(pm.parts, cuts, strict=True))
    plan = pm.plan.of_graphs(new.graph.fingerprint, [part.graph.fingerprint for part in parts])
    pm.stages = {s: stage.with_other_literals(parts[s].graph) for s, stage in pm.stages.items()}
    _run(pm, new, parts, plan)


def _run(pm: Any, new: Captured, parts: tuple[StageGraph, ...], plan: Plan) -> None:
    """Run the stages that ``pm`` has been given."""
    pm.captured, pm.parts, pm.plan, pm.works = new, parts, plan, {}
    pm.has_evaluation = False
    pm.drawing = (drawing(new.graph),) * 2
    pm.batch = Batch(new, pm.signature, pm.device)
    pm.reached_by, pm.totals = (
        reached_by(new.graph, pm.device),
        totals_ahead(new, pm.device),
    )


def _buffers_now(pm: Any) -> Buffers:
    """Return this rank's buffers, and the constants of its stages, as the program that ran last has them."""
    return {name: entry for stage in pm.stages.values() for name, entry in stage.buffers.items()}


def _check_ties(pm: Any, new: Captured, tied: tuple[Tied, ...]) -> None:
    """Refuse to train where a copy of a parameter would get no gradient, and so come apart from the others.

    Raises:
        RunError: with its name.
    """
    if new.graph.loss is None:
        return
    group = pm.plan.schedule.rank_of_stage
    used = {node.target for _, node in new.graph.of_kind("param")}
    groups_now = {each.name: {group[s] for s in each.stages} for each in tied}
    for each in pm.first_tied:
        before = {group[s] for s in each.stages}
        if each.name in used and groups_now.get(each.name) != before:
            raise RunError(
                f"called so, the model reads parameter '{each.name}' in fewer stages than it did when it was "
                "parallelized, and the copies of the other stages would not be trained with it: call it with the same "
                "arguments in training, or parallelize it with such a call"
            )
