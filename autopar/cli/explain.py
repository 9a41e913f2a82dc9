"""``autopar explain``: why an op is cut as it is, and why a stage begins where it does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Json,
    ModelOption,
    PlanPath,
    Trust,
    UsageError,
    opened,
    out,
    print_json,
    print_lines,
    progress,
    show_bytes,
    show_seconds,
    styled,
    within,
)
from autopar.cli.explain_cut import explain_cut
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.planner.inter_op.replan import Replanner
    from autopar.planner.intra_op.building.price import Pricer
    from autopar.planner.intra_op.mesh_plan import Options
    from autopar.plans.plan import StagePlan
    from autopar.words.graph import Graph


def explain(
    path: PlanPath,
    op: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help="The op: path of its module, module:op as in the file, or a pattern. For a plan in stages also "
            "stage:1, the cut at which that stage begins.",
        ),
    ],
    instead: Annotated[
        str | None, typer.Option("--instead", help="Another strategy, such as tensor=k: price the best plan with it.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="For --instead: memory limit per device. Default: that of the plan."),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Number of strategies to show.", callback=within(1))] = 12,
    model: ModelOption = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Explain the strategy of an op: the seconds of each of its strategies, with its neighbours unchanged.

    With --instead the stage of the op is solved again with that strategy (for the op and its copies in equal blocks),
    so its other ops may change too. The plan's other constraints (pins, memory limit) still hold. The whole step is
    simulated with the result, and the difference is the cost of that choice.

    stage:1 explains why that stage begins where it does: the parts of a step's seconds, and the step with the cut one
    block earlier or later, with the stages on both sides solved again.

    Examples: autopar explain plan.json layers.3.mlp.up --trust; autopar explain plan.json layers.3.mlp.up --instead
    tensor=k --trust; autopar explain plan.json stage:1 --model gpt.py:make
    """
    from autopar.plans.plan_options import parse_choices
    from autopar.words.texts import parse_bytes

    wanted = None
    if instead is not None:
        wanted = parse_choices(instead)
        if wanted is None:
            raise UsageError(f"--instead '{instead}' is no axis=factor; write it like tensor=k or tensor=replicate")
    limit = parse_bytes(memory_limit)
    captured, replanner = opened(path, model, trust=trust)
    stage = re.fullmatch(r"stage:(.*)", op)
    if stage is None:
        _explain_op(replanner, op, wanted, limit, top, as_json)
    elif wanted is not None or limit is not None:
        raise UsageError(f"--instead and --memory-limit are for an op; '{op}' is a cut, whose neighbours are shown")
    else:
        explain_cut(captured, replanner, stage[1], as_json)


OF_PRECISION = "precision "
"""Beginning of the notes of a plan that say why products of operators have the formats that they have."""


def _explain_op(
    replanner: Replanner, op: str, wanted: dict[str, str] | None, limit: float | None, top: int, as_json: bool
) -> None:
    from autopar.planner.inter_op.stage_pins import check
    from autopar.planner.intra_op.building.price import pricer
    from autopar.planner.intra_op.mesh_plan import Options
    from autopar.report import on_host
    from autopar.words.labels import op_labels

    graph, plan = replanner.graph, replanner.plan
    labels = op_labels(graph)
    names = {graph.nodes[i].name for i in found_ops(graph, op)}
    in_stage = {
        part.number: numbers for part in replanner.graphs
        if (numbers := [i for i, n in enumerate(part.graph.nodes) if n.kind == "op" and n.name in names])
    }  # fmt: skip
    if not in_stage:
        raise UsageError(f"'{op}' is in no stage: nothing that is returned depends on it")
    for number in in_stage if wanted is not None else ():
        check(graph, Options(constraints={op: wanted or {}}), plan.stages[number].mesh)
    facts: list[Facts] = []
    kept_there = {}
    for number, numbers in in_stage.items():
        part, stage = replanner.graphs[number].graph, plan.stages[number]
        priced = pricer(replanner.cluster, stage.mesh, stage.devices)
        kept_there[number] = on_host.on_host(part, stage, priced)
        results = priced_ops(part, stage, priced, numbers)
        if as_json:
            facts += [{"stage": number, **as_facts(part, result, labels)} for result in results]
        else:
            print_ops(part, stage, results, labels, top, f", stage {number}" if len(plan.stages) > 1 else "")
    best = None if wanted is None else _instead(replanner, in_stage, wanted, limit)
    for text in on_host.lines(kept_there, len(plan.stages)) if not as_json else ():
        out().print(text, markup=False)
    notes = [note for note in plan.notes if note.startswith(OF_PRECISION)]
    if as_json:
        print_json({"ops": facts, "instead": best, "notes": notes, **on_host.facts(kept_there)}, "explain")
        return
    if best is not None:
        _print_instead(best)
    print_lines(*(f"note: {note}" for note in notes))


