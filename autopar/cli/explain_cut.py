"""``autopar explain`` for the cut at which a stage begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.cli.common import UsageError, out, print_json, progress, show_bytes, show_pins, show_seconds, styled
from autopar.cli.stages import facts_of, memory_table, times_table, why
from autopar.report import Facts
from hardware_profiles.strict import Unreadable, parse_count, shortened

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.planner.inter_op.replan import Replanner
    from autopar.plans.plan import Plan


def explain_cut(captured: Captured, replanner: Replanner, stage: str, as_json: bool) -> None:
    """Explain why the stage with this number begins at its block."""
    number = _number(replanner.plan, stage)
    plan, timeline = replanner.simulated()
    facts = facts_of(captured, plan, timeline, replanner.cluster)
    stages = facts["stages"]
    others = [_moved(captured, replanner, number, by) for by in (-1, 1)]
    stage_edge = sum(stage_edge.spec.n_bytes for stage_edge in replanner.graphs[number].takes)
    seconds = [e for e in facts["transfers"] if e["target"] == number]
    cut = {
        "stage": number, "begins_at": stages[number]["begins_at"], "pinned": bool(plan.pins.cuts),
        "arriving_bytes": stage_edge, "forward_seconds": sum(e["forward_seconds"] for e in seconds),
        "backward_seconds": sum(e["backward_seconds"] for e in seconds), "instead": others,
    }  # fmt: skip
    if as_json:
        print_json({**facts, "cut": cut}, "explain-cut")
        return
    console = out()
    console.print(styled("stage {} begins at [bold]{}[/bold]", number, cut["begins_at"]))
    if show_pins(plan.pins):
        console.print(f"requested: {show_pins(plan.pins)}", markup=False)
    console.print(times_table(stages))
    console.print(memory_table(stages))
    for line in why(facts):
        console.print(line, markup=False)
    console.print(
        f"transfers across the cut: {show_bytes(stage_edge)} a microbatch from earlier stages, "
        f"{show_seconds(cut['forward_seconds'])} forward, {show_seconds(cut['backward_seconds'])} backward"
    )
    for neighbour in others:
        console.print(_told(neighbour, facts), markup=False)
    if cut["pinned"]:
        console.print("The cut was requested there.")


def _moved(captured: Captured, replanner: Replanner, number: int, by: int) -> Facts:
    """Return the step with the cut moved by `by` blocks, or the reason why it cannot be moved."""
    from autopar.errors import AutoparError
    from autopar.words.labels import op_labels

    first = replanner.neighbour(number, by)
    facts: Facts = {"blocks": by, "begins_at": None, "seconds": None, "why_not": None}
    if first is None:
        facts["why_not"] = f"stage {number - 1 if by < 0 else number} would be empty"
        return facts
    facts["begins_at"] = op_labels(captured.graph)[first]
    try:
        with progress(f"moving the cut by {by:+d}"):
            plan, timeline = replanner.moved(number, first)
    except AutoparError as error:
        facts["why_not"] = str(error)
        return facts
    t, pair = timeline.times, (number - 1, number)
    return {
        **facts, "seconds": plan.seconds, "bubble_fraction": timeline.bubble_fraction,
        "stages": [
            {"stage": s, "seconds": t.forward_seconds[s] + t.backward_seconds[s],
             "memory_bytes": plan.stages[s].price.memory_bytes} for s in pair
        ],
    }  # fmt: skip


def _told(neighbour: Facts, facts: Facts) -> str:
    where = "with the cut one block earlier" if neighbour["blocks"] < 0 else "with the cut one block later"
    if neighbour["begins_at"] is not None:
        where += f", at {neighbour['begins_at']}"
    if neighbour["seconds"] is None:
        return f"{where}: not possible, {neighbour['why_not']}"
    change = neighbour["seconds"] / facts["seconds"] - 1
    lines = [
        f"{where}: {show_seconds(neighbour['seconds'])} a step ({change:+.1%}), {neighbour['bubble_fraction']:.1%} idle"
    ]
    for s in neighbour["stages"]:
        more = s["seconds"] - _seconds(facts["stages"][s["stage"]])
        lines.append(
            f"  stage {s['stage']}: {show_seconds(s['seconds'])} a microbatch ({'-' if more < 0 else '+'}"
            f"{show_seconds(abs(more))}), {show_bytes(s['memory_bytes'])}"
        )
    return "\n".join(lines)


def _seconds(stage: Facts) -> float:
    return float(stage["forward_seconds"] + stage["backward_seconds"])


def _number(plan: Plan, text: str) -> int:
    last = len(plan.stages) - 1
    if last == 0:
        raise UsageError(
            f"stage:{text}: the plan has 1 stage, so there is no cut to explain; plan with --stages 2 (or auto) for "
            "one with cuts, or explain an operator by its name, as autopar show lists them"
        )
    try:
        number = parse_count(text)
    except Unreadable:
        number = 0
    if not 1 <= number <= last:
        raise UsageError(
            f"stage:{shortened(text)} is no stage that begins at a cut; use stage:1"
            + (f" to stage:{last}" if last > 1 else "")
        )
    return number
