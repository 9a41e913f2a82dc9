"""Stages of a plan as blocks of the model, and whether the model's own code can be entered and left there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.planner.layouts.stage_starts import block_of, blocks_of
from autopar.targets.target import Export
from autopar.targets.trainers.fsdp2.folder import pipeline
from autopar.targets.trainers.fsdp2.inputs import caller, inputs_with_rows, loss_position, microbatch_of_rank
from autopar.targets.trainers.fsdp2.patterns import compressed_table
from autopar.targets.trainers.fsdp2.recording import Recorded, fake_copy, fake_inputs, on_shapes
from autopar.targets.trainers.fsdp2.sayable import SCHEDULES
from autopar.torch_private import FakeTensorMode


def pipeline_of(export: Export) -> dict[str, Any]:
    """Return the table of stages: see ``folder/pipeline.py``.

    Raises:
        PlanError: the model's code cannot be run in stages; the message has the place and the reason.
    """
    layout = export.layout
    if layout.groups == 1:
        return {}
    starts = starts_of(export)
    blocks = list(blocks_of(export.priced.captured.graph))
    if [path for path, _ in export.loaded.model.named_modules() if path in blocks] != blocks:
        raise refusal(export, "it calls its blocks in another order than it holds them")
    mode = FakeTensorMode()
    model, inputs = fake_copy(export.loaded.model, mode), fake_inputs(microbatch_of_rank(export), mode)
    call = caller(loss_position(export))
    recorded = Recorded(model, starts, blocks)
    try:
        with on_shapes(mode), recorded:
            call(model, inputs)
    except Exception as error:
        raise refusal(export, f"a call on shapes alone raises {first_line(error)}") from error
    if recorded.problem:
        raise refusal(export, recorded.problem)
    table = {
        "schedule": schedule_of(export),
        "rows": export.rows_of_rank,
        "starts": starts,
        "takes": {start: {k: in_text(t) for k, t in given.items()} for start, given in recorded.takes.items()},
        "returns": returns_of(export, recorded, blocks),
        "outside": stages_outside(export, recorded, model, blocks),
        "tied": {name: sorted(stages) for name, stages in recorded.used.items() if len(stages) > 1},
    }
    check_stages(export, table, blocks)
    return table


def schedule_of(export: Export) -> str:
    """Return the class of the schedule.

    ``Schedule1F1B`` refuses fewer microbatches than stages; ``ScheduleInterleaved1F1B`` with a stage a rank runs them.
    """
    name, m, groups = export.layout.schedule.partition(":")[0], export.microbatches, export.layout.groups
    if name == "interleaved-1f1b" and m % max(1, m // groups):
        raise PlanError(
            f"fsdp2: {export.layout.text}: ScheduleInterleaved1F1B runs microbatches in {m // groups} rounds, and {m} "
            f"do not divide; use a multiple of pp={groups}"
        )
    return SCHEDULES["interleaved-1f1b" if name == "1f1b" and m < groups else name]


def refusal(export: Export, why: str) -> PlanError:
    """Return the error of a model whose stages cannot be made."""
    return PlanError(
        f"fsdp2: {export.layout.text}: the stages of this model cannot be made from its own code: {why}; use pp=1 with "
        "dp or fsdp"
    )


def starts_of(export: Export) -> list[str]:
    """Return the paths of the blocks that the plan's stages but the first begin with."""
    graph = export.priced.captured.graph
    modules = {node.name: node.module for _, node in graph.of_kind("op")}
    found: list[str] = []
    for number, stage in enumerate(export.priced.plan.stages[1:], 1):
        block = block_of(modules.get(stage.first, ""))
        if block not in blocks_of(graph) or block in found:
            raise PlanError(
                f"fsdp2: {export.layout.text}: stage {number} begins with {stage.first}, which is in no block of its "
                "own; use fewer stages (pp x vp) than blocks"
            )
        found.append(block)
    return found


def returns_of(export: Export, recorded: Recorded, blocks: Sequence[str]) -> dict[str, Any]:
    """Return what blocks and modules outside of them return, by path; alike blocks of a list under one pattern."""
    if [path for path in recorded.outputs if path in blocks] != list(blocks):
        raise refusal(export, "it does not call every block once, in the order in which the capture has them")
    texts: dict[str, Any] = {}
    for path, output in recorded.outputs.items():
        plain = pipeline.mapped(lambda leaf: in_text(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)
        if not is_literal(plain):
            raise refusal(export, f"{path} returns a {type(output).__name__}, which is no tensor, tuple, list or dict")
        texts[path] = plain
    return compressed_table(texts, export.loaded.model)


def in_text(tensor: torch.Tensor) -> str:
    """Return a tensor as ``float32[4, 32]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_literal(value: Any) -> bool:
    """Check whether a value can be written as source and read back."""
    if type(value) in (tuple, list):
        return all(map(is_literal, value))
    if type(value) is dict:
        return all(map(is_literal, (*value, *value.values())))
    return value is None or type(value) in (str, int, float, bool)


def stages_outside(export: Export, recorded: Recorded, model: torch.nn.Module, blocks: Sequence[str]) -> dict[str, Any]:
    """Return the stages that have each module outside of blocks: those that read one of its parameters."""
    found = {}
    covered = set()
    for path in (p for p in recorded.outputs if p not in blocks):
        names = {recorded.names[id(p)] for p in model.get_submodule(path).parameters()}
        own = {name for name in names if not shared_with(model, name, path)}
        found[path] = sorted(set().union(*(recorded.used[name] for name in own or names)))
        covered |= names
    covered |= {name for name in recorded.used for block in blocks if name.startswith(f"{block}.")}
    left = sorted(name for name, stages in recorded.used.items() if stages and name not in covered)
    if left:
        raise refusal(export, f"parameter {left[0]} is read outside of modules that can be left out")
    return found


def shared_with(model: torch.nn.Module, name: str, path: str) -> bool:
    """Check whether a parameter has another name outside of a module."""
    wanted = model.get_parameter(name)
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is wanted]
    return any(not n.startswith(f"{path}.") for n in names)


def check_stages(export: Export, table: dict[str, Any], blocks: list[str]) -> None:
    """Run every stage on shapes, and refuse what fails or sends other shapes than the table says."""
    mode = FakeTensorMode()
    example, with_rows = fake_inputs(microbatch_of_rank(export), mode), inputs_with_rows(export)
    constants = {name: value for name, value in example.items() if name not in with_rows}
    rows = {name: value for name, value in example.items() if name in with_rows}
    model = fake_copy(export.loaded.model, mode)
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for number in range(len(table["starts"]) + 1):
        with on_shapes(mode):
            stage = pipeline.StageOfModel(
                model, caller(loss_position(export)), number, table, blocks, constants, floats
            )
            stage.take_arrivals()
            arrived = [pipeline.empty(t, floats, "cpu").requires_grad_() for t in stage.takes.values()]
            try:
                sent = stage(*arrived, **rows)
            except Exception as error:
                raise refusal(export, f"stage {number} raises {first_line(error)}") from error
        if number < len(table["starts"]):
            wanted = list(table["takes"][table["starts"][number]].values())
            if [in_text(t) for t in pipeline.tensors_in(sent)] != wanted:
                raise refusal(export, f"stage {number} sends other shapes than {', '.join(wanted)}")


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
