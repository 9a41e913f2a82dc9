"""Plans of several stages as tables: stages, memory, the schedule as a grid, and the reasons for the cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.cli.common import out, print_json, show_bytes, show_pins, show_seconds, styled
from autopar.report import Facts
from autopar.words.meshes import Mesh

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.plans.plan import Plan
    from autopar.report.fitted_tables import FittedTable
    from autopar.words.graph import Graph
    from cost_models.schedules import Timeline
    from hardware_profiles import Cluster

WIDEST = 400
"""Most columns of a grid that is printed."""
GATHERED = "gathered: whole copies of sharded parameters, held while operators use them"


def facts_of(captured: Captured, plan: Plan, timeline: Timeline, cluster: Cluster) -> Facts:
    """Return the facts about a plan of several stages as values."""
    from autopar.plans.stage_graphs import cut
    from autopar.report.axes_in_words import axis_shares
    from autopar.report.coverage import coverage
    from autopar.report.stages import stage_rows, step_anatomy

    stages = stage_rows(captured.graph, plan, timeline, cluster)
    profiled = coverage([stage.graph for stage in cut(captured.graph, plan.starts)], plan.stages, cluster)
    return {
        "schedule": plan.schedule.name, "microbatches": plan.microbatches, "devices": plan.n_devices,
        "groups": plan.schedule.n_ranks, "cluster": plan.cluster, "pins": plan.pins, "seconds": plan.seconds,
        "makespan_seconds": timeline.makespan_seconds, "bubble_fraction": timeline.bubble_fraction,
        "idle_seconds": list(timeline.idle_seconds), "step": step_anatomy(plan, timeline), "stages": stages,
        "axes": axis_shares(captured.graph, plan), "transfers": [
            {"source": e.source, "target": e.target, "forward_seconds": e.forward_seconds,
             "backward_seconds": e.backward_seconds} for e in timeline.times.edges
        ], "notes": list(plan.notes), **({"profile": profiled} if profiled else {}),
    }  # fmt: skip


def describe(captured: Captured, plan: Plan, timeline: Timeline, cluster: Cluster, as_json: bool, more: Facts) -> None:
    """Print tables of the stages and their memory, the schedule as a grid, and the limits of the step."""
    from cost_models.schedules import grid

    facts = facts_of(captured, plan, timeline, cluster)
    if as_json:
        print_json({**facts, **more}, "simulate")
        return
    console, stages = out(), facts["stages"]
    groups = facts["groups"]
    console.print(
        styled("[bold]{} group{}[/bold] of devices on {}, ", groups, "s" if groups != 1 else "", plan.cluster)
        + f"schedule {plan.schedule.name}, {plan.microbatches} microbatch{'es' if plan.microbatches != 1 else ''}, "
        f"{plan.n_devices} devices"
    )
    if pins := show_pins(plan.pins):
        console.print(f"requested: {pins}", markup=False)
    print_layout(captured.graph, plan)
    console.print(times_table(stages))
    console.print(memory_table(stages))
    text = grid(timeline)
    if max(map(len, text.splitlines()), default=0) <= WIDEST:
        console.print(text, markup=False, soft_wrap=True)
    for line in why(facts):
        console.print(line, markup=False)
    if "profile" in facts:
        from autopar.report.coverage import line as known

        console.print(f"  {known(facts['profile'])}", markup=False)
    for what, seconds in more.get("tried", ())[:8]:
        console.print(f"  tried: {show_seconds(seconds):>8}  {what}", markup=False)
    from autopar.planner.plan_notes import NEXT_WORDS

    for note in plan.notes:
        if "tried" not in more or not note.startswith(NEXT_WORDS):  # the table of tried plans has them
            console.print(f"  {note}", markup=False)


def print_layout(graph: Graph, plan: Plan, indent: str = "") -> None:
    """Print a plan in the terms of trainers, what each mesh axis shards, and the layout of each part of the model."""
    from autopar.report.axes_in_words import AxisUse, axes_in_words
    from autopar.report.parts import layout_of_parts
    from autopar.report.plan_in_words import plan_in_words

    console, use = out(), AxisUse(graph)
    console.print(styled("{}[bold]{}[/bold]", indent, plan_in_words(graph, plan, use)))
    if cut := axes_in_words(use.shares(plan.stages)):
        console.print(f"{indent}{cut}", markup=False)
    for part in layout_of_parts(graph, plan, use):
        where = f" in {part.stages}" if part.stages else ""
        console.print(f"{indent}  {part.name} ({part.share:.0%} of the FLOPs){where}: {part.layout}", markup=False)


def times_table(stages: list[Facts]) -> FittedTable:
    """Return a table of the stages' places and seconds of a microbatch."""
    from autopar.report.fitted_tables import FittedTable

    table = FittedTable("stage")
    table.add_column("begins at", below=2, named=False)
    table.add_column("devices")
    table.add_column("mesh", below=1)
    for name in ("forward", "backward: inputs", "weights", "once a step", "in flight"):
        table.add_column(name, justify="right")
    for s in stages:
        seconds = (s[f"{part}_seconds"] for part in ("forward", "input", "weight", "step"))
        table.add_row(
            str(s["stage"]), s["begins_at"], show_devices(s["devices"]), Mesh(s["mesh"].items()).shown(),
            *map(show_seconds, seconds), str(s["in_flight"]),
        )  # fmt: skip
    return table


