"""``autopar explain``: why an op is cut as it is."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

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


def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    op: Annotated[str, typer.Argument(help="The op: path of its module, module:op as in the file, or a pattern.")],
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

    Examples: autopar explain plan.json layers.3.mlp.up; autopar explain plan.json layers.3.mlp.up --instead tensor=k
    """
    document = open_plan(path)
    wanted = None
    if instead is not None:
        wanted = parse_choices(instead)
        if wanted is None:
            raise UsageError(f"--instead '{instead}' is no axis=factor; write it like tensor=k or tensor=replicate")
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    _, captured = model_of(document, path, model)
    graph = captured.graph
    from autopar.planfile.form import closest
    from autopar.planner.price import pricer
    from autopar.planner.search import op_labels
    from autopar.report.tables import alternatives_table
    from autopar.report.why import alternatives, find_ops, possible
    from autopar.rules.registry import rules_of

    plan, cluster = bound(document, captured)
    labels = op_labels(graph)
    numbers = find_ops(graph, op)
    if not numbers:
        names = [*dict.fromkeys(n.module for n in graph.nodes if n.kind == "op" and n.module), *labels.values()]
        raise UsageError(f"'{op}' matches no op of the model; {closest(op, names)}")
    priced = pricer(cluster, plan.mesh)
    rules = rules_of(graph)
    shown = _distinct(graph, plan, numbers)
    results: list[dict[str, Any]] = []
    for i, count in shown:
        with progress(f"pricing {labels[graph.nodes[i].name]}"):
            found = alternatives(graph, plan, priced, i)
        results.append({"number": i, "count": count, "rows": found})
    best = _instead(graph, plan, cluster, numbers, wanted, limit, labels) if wanted is not None else None
    if as_json:
        print_json(
            {
                "ops": [
                    {
                        "op": labels[graph.nodes[r["number"]].name], "copies": r["count"],
                        "rule": str(rules[r["number"]]), "source": graph.nodes[r["number"]].source,
                        "strategies": [{**asdict(a), "seconds": a.seconds} for a in r["rows"]],
                    }
                    for r in results
                ],
                "instead": best,
            }
        )  # fmt: skip
        return
    console = out()
    for r in results:
        node = graph.nodes[r["number"]]
        copies = f" and {r['count'] - 1} like it" if r["count"] > 1 else ""
        console.print(f"[bold]{labels[node.name]}[/bold]{copies}: {node.out}  {node.source}", markup=True)
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
    if best is not None:
        console.print(
            f"With {instead} on {best['ops']} op{'s' if best['ops'] != 1 else ''} the best plan takes "
            f"[bold]{show_seconds(best['seconds'])}[/bold] a step and {show_bytes(best['memory_bytes'])}; this plan "
            f"{show_seconds(best['plan_seconds'])} and {show_bytes(best['plan_memory_bytes'])}: "
            f"{best['seconds'] / best['plan_seconds'] - 1:+.1%} time."
        )


def _distinct(graph: Any, plan: Any, numbers: list[int]) -> list[tuple[int, int]]:
    """``(op, copies)``: ops of equal blocks with the same cut once."""
    from autopar.planner.fold import fold

    rep = fold(graph).representative
    groups: dict[Any, list[int]] = {}
    for i in numbers:
        groups.setdefault((rep[i], plan.ops[graph.nodes[i].name]), []).append(i)
    return [(members[0], len(members)) for members in groups.values()]


def _instead(
    graph: Any, plan: Any, cluster: Any, numbers: list[int], wanted: dict[str, str], limit: float | None, labels: Any
) -> dict[str, Any]:
    """The best plan with the ops and their copies cut as wanted."""
    from autopar.pins import options_of
    from autopar.planner.fold import fold
    from autopar.planner.search import plan_graph
    from autopar.planner.space import node_options
    from autopar.rules.registry import rules_of

    rep, rules = fold(graph).representative, rules_of(graph)
    factors = {"I" if f == "replicate" else f for f in wanted.values()}

    def able(i: int) -> bool:
        rule = rules[i]
        return rule is not None and factors <= {o.name for o in node_options(graph, graph.nodes[i], rule)}

    targets = [i for i in numbers if able(i)] or numbers
    classes = {rep[i] for i in targets}
    copies = [i for i, node in enumerate(graph.nodes) if node.kind == "op" and rep[i] in classes]
    constraints = dict(plan.pins.ops)
    for i in copies:  # behind what was asked for before: there, later patterns override
        pattern = _escape(labels[graph.nodes[i].name])
        constraints[pattern] = {**constraints.pop(pattern, {}), **wanted}
    options = replace(options_of(plan), constraints=constraints)
    if limit is not None:
        options = replace(options, memory_limit_bytes=limit)
    with progress("solving again"):
        other = plan_graph(graph, cluster, plan.mesh, options, cluster_name=plan.cluster)
    return {
        "wanted": wanted, "ops": len(copies), "seconds": other.price.seconds,
        "memory_bytes": other.price.memory_bytes, "plan_seconds": plan.price.seconds,
        "plan_memory_bytes": plan.price.memory_bytes, "price": asdict(other.price),
    }  # fmt: skip


def _escape(label: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in label)
