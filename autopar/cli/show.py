"""``autopar show`` and ``autopar diff``: plan files as tables, and their differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Json,
    ModelOption,
    PlanPath,
    Trust,
    UntrustedModelError,
    UsageError,
    bound,
    err,
    model_of,
    open_plan,
    opened,
    out,
    print_json,
    progress,
    show_bytes,
    show_pins,
    show_seconds,
    show_solution,
    styled,
    what_if,
)
from autopar.cli.output_files import PROFILE
from autopar.cli.serving_plans import serving_plan_in, show_serving
from autopar.cli.stages import describe
from autopar.errors import ModelError, PlanError
from autopar.plans.memory_decisions import DECISIONS
from hardware_profiles.strict import Unreadable, read_text

if TYPE_CHECKING:
    from rich.text import Text

    from autopar.planfile import Document
    from autopar.plans.plan import Plan
    from autopar.report.differences import Row
    from autopar.words.graph import Graph
    from hardware_profiles import Cluster


def show(
    path: PlanPath,
    code: Annotated[bool, typer.Option("--code", help="Print the program that every rank runs, as Python.")] = False,
    stage: Annotated[
        int | None, typer.Option("--stage", help="For a plan in stages: show the ops and parameters of this stage.")
    ] = None,
    model: ModelOption = None,
    trust: Trust = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also show views, and ops that do not depend on a parameter.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a plan: every op with its cut, placements, collectives, bytes and seconds; parameters; memory.

    Equal blocks are shown once. Placements, one for each mesh axis, are S<dim> (sharded along dim), R and I
    (replicated; the gradient of R is still to be summed) and P (partial, to be summed). If the model cannot be loaded
    or is not trusted, the content of the file is shown.

    For a plan in several stages: the stages, their times and memory, and the schedule as a grid (see also autopar
    simulate); --stage shows one of them.

    Of a serving plan (autopar plan --mode inference): its load, workers, predicted times and memory.

    Examples: autopar show plan.json; autopar show plan.json --trust; autopar show plan.json --model gpt.py:make --code
    """
    if serving := serving_plan_in(path):
        if code or every or stage is not None or model is not None:
            raise UsageError(f"{path} is a serving plan, which has no --code, --stage, --all or --model; drop them")
        show_serving(serving, as_json)
        return
    document = open_plan(path)
    n = len(document.meshes)
    if stage is not None and not 0 <= stage < n:
        raise UsageError(f"--stage is {stage}; the plan has {n} stage{'s' if n > 1 else ''}, which count from 0")
    try:
        _, captured = model_of(document, path, model, trust=trust)
    except ModelError as error:
        if model is not None or code:
            raise
        _show_file(document, as_json, str(error))
        return
    with progress("reading the plan"):
        plan, cluster = bound(document, captured)
    from autopar.plans.stage_graphs import cut

    graphs = [part.graph for part in cut(captured.graph, plan.starts)]
    if code:
        _print_code(graphs, plan, stage, as_json)
    elif n > 1 and stage is None:
        describe(captured, *what_if(captured, plan, cluster).simulated(), cluster, as_json, {})
    else:
        _show_stage(path, document, graphs[stage or 0], plan, stage or 0, cluster, every, as_json)


def _print_code(graphs: list[Graph], plan: Plan, stage: int | None, as_json: bool) -> None:
    """Print the programs of all stages, or of one of them."""
    from autopar.lower.emit import lower

    numbers = range(len(graphs)) if stage is None else [stage]
    texts = {number: lower(graphs[number], plan.stages[number]).code for number in numbers}
    if as_json:
        print_json({"code": "\n".join(texts.values()), "stages": list(texts.values())}, "code")
    elif len(texts) == 1:
        print(*texts.values())
    else:
        print("\n".join(f"# stage {number}\n{text}" for number, text in texts.items()))


