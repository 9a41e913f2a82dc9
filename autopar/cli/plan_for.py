"""``autopar plan --for``: the fastest layouts that another trainer can express."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cli.common import UsageError, print_lines, progress, show_bytes, show_seconds
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.frontends import Loaded
    from autopar.planner.layouts.pricing import PricedLayout
    from autopar.plans.request import PlanRequest
    from autopar.targets.restriction import RestrictedPlan
    from autopar.targets.search import TargetPlans, TargetSearch

SMALL = 0.0005
"""Share of a step below which a restriction is not listed."""


def search_of(
    loaded: Loaded, captured: Captured, where: str, request: PlanRequest, name: str
) -> tuple[TargetSearch, TargetPlans]:
    """Return a search among a trainer's layouts, and what it found; ``where``: the cluster with its software."""
    from autopar.capture.microbatches import rows_of
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.planner.planning import options_of
    from autopar.targets import target_named
    from autopar.targets.exporting import Exporter, remembering

    example = loaded.args, loaded.kwargs
    layouts = PricedLayouts(loaded.model, captured, example, options_of(request), request.input_rows)
    with progress(f"searching what {name} can express") as say:
        search = Exporter(target_named(name), loaded, captured, layouts, where, rows_of(example), say).search()
        found = search.find(request.top)
    return search, replace(found, fitting=[remembering(name, each) for each in found.fitting])


def beside_own(
    loaded: Loaded, captured: Captured, where: str, request: PlanRequest, best: PricedLayout
) -> RestrictedPlan:
    """Return autopar's own best plan for the same software, and what the trainer's restrictions cost."""
    from autopar.plans.clusters import get_cluster
    from autopar.progress import heard
    from autopar.targets.restriction import restricted

    with progress("searching everything, to compare") as say, heard(say):
        return restricted(
            loaded.model, captured, (loaded.args, loaded.kwargs), get_cluster(where), request, where, best, say
        )


def check_free(request: PlanRequest, likes: int) -> None:
    """Refuse options that say what the trainer's layout says."""
    if likes or not request.everything or request.pins.recompute or not request.may_recompute or request.pins.ops:
        raise UsageError(
            "--for searches the layouts of a trainer: leave out --mesh, --stages, --schedule, --cut, --microbatches, "
            "--recompute, --pin and --like; autopar export writes the plan of a layout given by --like-output, too"
        )


def show(found: TargetPlans, where: str, top: int, own: RestrictedPlan | None) -> None:
    """Print the best layouts of a trainer, and what its restrictions cost."""
    from autopar.cli.layouts import table
    from autopar.plans.clusters import get_cluster
    from autopar.report.layouts import layout_row, with_front

    hardware = get_cluster(where)
    best = found.best
    rows = [
        layout_row(each.layout.text, each.plan, each.timeline, each.captured.graph, hardware)
        for each in found.fitting[:top]
    ]
    if own is not None and own.own.timeline is not None:
        plan = own.own.plan
        rows.append(layout_row("autopar's own", plan, own.own.timeline, own.own.captured.graph, hardware))
    if top > 1:
        table(with_front(rows))
        print_lines(*(f"  refused: {each.words}: {each.reason}" for each in found.refused[: top - 1]))
    print_lines(
        f"{best.layout.text} on {where}: {show_seconds(best.seconds)} a step, {show_bytes(best.memory_bytes)} of "
        f"{show_bytes(best.limit_bytes)}",
        *(f"  note: {note}" for note in best.pinned.notes),
        *([] if own is None else cost_lines(best, own)),
    )  # fmt: skip


def cost_lines(best: PricedLayout, own: RestrictedPlan) -> list[str]:
    """Return what the restriction to a trainer costs, in all and by decision."""
    seconds = own.own.plan.seconds
    more = best.seconds - seconds
    lines = [
        f"without its restrictions a step takes {show_seconds(seconds)}: they cost {show_seconds(max(0.0, more))} "
        f"({more / seconds:+.1%})"
    ]
    lines += [
        f"  {each.what}: {each.seconds / seconds:+.1%}"
        for each in own.restrictions if abs(each.seconds) > SMALL * seconds
    ]  # fmt: skip
    return lines


def facts(search: TargetSearch, found: TargetPlans, top: int, own: RestrictedPlan | None) -> Facts:
    """Return the layouts of a trainer and the cost of its restrictions as values for JSON."""
    from autopar.report.alternatives import beside_plan, ranked, reason_slower, step_parts

    best = found.best
    parts = step_parts(best.plan, best.timeline)

    def slower(other: PricedLayout) -> str:
        return reason_slower(other.seconds, step_parts(other.plan, other.timeline), best.seconds, parts)

    rows = [beside_plan(each.layout.text, each, "", slower) for each in found.fitting[1:top]]
    rows += [beside_plan(each.words, each.found, each.reason, slower) for each in found.refused]
    restriction = {
        "target": search.target.name, "software": search.target.software,
        "own_seconds": own.own.plan.seconds if own is not None else None,
        "restrictions": [{"what": each.what, "seconds": each.seconds} for each in own.restrictions] if own else [],
        "notes": list(best.pinned.notes),
    }  # fmt: skip
    return {"layouts": [], "alternatives": ranked(rows), "trainer": restriction}
