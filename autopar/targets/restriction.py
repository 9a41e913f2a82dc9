"""What a trainer's restrictions cost, and which of its choices costs it.

The search over everything is made again with one decision of the trainer's best layout pinned after the other: first
its groups, schedule and microbatches, then the mesh, then what is recomputed. What is left between the last of them and
the layout is the way in which the trainer cuts operators and stores parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture import Captured
from autopar.errors import AutoparError
from autopar.planner import planning
from autopar.planner.layouts.pricing import PricedLayout
from autopar.planner.planning import Outcome
from autopar.plans.request import PlanRequest
from hardware_profiles import Cluster


@dataclass(frozen=True)
class Restriction:
    """A decision of a trainer's layout, and what it adds to the step.

    Attributes:
        seconds: what a step takes more once the search has to decide so, beside the restrictions before it.
    """

    what: str
    seconds: float


@dataclass(frozen=True)
class RestrictedPlan:
    """autopar's own best plan beside a trainer's best layout, both priced with the trainer's software.

    Attributes:
        own: the outcome of the search over everything.
        restrictions: what each decision costs; they add up to the difference in seconds.
    """

    own: Outcome
    restrictions: tuple[Restriction, ...]


def restricted(
    model: torch.nn.Module, captured: Captured, example: Any, cluster: Cluster, request: PlanRequest, name: str,
    best: PricedLayout, say: Callable[[str], None] = lambda _: None,
) -> RestrictedPlan:  # fmt: skip
    """Search without the trainer's restrictions, then with one after the other.

    Args:
        captured: the capture of the whole batch, which ``example`` is.
        cluster: with the software of the trainer; ``name``: as plans remember it.
        request: the options of the search over everything.
        best: the trainer's best layout.
    """
    def find(wanted: PlanRequest) -> Outcome:
        return planning.find(
            model, captured, lambda: example, cluster, cluster.n_devices, wanted, name, runs=False, say=say
        )  # fmt: skip

    own = find(replace(request, top=1))
    before, found = own.plan.seconds, []
    for what, wanted in _pinned(request, best):
        say(what)
        try:
            seconds = max(before, find(wanted).plan.seconds)  # a search in less room is never behind
        except AutoparError:  # what it pins does not go together with the rest: its cost counts with the next
            continue
        found.append(Restriction(what, min(seconds, best.seconds) - before))
        before = before + found[-1].seconds
    found.append(Restriction("its cuts of operators and its storage of parameters", best.seconds - before))
    return RestrictedPlan(own, tuple(found))


def _pinned(request: PlanRequest, best: PricedLayout) -> Iterator[tuple[str, PlanRequest]]:
    """Yield requests with more and more of a layout pinned."""
    plan = best.plan
    groups = plan.schedule.n_ranks
    pins = replace(
        request.pins, stages=groups, microbatches=plan.microbatches,
        schedules=(best.layout.schedule,) if groups > 1 else (),
    )  # fmt: skip
    wanted = replace(request, pins=pins, microbatches=plan.microbatches, numbers=None, insisted=True, top=1)
    yield "its groups, schedule and microbatches", wanted
    wanted = replace(wanted, pins=replace(wanted.pins, mesh=plan.stages[0].mesh))
    yield "its mesh", wanted
    again = tuple(plan.pins.recompute)
    yield "its recomputation", replace(
        wanted, pins=replace(wanted.pins, recompute=again), may_recompute=False
    )
