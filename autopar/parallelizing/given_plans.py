"""A plan that a caller of ``parallelize`` gives: its precision, its microbatch, and whether rows fit it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar import planfile
from autopar.capture import Captured
from autopar.errors import MeshError, PlanError
from autopar.parallelizing.forward_only import check_mode_of_plan, of_mode
from autopar.planner.planning import Outcome
from autopar.plans.plan import Plan
from autopar.plans.plan_options import TRAINING
from autopar.plans.request import PlanRequest
from autopar.runtime.batches.local_batch import parts_on
from autopar.runtime.batches.runs import rows_of_microbatch
from autopar.runtime.ranks.agree import share
from autopar.words.meshes import Mesh
from autopar.words.precision import Precision, parse_precision
from hardware_profiles import Cluster


def policy_of(plan: Plan | str | Path, group: Any) -> Precision | None:
    """Return the policy that a plan is for, on all ranks; the first one reads it."""
    text, error = "", None
    try:
        if dist.get_rank(group) == 0:
            policy = plan.pins.precision if isinstance(plan, Plan) else planfile.open_(plan).precision
            text = policy.text if policy is not None else ""
    except Exception as e:
        error = e
    return parse_precision(share(group, text, error) or None)


def outcome_of(
    plan: Plan | str | Path, part: Callable[[int], Captured], cluster: Cluster | None, mode: str = TRAINING
) -> Outcome:
    """Return the plan that a caller gives, and one of the microbatches that it is for.

    Raises:
        PlanError: it was made for another mode.
    """
    if isinstance(plan, Plan):
        return of_mode(Outcome(plan, part(plan.microbatches)), mode)
    document = planfile.open_(plan)
    check_mode_of_plan(document.mode or mode, mode)
    one = part(document.microbatches)
    return of_mode(Outcome(planfile.bind(document, one.graph, cluster), one), mode)


def parts_of_batch(plan: Plan | str | Path | None, request: PlanRequest, ranks: int) -> int:
    """Return the number of parts of a batch's rows, each on a rank of its own in every group.

    Raises:
        PlanError: that depends on a number of stages that is still to be chosen.
    """
    if isinstance(plan, Plan):
        return parts_on([stage.mesh for stage in plan.stages])
    if plan is not None:
        return parts_on(planfile.open_(plan).meshes)
    if request.piped and request.pins.stages is None:
        raise PlanError(
            "batch='local' with a number of stages that is to be chosen: how many rows a step has depends on it, since "
            "every group of ranks needs all of them; give stages=, or batch='global'"
        )
    return ranks // (request.pins.stages or 1)


def check_axes_of_plan(plan: Plan, mesh: Mesh | None, groups: int | None) -> None:
    """Refuse a plan for other axes than those that are asked for, of every one of ``groups`` groups of ranks.

    Raises:
        MeshError: with the axes of both.
    """
    have = [stage.mesh for stage in plan.stages]
    if mesh is not None and have != [mesh] * (groups or len(have)):
        wanted = mesh.shown() + (f" in {groups} groups" if groups is not None and groups > 1 else "")
        raise MeshError(
            f"the plan is for mesh {', '.join(one.shown() for one in have)}, mesh= is {wanted}: leave mesh out, or "
            "plan for that mesh"
        )


def check_rows(plan: Plan, captured: Captured, parts: int) -> None:
    """Refuse a plan under which ranks cannot each have their rows.

    Raises:
        PlanError: its groups are too unequal, or microbatches have no rows of some rank.
    """
    possible, rows = parts_on([stage.mesh for stage in plan.stages]), rows_of_microbatch(captured)
    if possible != parts:
        raise PlanError(
            f"batch='local': the plan's groups have {', '.join(stage.mesh.shown() for stage in plan.stages)}, so "
            f"{possible} of their ranks can have rows of their own, and the batch was taken for that of {parts}; give "
            "mesh= of a group, or batch='global'"
        )
    if rows % parts:
        raise PlanError(
            f"batch='local': a microbatch of {rows} rows cannot have equally many of each of {parts} ranks; give fewer "
            "microbatches, or more rows"
        )
