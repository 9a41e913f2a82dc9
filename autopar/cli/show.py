"""``autopar show`` and ``autopar diff``: what plans say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.common import (
    Json,
    bound,
    err,
    model_of,
    open_plan,
    out,
    print_json,
    progress,
    show_bytes,
    show_pins,
    show_seconds,
    show_solution,
)
from autopar.errors import ModelError, PlanError


def show(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    code: Annotated[bool, typer.Option("--code", help="Print the program that every rank runs, as Python.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="The model, if not the one that the file names.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also views, and the ops that do not depend on a parameter.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a plan: every op with its cut, placements, collectives, bytes and seconds; parameters; memory.

    Equal blocks are shown once. Placements are S<dim> (sharded), R and I (whole; the gradient of R is still to be
    summed) and P (to be summed), one for each axis. If the model cannot be loaded, what the file itself says is shown.

    Of a pipelined plan: its stages, their times and memory, and the schedule as a grid (see also autopar simulate).

    Examples: autopar show plan.json; autopar show plan.json --code
    """
    from autopar.cli import pipeline

    if pipeline.is_pipeline(path):
        pipeline.show(path, model, code, as_json)
        return
    document = open_plan(path)
    try:
        _, captured = model_of(document, path, model)
    except ModelError as error:
        if model is not None or code:
            raise
        _show_file(document, as_json, str(error))
        return
    with progress("reading the plan"):
        found, cluster = bound(document, captured)
    graph = captured.graph
    if code:
        from autopar.lower.emit import lower

        text = lower(graph, found).code
        if as_json:
            print_json({"code": text})
        else:
            print(text)
        return
    from autopar.planner.intra_op.price import pricer
    from autopar.report import measured, rows, tables

    with progress("pricing"):
        priced = pricer(cluster, found.mesh)
        blocks = rows.block_rows(graph, found, priced, every=every)
        params = rows.param_rows(graph, found, priced)
        counts = rows.collective_counts(found, graph, priced)
        again_seconds = rows.recomputed_seconds(graph, found, priced)
        known = measured.coverage([graph], [found], cluster, [None])
    if as_json:
        print_json(
            {
                "plan": str(path), "model": document.model, "mesh": dict(found.mesh), "cluster": found.cluster,
                "blocks": blocks, "parameters": params, **rows.totals(found), "collectives": counts,
                "solution": found.solution, "pins": found.pins, "notes": found.notes,
                "recompute": {"segments": found.recompute, "seconds": again_seconds},
                **({"profile": known} if known else {}),
            }
        )  # fmt: skip
        return
    console = out()
    console.print(_headline(document.raw))
    if pinned := show_pins(found.pins):
        console.print(f"asked for: {pinned}", markup=False)
    if again := rows.recomputed(graph, found):
        extra = f"for {show_seconds(again_seconds)} a step that no row has"
        console.print(f"recomputed in the backward, {extra}: {'; '.join(again)}", markup=False)
    for block in blocks:
        console.print(tables.block_table(block, found.mesh, show_bytes, show_seconds, every))
    console.print(tables.param_table(params, show_bytes, show_seconds))
    console.print(tables.totals_table(rows.totals(found), show_bytes, show_seconds))
    if counts:
        console.print("collectives of a step: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    console.print(show_solution(found.solution))
    if known:
        console.print(measured.line(known), markup=False)
    for note in found.notes:
        console.print(f"[yellow]note:[/yellow] {note}")


def _headline(raw: Any) -> str:
    model = (raw.get("model") or {}).get("spec", "a model")
    return (
        f"[bold]{model}[/bold] on {raw['cluster']}, mesh {raw['mesh']}, optimizer {raw['optimizer']}, "
        f"{raw['microbatches']} microbatch{'es' if raw['microbatches'] != 1 else ''}"
    )


def _show_file(document: Any, as_json: bool, why: str) -> None:
    if as_json:
        print_json({**document.raw, "warning": why})
        return
    from autopar.plan import Price
    from autopar.report import tables

    console = out()
    err().print(f"[yellow]note:[/yellow] {why}", soft_wrap=True)
    err().print("[yellow]note:[/yellow] what follows is what the file says by itself; an edited file has stale prices")
    console.print(_headline(document.raw))
    for table in tables.file_tables(document.raw):
        console.print(table)
    if document.raw.get("price"):
        price = Price(**document.raw["price"])
        console.print(tables.totals_table(_totals(price), show_bytes, show_seconds))


def _totals(price: Any) -> Any:
    from types import SimpleNamespace

    from autopar.report.rows import totals

    return totals(SimpleNamespace(price=price))  # type: ignore[arg-type]


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another plan file.")],
    model: Annotated[str | None, typer.Option("--model", help="The model, if not the one that the files name.")] = None,
    as_json: Json = False,
) -> None:
    """Show in what two plans differ: ops, parameters, routes, price.

    If both are for one model, decisions are compared op by op, so that the way the patterns are written does not
    matter; else entry by entry. Of pipelined plans also the number of stages, the cuts (and by how many blocks they
    moved), meshes, schedule, microbatches, and times and memory of every stage.

    Example: autopar diff plan.json edited.json
    """
    from autopar.cli import diff_pipeline, pipeline

    if pipeline.is_pipeline(a) or pipeline.is_pipeline(b):
        _print_diff(a, b, diff_pipeline.rows_of(a, b, model), as_json)
        return
    first, second = open_plan(a), open_plan(b)
    same_model = first.raw["fingerprint"] == second.raw["fingerprint"] and first.mesh == second.mesh
    rows = None
    if same_model:
        try:
            rows = _diff_decisions(first, second, a, b, model)
        except (ModelError, PlanError):
            if model is not None:
                raise
    if rows is None:
        from autopar.report.rows import differences

        rows = [r for r in differences(first.raw, second.raw) if not r[0].startswith(("checksum", "solution.solver"))]
    _print_diff(a, b, rows, as_json)


