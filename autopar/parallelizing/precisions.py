"""A choice among precision policies: the fastest whose plan fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CaptureError, InfeasibleError, PlanError
from autopar.planner.inter_op.stage_search import INTERRUPTED
from autopar.plans.plan import Plan
from autopar.plans.request import PlanRequest
from autopar.runtime.ranks.agree import share
from autopar.words.precision import Precision, adding_up_in, parse_precision


def fastest(policies: Sequence[Precision], plan_under: Callable[[Precision], Plan]) -> tuple[Precision, Plan, str]:
    """Return the policy whose plan is the fastest that fits, its plan, and a note with the seconds of all.

    Of equally fast ones it is the first, so wider ones stand first.

    Args:
        policies: those that are allowed, one or more.
        plan_under: plans under one of them.

    Raises:
        AutoparError: under none is there a plan; it says why for each.
    """
    found: list[tuple[Precision, Plan]] = []
    failed: list[tuple[Precision, AutoparError]] = []
    for policy in policies:
        if found and INTERRUPTED in found[-1][1].notes:
            break
        try:
            policy.check_runs()
            found.append((policy, plan_under(policy)))
        except (PlanError, CaptureError, InfeasibleError) as error:  # it does not fit, or devices lack cores for it
            failed.append((policy, error))
    if not found:
        if len({str(error) for _, error in failed}) == 1:  # the reason is another one than the policy
            raise failed[0][1]
        whys = "\n".join(f"  {policy}: {error}" for policy, error in failed)
        raise PlanError(f"no plan under any of the policies that precision allows:\n{whys}")
    best, plan = min(found, key=lambda each: each[1].seconds)
    seconds = ", ".join(f"{policy} {plan.seconds:.4g} s" for policy, plan in found)
    lost = "".join(f"; {policy} has no plan ({str(error).splitlines()[0]})" for policy, error in failed)
    left = policies[len(found) + len(failed) :]
    lost += "".join(f"; {policy} was not planned, as the search was interrupted" for policy in left)
    return best, plan, f"precision {best}, the fastest that fits of those that were allowed: {seconds} a step{lost}"


def agreed_on(
    group: dist.ProcessGroup | None, choose: Callable[[], tuple[Precision, Plan, str]]
) -> tuple[Precision, str]:
    """Return the policy that the first rank of ``group`` chooses by :func:`fastest`, and the note, on all ranks."""
    text, note, error = None, "", None
    try:
        if dist.get_rank(group) == 0:
            policy, _, note = choose()
            text = policy.text
    except Exception as e:
        error = e
    chosen = parse_precision(share(group, text, error))
    assert chosen is not None
    return chosen, share(group, note, None)


def request_under(request: PlanRequest, policy: Precision, gradient_dtype: torch.dtype | None) -> PlanRequest:
    """Return the request for a plan under one policy, with gradients summed in ``gradient_dtype`` if that is given."""
    policy = policy if gradient_dtype is None else adding_up_in(policy, gradient_dtype)
    return replace(request, pins=replace(request.pins, precision=policy))


def with_note(plan: Plan, note: str) -> Plan:
    """Return a plan with a note before its others."""
    return replace(plan, notes=(note, *plan.notes)) if note else plan