def _show_stage(
    path: Path, document: Document, graph: Graph, plan: Plan, number: int, cluster: Cluster, every: bool, as_json: bool
) -> None:
    """Print the ops, parameters and memory of a stage."""
    from autopar.planner.intra_op.building.price import pricer
    from autopar.report import recomputed, rows, tables
    from autopar.report.block_names import block_title, lists_of
    from autopar.report.coverage import coverage, line
    from autopar.report.on_host import facts, lines, on_host

    stage = plan.stages[number]
    with progress("pricing"):
        priced = pricer(cluster, stage.mesh, stage.devices)
        blocks = rows.block_rows(graph, stage, priced, every=every)
        params = rows.param_rows(graph, stage, priced)
        counts = rows.collective_counts(stage, graph, priced)
        again_seconds = rows.recomputed_seconds(graph, stage, priced)
        waited = rows.waited_seconds(graph, stage, priced)
        kept_there = {number: on_host(graph, stage, priced)}
        profiled = coverage([graph], [stage], cluster)
    if as_json:
        print_json(
            {
                "plan": str(path), "model": document.model, "stage": number, "mesh": stage.mesh.size_of,
                "cluster": plan.cluster, "blocks": blocks, "parameters": params, **rows.totals(stage.price),
                "collectives": counts, "solution": stage.solution, "pins": plan.pins, "notes": plan.notes,
                "recompute": {"segments": stage.recompute, "seconds": again_seconds},
                **({"waiting": {name: {"tensors": stage.memory[name], "seconds": s} for name, s in waited.items()}}
                   if waited else {}),
                **facts(kept_there),
                **({"profile": profiled} if profiled else {}),
            },
            "show",
        )  # fmt: skip
        return
    console = out()
    console.print(_headline(document, number))
    if len(plan.stages) == 1:
        from autopar.cli.stages import print_layout

        print_layout(graph, plan)
    if pinned := show_pins(plan.pins):
        console.print(f"requested: {pinned}", markup=False)
    if runs_again := recomputed.runs_again(graph, stage):
        extra = f"{show_seconds(again_seconds)} a step, not in the rows below"
        console.print(f"recomputed in the backward ({extra}): {'; '.join(runs_again)}", markup=False)
    for name, what in recomputed.waits(graph, stage).items():
        extra = f"{DECISIONS[name].said}; {show_seconds(waited[name])} a step, not in the rows below"
        console.print(f"{name} ({extra}): {'; '.join(what)}", markup=False)
    for text in lines(kept_there, 1):
        console.print(text, markup=False)
    lists = lists_of(graph)
    for block in blocks:
        console.print(tables.block_table(block, stage.mesh, show_bytes, show_seconds, every, block_title(lists, block)))
    console.print(tables.param_table(params, show_bytes, show_seconds))
    console.print(tables.totals_table(rows.totals(stage.price), show_bytes, show_seconds))
    if counts:
        console.print("collectives of a step: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    console.print(show_solution(stage.solution))
    if profiled:
        console.print(line(profiled), markup=False)
    for note in plan.notes:
        console.print(styled("[yellow]note:[/yellow] {}", note))


def _headline(document: Document, number: int) -> Text:
    raw = document.raw
    model = (raw.get("model") or {}).get("spec", "a model")
    where = f", stage {number} of {len(document.meshes)}" if len(document.meshes) > 1 else ""
    plural = "es" if document.microbatches != 1 else ""
    return styled(
        "[bold]{}[/bold]{} on {}, mesh {}, optimizer {}, {} microbatch{}", model, where, raw["cluster"],
        raw["stages"][number]["mesh"], raw["optimizer"], document.microbatches, plural,
    )  # fmt: skip


def _show_file(document: Document, as_json: bool, why: str) -> None:
    if as_json:
        print_json({**document.raw, "warning": why}, "plan")
        return
    from autopar.plans.prices import Price
    from autopar.report import tables
    from autopar.report.rows import totals

    console = out()
    err().print(styled("[yellow]note:[/yellow] {}", why), soft_wrap=True)
    stale = "shown is the file's own content; prices of an edited file are stale"
    err().print(styled("[yellow]note:[/yellow] {}", stale))
    for number, stage in enumerate(document.raw["stages"]):
        console.print(_headline(document, number))
        for table in tables.file_tables(stage):
            console.print(table)
        if stage.get("price"):
            console.print(tables.totals_table(totals(Price(**stage["price"])), show_bytes, show_seconds))


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan file, or a profile.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same kind.")],
    model: Annotated[str | None, typer.Option("--model", help="The model, if not the one that the files name.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show in what two plans differ: ops, parameters, routes, price.

    If both are for one model, decisions are compared op by op, whatever patterns the files use; else the files are
    compared entry by entry, and a line says so. For plans in stages also the number of stages, the cuts (and by how
    many blocks they moved), meshes, schedule, microbatches, and times and memory of every stage. For two profiles:
    operators by kind, those that differ most, collectives and the optimizer, with their ratios.

    Examples: autopar diff plan.json edited.json --trust; autopar diff monday.json today.json
    """
    from autopar.report.differences import differences, entries

    if PROFILE.recognizes(_beginning(a)) and PROFILE.recognizes(_beginning(b)):
        _diff_profiles(a, b, as_json)
        return
    first, second = open_plan(a), open_plan(b)
    rows, alike = None, True
    specs = [(document.model or {}).get("spec") for document in (first, second)]
    if first.raw["fingerprint"] == second.raw["fingerprint"] or (specs[0] == specs[1] is not None):
        try:
            (captured, x), (captured_b, y) = opened(a, model, trust=trust), opened(b, model, trust=trust)
            if [n.name for n in captured.graph.nodes] == [n.name for n in captured_b.graph.nodes]:
                rows = differences(captured.graph, x, y)  # microbatches of another size are graphs of another size
        except UntrustedModelError as error:
            note = f"{error}\n  the files are compared entry by entry"
            err().print(styled("[yellow]note:[/yellow] {}", note), soft_wrap=True)
        except (ModelError, PlanError):
            if model is not None:
                raise
    else:
        alike = False
    _print_diff(a, b, entries(first.raw, second.raw) if rows is None else rows, as_json, alike)


def _beginning(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read, which is reported when it is parsed."""
    try:
        return read_text(path)
    except (OSError, Unreadable):
        return ""


def _diff_profiles(a: Path, b: Path, as_json: bool) -> None:
    from rich.text import Text

    from autopar.plans.clusters import get_cluster
    from autopar.report.fitted_tables import FittedTable
    from autopar.report.profile_differences import profile_differences

    rows, notes = profile_differences(get_cluster(a), get_cluster(b))
    if as_json:
        lines = [{"what": what, "a_seconds": x, "b_seconds": y} for what, x, y in rows]
        print_json({"rows": lines, "notes": notes}, "diff-profiles")
        return
    console = out()
    for note in notes:
        console.print(note, markup=False)
    table = FittedTable("what", str(a), str(b), "ratio")
    for what, x, y in rows:
        table.add_row(Text(what), show_seconds(x), show_seconds(y), f"{y / x:.2f}" if x else "-")
    console.print(table)


def _print_diff(a: Path, b: Path, rows: list[Row], as_json: bool, alike: bool) -> None:
    if as_json:
        differences = [{"what": what, "a": x, "b": y} for what, x, y in rows]
        print_json({"differences": differences, "same_model": alike}, "diff")
        return
    console = out()
    if not alike:
        console.print("the plans are for different models; their files are compared entry by entry")
    if not rows:
        console.print("the plans are the same")
        return
    from rich.text import Text

    from autopar.report.fitted_tables import FittedTable

    table = FittedTable("what")
    for path in (a, b):
        table.add_column(str(path), below=1)
    for what, x, y in rows:
        table.add_row(Text(what), *(Text(_cell(what, v)) for v in (x, y)))
    console.print(table)


def _cell(what: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, (int, float)) and what.endswith(("_seconds", ".seconds", "_bytes")):
        return show_seconds(value) if what.endswith("seconds") else show_bytes(value)
    if what.endswith("_fraction"):
        return f"{value:.1%}"
    if isinstance(value, Mapping):
        return f"{len(value)} entries: {', '.join(map(str, value))}"  # a part that only one of the files has
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) if what.endswith(".devices") else "\n".join(map(str, value))
    return str(value)
