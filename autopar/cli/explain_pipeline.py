"""``autopar explain`` of a pipelined plan: an op within its stage, or the cut at which a stage begins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.common import UsageError, out, print_json, progress, show_bytes, show_seconds
from autopar.cli.explain import as_facts, copies_able, found_ops, priced_ops, print_ops, wishing
from autopar.cli.pipeline import opened, what_if
from autopar.cli.stages import asked_for, facts_of, memory_table, times_table, why

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.graph import Graph
    from autopar.pipeline import PipelinePlan
    from autopar.plan import StagePlan
    from autopar.planner.inter_op.replan import Replanner


def explain(
    path: Path, op: str, wanted: dict[str, str] | None, limit: float | None, top: int, model: str | None, as_json: bool
) -> None:
    """See :func:`autopar.cli.explain.explain`."""
    _, captured, plan = opened(path, model)
    asked = what_if(path, captured, plan)
    stage = re.fullmatch(r"stage:(.*)", op)
    if stage is None:
        _op(captured, asked, op, wanted, limit, top, as_json)
    elif wanted is not None or limit is not None:
        raise UsageError(f"--instead and --memory-limit are for an op; '{op}' is a cut, whose neighbours are shown")
    else:
        _cut(captured, asked, _number(plan, stage[1]), as_json)


def _number(plan: PipelinePlan, text: str) -> int:
    last = len(plan.stages) - 1
    if last == 0:
        raise UsageError(f"stage:{text}: the plan has 1 stage, so there is no cut to explain")
    if not text.isdecimal() or not 1 <= int(text) <= last:
        raise UsageError(
            f"stage:{text} is no stage that begins at a cut; use stage:1" + (f" to stage:{last}" if last > 1 else "")
        )
    return int(text)


# --- an op


def _op(
    captured: Captured, asked: Replanner, op: str, wanted: dict[str, str] | None, limit: float | None, top: int,
    as_json: bool,
) -> None:  # fmt: skip
    from autopar.labels import op_labels
    from autopar.planner.inter_op.stage_pins import check
    from autopar.planner.intra_op.mesh_plan import Options
    from autopar.planner.intra_op.price import pricer

    graph, plan = captured.graph, asked.plan
    labels = op_labels(graph)
    names = {graph.nodes[i].name for i in found_ops(graph, op)}
    held = {s.number: found for s in asked.graphs if (found := _numbers(s.graph, names))}
    if not held:
        raise UsageError(f"'{op}' is in no stage: nothing that is returned depends on it")
    for number in held if wanted is not None else ():
        check(graph, Options(constraints={op: wanted or {}}), plan.stages[number].mesh)
    facts: list[dict[str, Any]] = []
    for number, numbers in held.items():
        stage, choice = asked.graphs[number], plan.stages[number]
        priced = pricer(asked.cluster, choice.mesh, choice.devices)
        results = priced_ops(stage.graph, choice, priced, numbers)
        if as_json:
            facts += [{"stage": stage.number, **as_facts(stage.graph, r, labels)} for r in results]
        else:
            print_ops(stage.graph, choice, results, labels, top, f", stage {stage.number}")
    best = None if wanted is None else _instead(asked, held, wanted, limit)
    if as_json:
        print_json({"ops": facts, "instead": best})
    elif best is not None:
        _print_instead(best)


def _numbers(graph: Graph, names: set[str]) -> list[int]:
    return [i for i, n in enumerate(graph.nodes) if n.kind == "op" and n.name in names]


def _instead(
    asked: Replanner, held: dict[int, list[int]], wanted: dict[str, str], limit: float | None
) -> dict[str, Any]:
    """The stages with the ops and their copies cut as wanted solved again, and the step simulated with them."""
    choices: list[StagePlan] = list(asked.plan.stages)
    whole, ops = asked.graph, 0
    for number, numbers in held.items():
        graph = asked.graphs[number].graph
        alike = copies_able(whole, [whole.index[graph.nodes[i].name] for i in numbers], wanted)
        targets = [name for i in alike if (name := whole.nodes[i].name) in graph.index]
        ops += len(targets)
        options = wishing(asked.options, targets, wanted, limit)
        with progress(f"solving stage {number} again"):
            choices[number] = asked.solved(number, options)
    before, now = asked.simulated()
    after, then = asked.simulated(choices)
    return {
        "wanted": wanted, "ops": ops, "seconds": after.seconds, "plan_seconds": before.seconds,
        "makespan_seconds": then.makespan_seconds, "bubble_fraction": then.bubble_fraction,
        "stages": [
            {
                "stage": s, "seconds": then.times.forward_seconds[s] + then.times.backward_seconds[s],
                "plan_seconds": now.times.forward_seconds[s] + now.times.backward_seconds[s],
                "memory_bytes": after.stages[s].price.memory_bytes,
                "plan_memory_bytes": before.stages[s].price.memory_bytes,
            } for s in held
        ],
    }  # fmt: skip


def _print_instead(best: dict[str, Any]) -> None:
    console = out()
    wanted = ",".join(f"{axis}={factor}" for axis, factor in best["wanted"].items())
    console.print(f"With {wanted} on {best['ops']} op{'s' if best['ops'] != 1 else ''}:")
    for s in best["stages"]:
        console.print(
            f"  the best plan of stage {s['stage']} takes {show_seconds(s['seconds'])} a microbatch and "
            f"{show_bytes(s['memory_bytes'])}; this plan {show_seconds(s['plan_seconds'])} and "
            f"{show_bytes(s['plan_memory_bytes'])}: {s['seconds'] / s['plan_seconds'] - 1:+.1%} time"
        )
    console.print(
        f"  the whole step takes [bold]{show_seconds(best['seconds'])}[/bold], {best['bubble_fraction']:.1%} of its "
        f"schedule idle; this plan {show_seconds(best['plan_seconds'])}: "
        f"{best['seconds'] / best['plan_seconds'] - 1:+.1%}."
    )


# --- a cut


def _cut(captured: Captured, asked: Replanner, number: int, as_json: bool) -> None:
    plan, timeline = asked.simulated()
    facts = facts_of(captured, plan, timeline, asked.cluster)
    stages = facts["stages"]
    others = [_moved(captured, asked, number, by) for by in (-1, 1)]
    crossing = sum(crossing.spec.n_bytes for crossing in asked.graphs[number].takes)
    seconds = [e for e in facts["transfers"] if e["target"] == number]
    cut = {
        "stage": number, "begins_at": stages[number]["begins_at"], "pinned": bool(plan.pins.cuts),
        "arriving_bytes": crossing, "forward_seconds": sum(e["forward_seconds"] for e in seconds),
        "backward_seconds": sum(e["backward_seconds"] for e in seconds), "instead": others,
    }  # fmt: skip
    if as_json:
        print_json({**facts, "cut": cut})
        return
    console = out()
    console.print(f"stage {number} begins at [bold]{cut['begins_at']}[/bold]", highlight=False)
    if asked_for(plan.pins):
        console.print(f"asked for: {asked_for(plan.pins)}", markup=False)
    console.print(times_table(stages))
    console.print(memory_table(stages))
    for line in why(facts):
        console.print(line, markup=False)
    console.print(
        f"at the cut {show_bytes(crossing)} a microbatch arrive from earlier stages: "
        f"{show_seconds(cut['forward_seconds'])} forward, {show_seconds(cut['backward_seconds'])} backward"
    )
    for other in others:
        console.print(_told(other, facts), markup=False)
    if cut["pinned"]:
        console.print("The cut is where it was asked for.")


def _moved(captured: Captured, asked: Replanner, number: int, by: int) -> dict[str, Any]:
    """The step with the cut one block earlier or later, or why that cannot be."""
    from autopar.errors import AutoparError
    from autopar.labels import op_labels

    first = asked.neighbour(number, by)
    found: dict[str, Any] = {"blocks": by, "begins_at": None, "seconds": None, "why_not": None}
    if first is None:
        found["why_not"] = f"stage {number - 1 if by < 0 else number} would be empty"
        return found
    found["begins_at"] = op_labels(captured.graph)[first]
    try:
        with progress(f"moving the cut by {by:+d}"):
            plan, timeline = asked.moved(number, first)
    except AutoparError as error:
        found["why_not"] = str(error)
        return found
    t, pair = timeline.times, (number - 1, number)
    return {
        **found, "seconds": plan.seconds, "bubble_fraction": timeline.bubble_fraction,
        "stages": [
            {"stage": s, "seconds": t.forward_seconds[s] + t.backward_seconds[s],
             "memory_bytes": plan.stages[s].price.memory_bytes} for s in pair
        ],
    }  # fmt: skip


def _told(other: dict[str, Any], facts: dict[str, Any]) -> str:
    where = "with the cut one block earlier" if other["blocks"] < 0 else "with the cut one block later"
    if other["begins_at"] is not None:
        where += f", at {other['begins_at']}"
    if other["seconds"] is None:
        return f"{where}: not possible, {other['why_not']}"
    change = other["seconds"] / facts["seconds"] - 1
    lines = [f"{where}: {show_seconds(other['seconds'])} a step ({change:+.1%}), {other['bubble_fraction']:.1%} idle"]
    for s in other["stages"]:
        more = s["seconds"] - _seconds(facts["stages"][s["stage"]])
        lines.append(
            f"  stage {s['stage']}: {show_seconds(s['seconds'])} a microbatch ({'-' if more < 0 else '+'}"
            f"{show_seconds(abs(more))}), {show_bytes(s['memory_bytes'])}"
        )
    return "\n".join(lines)


def _seconds(stage: dict[str, Any]) -> float:
    return float(stage["forward_seconds"] + stage["backward_seconds"])