def _print_diff(a: Path, b: Path, rows: list[tuple[str, Any, Any]], as_json: bool) -> None:
    if as_json:
        print_json([{"what": what, "a": x, "b": y} for what, x, y in rows])
        return
    console = out()
    if not rows:
        console.print("the plans are the same")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("what", str(a), str(b), header_style="bold")
    for what, x, y in rows:
        table.add_row(Text(what), *(Text(_cell(what, v)) for v in (x, y)))
    console.print(table)


def _cell(what: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (int, float)) and what.endswith(("_seconds", ".seconds", "_bytes")):
        return show_seconds(value) if what.endswith("seconds") else show_bytes(value)
    if what.endswith("_fraction"):
        return f"{value:.1%}"
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    return str(value)


def _diff_decisions(first: Any, second: Any, a: Path, b: Path, model: str | None) -> list[tuple[str, Any, Any]]:
    from dataclasses import asdict

    from autopar.labels import op_labels
    from autopar.placements import format_state
    from autopar.planfile.patterns import compress
    from autopar.planfile.write import route_keys, written
    from autopar.report.rows import recomputed

    _, captured = model_of(first, a, model)
    graph = captured.graph
    (x, _), (y, _) = bound(first, captured), bound(second, captured)
    rows: list[tuple[str, Any, Any]] = [
        (key, getattr(x, key), getattr(y, key))
        for key in ("cluster", "optimizer", "microbatches")
        if getattr(x, key) != getattr(y, key)
    ]
    if x.pins != y.pins:
        rows.append(("asked for", show_pins(x.pins) or None, show_pins(y.pins) or None))

    if x.recompute != y.recompute:
        rows.append(("recompute", recomputed(graph, x) or None, recomputed(graph, y) or None))

    def compare(section: str, names: list[str], left: Any, right: Any) -> None:
        pairs = {n: (left(n), right(n)) for n in names}
        changed = {n for n, (p, q) in pairs.items() if p != q}
        for pattern, (p, q) in compress(names, pairs.__getitem__, changed):
            if p != q:
                rows.append((f"{section} {pattern}", p, q))

    labels = {label: name for name, label in op_labels(graph).items()}

    def cuts(plan: Any) -> Any:
        return lambda label: " ".join(
            f"{axis}={written(n)}" for (axis, _), n in zip(plan.mesh, plan.ops[labels[label]], strict=True)
        )

    def kept(plan: Any) -> Any:
        def text(name: str) -> str:
            c = plan.params[name]
            return f"stored {format_state(c.stored)}, used {format_state(c.used)}" + (
                f", per {c.lifetime}" if c.stored != c.used else ""
            )

        return text

    keys = route_keys(graph)

    def steps(plan: Any) -> Any:
        return lambda name: tuple(
            f"{format_state(p)} -> {format_state(q)}" for p, q in plan.routes.get(keys[name], ())
        ) or None  # fmt: skip

    compare("op", list(labels), cuts(x), cuts(y))
    compare("parameter", [n.target for _, n in graph.of_kind("param")], kept(x), kept(y))
    compare("route", list(keys), steps(x), steps(y))
    for name in sorted({*x.inputs, *y.inputs}):
        if x.inputs.get(name) != y.inputs.get(name):
            rows.append((f"input {name}", _state(x.inputs.get(name)), _state(y.inputs.get(name))))
    for k, (p, q) in enumerate(zip(x.outputs, y.outputs, strict=True)):
        if p != q:
            rows.append((f"output {k}", _state(p), _state(q)))
    left, right = asdict(x.price), asdict(y.price)
    left["seconds"], right["seconds"] = x.price.seconds, y.price.seconds
    left["memory_bytes"], right["memory_bytes"] = x.price.memory_bytes, y.price.memory_bytes
    rows += [(f"price.{k}", left[k], right[k]) for k in left if left[k] != right[k]]
    return rows


def _state(state: Any) -> str | None:
    from autopar.placements import format_state

    return None if state is None else format_state(state)