def memory_table(stages: list[Facts]) -> FittedTable:
    """Return a table of the memory of one device of each stage."""
    from autopar.report.fitted_tables import FittedTable

    parts: tuple[str, ...] = ("parameter", "gradient", "optimizer", "gathered")
    versions = any(s["version_bytes"] for s in stages)
    parts = (*parts, *(["version"] if versions else []))
    table = FittedTable("stage", caption=GATHERED if any(s["gathered_bytes"] for s in stages) else None)
    more = ["weight versions"] if versions else []
    for name in ("parameters", "gradients", "optimizer", "gathered", *more, "activations", "working", "sum", "limit"):
        table.add_column(name, justify="right", below=name in ("parameters", "gradients", "optimizer"))
    for s in stages:
        again = s["activation_bytes"] - s["in_flight"] * s["microbatch_bytes"]
        kept = f"{s['in_flight']} x {show_bytes(s['microbatch_bytes'])}" + (f" + {show_bytes(again)}" if again else "")
        table.add_row(
            str(s["stage"]), *(show_bytes(s[f"{p}_bytes"]) for p in parts), kept, show_bytes(s["working_bytes"]),
            show_bytes(s["memory_bytes"]), show_bytes(s["limit_bytes"]),
        )  # fmt: skip
    return table


def show_devices(devices: list[int]) -> str:
    """Return device numbers as ``0..3``, or as ``0,2,5`` if they are no range."""
    whole = len(devices) > 2 and devices == list(range(devices[0], devices[-1] + 1))
    return f"{devices[0]}..{devices[-1]}" if whole else ",".join(map(str, devices))


def why(facts: Facts) -> list[str]:
    """Return lines about the reasons for the cut: the parts of a step, the slowest group, the fullest memory."""
    from autopar.report.stages import fullest, share_filled

    step, stages = facts["step"], facts["stages"]
    busiest = step["busiest_group"]
    numbers = [str(s["stage"]) for s in stages if s["group"] == busiest]
    which = f"stage{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
    full = fullest(stages)
    share = share_filled(full)
    together = [str(s["stage"]) for s in stages if s["group"] == full["group"]]
    lines = [
        f"a step: {show_seconds(facts['seconds'])}; schedule {show_seconds(facts['makespan_seconds'])}, of which "
        f"{facts['bubble_fraction']:.1%} idle",
        f"  {show_seconds(step['even_seconds'])} computing if balanced over the groups, "
        f"{show_seconds(step['uneven_seconds'])} more in the slowest group, {show_seconds(step['waiting_seconds'])} "
        f"waiting for others and transfers, {show_seconds(step['once_seconds'])} once a step (optimizer, gradients)",
    ]
    if facts["groups"] > 1:
        lines.append(
            f"  slowest: group {busiest} ({which}) computes {show_seconds(max(step['busy_seconds']))}, the mean is "
            f"{show_seconds(step['even_seconds'])}"
        )
    lines.append(
        f"  fullest: stage{'s' if len(together) > 1 else ''} {', '.join(together)} with "
        f"{show_bytes(full['device_bytes'])} of {show_bytes(full['device_limit_bytes'])} "
        f"({share:.1%}): memory {'limits' if share > 0.95 else 'does not limit'} the plan"
    )
    return lines
