"""Stages of a plan as blocks of the model, and whether the model's own code can be left and entered there."""

from __future__ import annotations

from typing import Any

from autopar.errors import PlanError
from autopar.planner.layouts.stage_starts import block_of, blocks_of
from autopar.targets.target import Export
from autopar.targets.trainers.fsdp2.folder import pipeline
from autopar.targets.trainers.fsdp2.inputs import caller, inputs_with_rows, loss_position, microbatch_of_rank
from autopar.targets.trainers.fsdp2.sayable import SCHEDULES


def pipeline_of(export: Export) -> dict[str, Any]:
    """Return the table of stages: the class of the schedule, first blocks, and parameters of several stages.

    Raises:
        PlanError: the model's code cannot be run in stages; the message has the place and the reason.
    """
    layout = export.layout
    if layout.groups == 1:
        return {}
    starts = starts_of(export)
    blocks = list(blocks_of(export.priced.captured.graph))
    recorded = recorded_stages(export, starts, blocks)
    tied = {name: sorted({stage % layout.groups for stage in stages})
            for name, stages in recorded.used.items() if len(stages) > 1}  # fmt: skip
    return {"schedule": SCHEDULES[layout.schedule.partition(":")[0]], "starts": starts, "tied": tied}


def starts_of(export: Export) -> list[str]:
    """Return the paths of the blocks that the plan's stages but the first begin with."""
    graph = export.priced.captured.graph
    modules = {node.name: node.module for _, node in graph.of_kind("op")}
    found = []
    for number, stage in enumerate(export.priced.plan.stages[1:], 1):
        block = block_of(modules.get(stage.first, ""))
        if block not in blocks_of(graph) or block in found:
            raise PlanError(
                f"fsdp2: {layout_text(export)}: stage {number} begins with {stage.first}, which is no block of its "
                "own; use fewer stages (pp x vp) than blocks"
            )
        found.append(block)
    return found


def recorded_stages(export: Export, starts: list[str], blocks: list[str]) -> pipeline.Recorded:
    """Return what stages take from each other, after every one has run on shapes."""
    call, example = caller(loss_position(export)), microbatch_of_rank(export)
    dp = f"{layout_text(export)}: pipeline stages of this model cannot be made from its own code"
    model = pipeline.on_meta(export.loaded.model)
    try:
        recorded = pipeline.record(model, call, example, starts, blocks)
    except Exception as error:
        raise PlanError(f"fsdp2: {dp}: on shapes alone it raises {first_line(error)}; use pp=1 with dp or fsdp") from None
    if recorded.problem:
        raise PlanError(f"fsdp2: {dp}: {recorded.problem}; use pp=1 with dp or fsdp")
    constants = {name: value for name, value in example.items() if name not in inputs_with_rows(export)}
    rows = {name: value for name, value in example.items() if name not in constants}
    for number in range(len(starts) + 1):
        stage = pipeline.Stage(model, call, recorded, number, constants)
        stage.take_arrivals()
        arrived = [t.detach() for t in recorded.carried[starts[number - 1]][1]] if number else []
        try:
            stage(*arrived, **rows)
        except Exception as error:
            raise PlanError(f"fsdp2: {dp}: stage {number} raises {first_line(error)}; use pp=1 with dp or fsdp") from None
    return recorded


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def layout_text(export: Export) -> str:
    """Return the words of the layout, for messages."""
    return export.layout.text