def _instead(
    replanner: Replanner, in_stage: dict[int, list[int]], wanted: dict[str, str], limit: float | None
) -> Facts:
    """Re-solve the stages of the ops, and of their copies, with the requested cut, and simulate the step."""
    stages = list(replanner.plan.stages)
    whole, ops = replanner.graph, 0
    for number, numbers in in_stage.items():
        graph = replanner.graphs[number].graph
        alike = copies_able(whole, [whole.index[graph.nodes[i].name] for i in numbers], wanted)
        targets = [name for i in alike if (name := whole.nodes[i].name) in graph.index]
        ops += len(targets)
        options = wishing(replanner.options, targets, wanted, limit)
        with progress(f"solving stage {number} again" if len(stages) > 1 else "solving again"):
            stages[number] = replanner.solved(number, options)
    before, now = replanner.simulated()
    after, then = replanner.simulated(stages)
    return {
        "wanted": wanted, "ops": ops, "plan_stages": len(stages),
        "seconds": after.seconds, "plan_seconds": before.seconds,
        "memory_bytes": after.memory_bytes, "plan_memory_bytes": before.memory_bytes,
        "makespan_seconds": then.makespan_seconds, "bubble_fraction": then.bubble_fraction,
        "stages": [
            {
                "stage": s, "seconds": then.times.forward_seconds[s] + then.times.backward_seconds[s],
                "plan_seconds": now.times.forward_seconds[s] + now.times.backward_seconds[s],
                "memory_bytes": after.stages[s].price.memory_bytes,
                "plan_memory_bytes": before.stages[s].price.memory_bytes, "price": asdict(after.stages[s].price),
            } for s in in_stage
        ],
    }  # fmt: skip


def _print_instead(best: Facts) -> None:
    console = out()
    wanted = ",".join(f"{axis}={factor}" for axis, factor in best["wanted"].items())
    console.print(f"With {wanted} on {best['ops']} op{'s' if best['ops'] != 1 else ''}:")
    if best["plan_stages"] == 1:
        console.print(
            styled("  the best plan takes [bold]{}[/bold] a step and ", show_seconds(best["seconds"]))
            + f"{show_bytes(best['memory_bytes'])}; this plan {show_seconds(best['plan_seconds'])} and "
            f"{show_bytes(best['plan_memory_bytes'])}: {best['seconds'] / best['plan_seconds'] - 1:+.1%} time."
        )
        return
    for s in best["stages"]:
        console.print(
            f"  the best plan of stage {s['stage']} takes {show_seconds(s['seconds'])} a microbatch and "
            f"{show_bytes(s['memory_bytes'])}; this plan {show_seconds(s['plan_seconds'])} and "
            f"{show_bytes(s['plan_memory_bytes'])}: {s['seconds'] / s['plan_seconds'] - 1:+.1%} time"
        )
    console.print(
        styled("  the whole step takes [bold]{}[/bold], ", show_seconds(best["seconds"]))
        + f"{best['bubble_fraction']:.1%} of its schedule idle; this plan {show_seconds(best['plan_seconds'])}: "
        f"{best['seconds'] / best['plan_seconds'] - 1:+.1%}."
    )


def found_ops(graph: Graph, op: str) -> list[int]:
    """Return the numbers of the ops that match a pattern; refuse a pattern without a match."""
    from autopar.errors import closest
    from autopar.report.why import find_ops
    from autopar.words.labels import op_labels

    numbers = find_ops(graph, op)
    if not numbers:
        modules = dict.fromkeys(n.module for n in graph.nodes if n.kind == "op" and n.module)
        raise UsageError(f"'{op}' matches no op of the model; {closest(op, [*modules, *op_labels(graph).values()])}")
    return numbers


def priced_ops(graph: Graph, plan: StagePlan, priced: Pricer, numbers: list[int]) -> list[Facts]:
    """Return the price of every strategy of each op; ops of equal blocks with the same strategy appear once."""
    from autopar.planner.intra_op.building.hidden_seconds import hidden_in
    from autopar.report.why import alternatives
    from autopar.rules.registry import rules_of

    results: list[Facts] = []
    for i, count in _distinct(graph, plan, numbers):
        with progress(f"pricing {graph.nodes[i].name}"):
            others, seconds = hidden_in(graph, rules_of(graph), priced, plan, i)
            hidden = {"seconds": seconds, "beside": [graph.nodes[k].name for k in others]}
            rows = alternatives(graph, plan, priced, i)
            results.append({"number": i, "count": count, "rows": rows, "hidden": hidden})
    return results


