"""Asynchronous schedules in plans: what they do to training, and which models they cannot train.

Weights change while microbatches are in flight, so a stage keeps several versions of them
(:mod:`cost_models.schedules.asynchronous`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError, first_few
from autopar.plans.plan import StagePlan
from autopar.plans.prices import ONE_VERSION, KeptVersions
from autopar.plans.stage_graphs import StageGraph
from cost_models.schedules import ASYNCHRONOUS_KINDS, Schedule, weight_versions
from cost_models.schedules.asynchronous import stream

INSTEAD = "choose a schedule that trains as one device does, such as 1f1b"


def versions_of(schedule: Schedule) -> tuple[KeptVersions, ...]:
    """Return the weight versions that each stage of a schedule keeps."""
    every = schedule.name == "pipedream"
    counts = weight_versions(schedule)
    return tuple(KeptVersions(n, every) if schedule.name in ASYNCHRONOUS_KINDS else ONE_VERSION for n in counts)


def note_on_training(schedule: Schedule) -> str:
    """Return a note on what a schedule changes in training; empty if it changes nothing."""
    if schedule.name not in ASYNCHRONOUS_KINDS:
        return ""
    late = (
        f"stage s of {schedule.n_stages} applies gradients of weights {schedule.n_stages} - 1 - s microbatches old, "
        "with an update after every microbatch"
        if schedule.name == "pipedream"
        else "gradients are of weights one step old"
    )
    return (
        f"{schedule.name} was asked for and changes the training result: {late}. The seconds are those of a step in a "
        "full pipeline; the first one fills it, and drain() empties it"
    )


def check_asynchronous(schedule: Schedule, graphs: Sequence[StageGraph], stages: Sequence[StagePlan] = ()) -> None:
    """Refuse what an asynchronous schedule cannot train; others are not looked at.

    Args:
        graphs: the stages.
        stages: their plans, where they are known.

    Raises:
        PlanError: the rows are not those of the schedule; several stages read a trained parameter; forward writes to
            parameters, or does not always use all of them; an input wants a gradient; or a parameter is gathered anew
            for its backward.
    """
    name = schedule.name
    if name not in ASYNCHRONOUS_KINDS:
        return
    try:
        stream(schedule, 1)
    except ValueError as error:
        raise PlanError(str(error)) from None
    readers: dict[str, list[int]] = {}
    for part in graphs:
        for _, node in part.graph.of_kind("param"):
            if node.needs_grad:
                readers.setdefault(node.target, []).append(part.number)
    for param, numbers in readers.items():
        if len(numbers) > 1:
            raise PlanError(
                f"parameter '{param}' is read by stages {', '.join(map(str, numbers))}, whose weights schedule "
                f"'{name}' updates at different times, so that its copies would come apart: cut the model so that one "
                f"stage reads it (cuts=), use a parameter of its own for each (tie_word_embeddings=False), or {INSTEAD}"
            )
    for part in graphs:
        graph, where = part.graph, f"stage {part.number}"
        if graph.before is not None:
            raise PlanError(
                f"{where}: forward writes to parameters before it reads them, and schedule '{name}' has several "
                f"versions of them: {INSTEAD}"
            )
        if graph.parts:
            raise PlanError(
                f"{where}: some parameters take no part in some microbatches ('{graph.parts[0].target}' says which), "
                f"and schedule '{name}' updates all of a stage together: {INSTEAD}"
            )
        wanted = [n.target for _, n in graph.of_kind("input") if n.target in part.inputs and n.needs_grad]
        if wanted:
            raise PlanError(
                f"{where}: input {first_few(wanted)} wants a gradient, and under schedule '{name}' train_step returns "
                f"before it is there: detach() it in the example inputs, or {INSTEAD}"
            )
    for number, plan in enumerate(stages):
        again = [param for param, choice in plan.params.items() if choice.lifetime == "use"]
        if again:
            raise PlanError(
                f"stage {number} gathers parameter {first_few(again)} anew for its backward (lifetime 'use'), when "
                f"schedule '{name}' has a newer version of it: write lifetime 'step' into the plan, plan the model "
                f"again, or {INSTEAD}"
            )
