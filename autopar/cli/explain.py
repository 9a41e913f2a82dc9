"""``autopar explain``: why an op is cut as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.common import (
    Json,
    UsageError,
    bound,
    model_of,
    open_plan,
    out,
    parse_bytes,
    parse_choices,
    print_json,
    progress,
    show_bytes,
    show_seconds,
)

if TYPE_CHECKING:
    from autopar.graph import Graph
    from autopar.plan import Plan
    from autopar.planner.intra_op.mesh_plan import Options
    from autopar.planner.intra_op.price import Pricer


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    op: Annotated[
        str,
        typer.Argument(
            help="The op: path of its module, module:op as in the file, or a pattern. Of a pipelined plan also "
            "stage:1, the cut at which that stage begins."
        ),
    ],
    instead: Annotated[
        str | None, typer.Option("--instead", help="Another cut, such as tensor=k: what the best plan with it costs.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="For --instead: bytes per device. Default: as the plan was made."),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many strategies to show.")] = 12,
    model: Annotated[str | None, typer.Option("--model", help="The model, if not the one that the file names.")] = None,
    as_json: Json = False,
) -> None:
    """Say why an op is cut as it is: the seconds of every way to cut it, its neighbours staying as they are.

    With --instead the whole plan is solved again with that cut (for the op and its copies in equal blocks), so all
    other ops may change too; what was asked for when the plan was made (pins, memory limit) still holds, where the
    wish does not say otherwise. The difference is what that wish costs.

    Of a pipelined plan, an op is explained within its stage, and --instead solves that stage again and simulates the
    whole step with it. stage:1 says why that stage begins where it does: what the step spends where, and what it would
    take with the cut one block earlier or later, the stages on both sides solved again.

    Examples: autopar explain plan.json layers.3.mlp.up; autopar explain plan.json layers.3.mlp.up --instead tensor=k;
    autopar explain plan.json stage:1
    """
    wanted = None
    if instead is not None:
        wanted = parse_choices(instead)
        if wanted is None:
            raise UsageError(f"--instead '{instead}' is no axis=factor; write it like tensor=k or tensor=replicate")
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    from autopar.cli import explain_pipeline, pipeline

    if pipeline.is_pipeline(path):
        explain_pipeline.explain(path, op, wanted, limit, top, model, as_json)
        return
    document = open_plan(path)
    if op.startswith("stage:"):
        raise UsageError(f"{path} is no pipelined plan, so it has no cut '{op}'; name an op")
    _, captured = model_of(document, path, model)
    graph = captured.graph
    from autopar.labels import op_labels
    from autopar.pins import options_of
    from autopar.planner.intra_op.mesh_plan import plan_graph
    from autopar.planner.intra_op.price import pricer

    plan, cluster = bound(document, captured)
    labels = op_labels(graph)
    numbers = found_ops(graph, op)
    results = priced_ops(graph, plan, pricer(cluster, plan.mesh), numbers)
    best: dict[str, Any] | None = None
    if wanted is not None:
        targets = copies_able(graph, numbers, wanted)
        named = [_escape(labels[graph.nodes[i].name]) for i in targets]
        options = wishing(options_of(plan), named, wanted, limit)
        with progress("solving again"):
            other = plan_graph(graph, cluster, plan.mesh, options, cluster_name=plan.cluster)
        best = {
            "wanted": wanted, "ops": len(targets), "seconds": other.price.seconds,
            "memory_bytes": other.price.memory_bytes, "plan_seconds": plan.price.seconds,
            "plan_memory_bytes": plan.price.memory_bytes, "price": asdict(other.price),
        }  # fmt: skip
    if as_json:
        print_json({"ops": [as_facts(graph, r, labels) for r in results], "instead": best})
        return
    print_ops(graph, plan, results, labels, top)
    if best is not None:
        out().print(
            f"With {instead} on {best['ops']} op{'s' if best['ops'] != 1 else ''} the best plan takes "
            f"[bold]{show_seconds(best['seconds'])}[/bold] a step and {show_bytes(best['memory_bytes'])}; this plan "
            f"{show_seconds(best['plan_seconds'])} and {show_bytes(best['plan_memory_bytes'])}: "
            f"{best['seconds'] / best['plan_seconds'] - 1:+.1%} time."
        )


def found_ops(graph: Graph, op: str) -> list[int]:
    """Numbers of the ops that are named.

    Raises:
        UsageError: there is none.
    """
    from autopar.errors import closest
    from autopar.labels import op_labels
    from autopar.report.why import find_ops

    numbers = find_ops(graph, op)
    if not numbers:
        modules = dict.fromkeys(n.module for n in graph.nodes if n.kind == "op" and n.module)
        raise UsageError(f"'{op}' matches no op of the model; {closest(op, [*modules, *op_labels(graph).values()])}")
    return numbers


def priced_ops(graph: Graph, plan: Plan, priced: Pricer, numbers: list[int]) -> list[dict[str, Any]]:
    """Every way to cut each op; ops of equal blocks with the same cut once."""
    from autopar.report.why import alternatives

    results: list[dict[str, Any]] = []
    for i, count in _distinct(graph, plan, numbers):
        with progress(f"pricing {graph.nodes[i].name}"):
            results.append({"number": i, "count": count, "rows": alternatives(graph, plan, priced, i)})
    return results


def as_facts(graph: Graph, result: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """One op for JSON."""
    from autopar.rules.registry import rules_of

    node = graph.nodes[result["number"]]
    return {
        "op": labels[node.name], "copies": result["count"], "rule": str(rules_of(graph)[result["number"]]),
        "source": node.source, "strategies": [{**asdict(a), "seconds": a.seconds} for a in result["rows"]],
    }  # fmt: skip


def print_ops(
    graph: Graph, plan: Plan, results: list[dict[str, Any]], labels: Mapping[str, str], top: int, where: str = ""
) -> None:
    """One table for each op.

    Args:
        where: what is said behind the op's name.
    """
    from autopar.report.tables import alternatives_table
    from autopar.report.why import possible
    from autopar.rules.registry import rules_of

    console, rules = out(), rules_of(graph)
    for r in results:
        node = graph.nodes[r["number"]]
        copies = f" and {r['count'] - 1} like it" if r["count"] > 1 else ""
        console.print(f"[bold]{labels[node.name]}[/bold]{copies}{where}: {node.out}  {node.source}", markup=True)
        console.print(f"  rule: {rules[r['number']]}", markup=False)
        rows = possible(r["rows"])
        cut = rows[:top]
        mine = next((a for a in rows if a.chosen), None)
        if mine is not None and mine not in cut:
            cut = [*cut[:-1], mine]
        console.print(alternatives_table(cut, plan.mesh, show_bytes, show_seconds))
        if len(rows) > len(cut):
            console.print(f"  {len(rows) - len(cut)} dearer ones not shown (--top {len(rows)})")
        if mine is not None and rows and rows[0] is not mine:
            console.print(
                f"  The first would save {show_seconds(mine.seconds - rows[0].seconds)} here with its neighbours as "
                "they are; the solver weighs the whole model and its memory. --instead prices that."
            )


def _distinct(graph: Graph, plan: Plan, numbers: list[int]) -> list[tuple[int, int]]:
    """``(op, copies)``: ops of equal blocks with the same cut once."""
    from autopar.planner.intra_op.fold import fold

    rep = fold(graph).representative
    groups: dict[Any, list[int]] = {}
    for i in numbers:
        groups.setdefault((rep[i], plan.ops[graph.nodes[i].name]), []).append(i)
    return [(members[0], len(members)) for members in groups.values()]


def copies_able(graph: Graph, numbers: list[int], wanted: dict[str, str]) -> list[int]:
    """Those of the ops that have the factors (all, if none has), and their copies in equal blocks."""
    from autopar.planner.intra_op.fold import fold
    from autopar.rules.registry import rules_of
    from autopar.rules.strategy import options_of

    rep, rules = fold(graph).representative, rules_of(graph)
    factors = {"I" if f == "replicate" else f for f in wanted.values()}

    def able(i: int) -> bool:
        rule = rules[i]
        return rule is not None and factors <= options_of(graph, graph.nodes[i], rule).keys()

    classes = {rep[i] for i in [i for i in numbers if able(i)] or numbers}
    return [i for i, node in enumerate(graph.nodes) if node.kind == "op" and rep[i] in classes]


def wishing(options: Options, patterns: list[str], wanted: dict[str, str], limit: float | None) -> Options:
    """Options with one more wish, which overrides what was asked for before."""
    constraints: dict[str, dict[str, str]] = {p: dict(axes) for p, axes in (options.constraints or {}).items()}
    for pattern in patterns:  # later patterns override
        constraints[pattern] = {**constraints.pop(pattern, {}), **wanted}
    options = replace(options, constraints=constraints)
    return options if limit is None else replace(options, memory_limit_bytes=limit)


def _escape(label: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in label)