def as_facts(graph: Graph, result: Facts, labels: Mapping[str, str]) -> Facts:
    """Return one op as values for JSON."""
    from autopar.rules.registry import rules_of

    node = graph.nodes[result["number"]]
    return {
        "op": labels[node.name], "copies": result["count"], "rule": str(rules_of(graph)[result["number"]]),
        "hidden": result["hidden"], **({"narrow": node.narrow.format} if node.narrow is not None else {}),
        "source": node.source, "strategies": [{**asdict(a), "seconds": a.seconds} for a in result["rows"]],
    }  # fmt: skip


def print_ops(
    graph: Graph, plan: StagePlan, results: list[Facts], labels: Mapping[str, str], top: int, where: str = ""
) -> None:
    """Print one table for each op; ``where`` follows the op's name."""
    from autopar.report.tables import alternatives_table
    from autopar.report.why import possible
    from autopar.rules.registry import rules_of

    console, rules = out(), rules_of(graph)
    for r in results:
        node = graph.nodes[r["number"]]
        copies = f" and {r['count'] - 1} like it" if r["count"] > 1 else ""
        text = "[bold]{}[/bold]{}{}: {}  {}"
        console.print(styled(text, labels[node.name], copies, where, node.out, node.source))
        console.print(f"  rule: {rules[r['number']]}", markup=False)
        if node.narrow is not None:
            console.print(f"  multiplied in {node.narrow.format}: casts are part of compute")
        rows = possible(r["rows"])
        cut = rows[:top]
        mine = next((a for a in rows if a.chosen), None)
        if mine is not None and mine not in cut:
            cut = [*cut[:-1], mine]
        console.print(alternatives_table(cut, plan.mesh, show_bytes, show_seconds))
        if len(rows) > len(cut):
            console.print(f"  {len(rows) - len(cut)} more expensive ones not shown (--top {len(rows)})")
        if r["hidden"]["beside"]:
            console.print(
                f"  {show_seconds(r['hidden']['seconds'])} of its collectives overlap with "
                f"{', '.join(r['hidden']['beside'])}, which do not depend on it. The rows do not include this overlap."
            )
        if mine is not None and rows and rows[0] is not mine:
            console.print(
                f"  The first row would save {show_seconds(mine.seconds - rows[0].seconds)} here with its neighbours "
                "unchanged; the solver weighs the whole model and its memory. --instead prices that."
            )


def _distinct(graph: Graph, plan: StagePlan, numbers: list[int]) -> list[tuple[int, int]]:
    """Return ``(op, copies)``: ops of equal blocks with the same strategy once."""
    from autopar.planner.intra_op.building.fold import fold

    rep = fold(graph).representative
    groups: dict[object, list[int]] = {}
    for i in numbers:
        groups.setdefault((rep[i], plan.ops[graph.nodes[i].name]), []).append(i)
    return [(members[0], len(members)) for members in groups.values()]


def copies_able(graph: Graph, numbers: list[int], wanted: dict[str, str]) -> list[int]:
    """Return those ops that have the factors (all, if none has), and their copies in equal blocks."""
    from autopar.planner.intra_op.building.fold import fold
    from autopar.rules.option_names import option_written
    from autopar.rules.registry import rules_of
    from autopar.rules.strategy import options_of

    rep, rules = fold(graph).representative, rules_of(graph)
    factors = set(map(option_written, wanted.values()))

    def able(i: int) -> bool:
        rule = rules[i]
        return rule is not None and factors <= options_of(graph, graph.nodes[i], rule).keys()

    classes = {rep[i] for i in [i for i in numbers if able(i)] or numbers}
    return [i for i, node in enumerate(graph.nodes) if node.kind == "op" and rep[i] in classes]


def wishing(options: Options, patterns: list[str], wanted: dict[str, str], limit: float | None) -> Options:
    """Return the options with one more constraint, which overrides earlier ones."""
    constraints: dict[str, dict[str, str]] = {p: dict(axes) for p, axes in (options.constraints or {}).items()}
    for pattern in patterns:  # later patterns override
        constraints[pattern] = {**constraints.pop(pattern, {}), **wanted}
    options = replace(options, constraints=constraints)
    return options if limit is None else replace(options, memory_limit_bytes=limit)
