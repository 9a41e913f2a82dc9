"""``autopar inspect``: what was captured of a model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.common import (
    Batch,
    Json,
    Seq,
    UsageError,
    check_values,
    load_and_capture,
    out,
    print_json,
    progress,
    show_bytes,
    show_seconds,
    styled,
)

if TYPE_CHECKING:
    from autopar.capture.passes import PassRun

MOST_PLACES, MOST_RULES = 6, 3
"""Lines with branches, and rules of an operator, that are listed."""


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="PATH.py:factory, or hf:PATH/config.json.")],
    batch: Batch = None,
    seq: Seq = None,
    graph_text: Annotated[bool, typer.Option("--graph", help="Print the whole graph instead.")] = False,
    list_passes: Annotated[
        bool, typer.Option("--passes", help="Print the passes of capture instead, and what each changed.")
    ] = False,
    dump_after: Annotated[
        str | None, typer.Option(metavar="PASS", help="Print the program after this pass instead.")
    ] = None,
    skip_pass: Annotated[
        list[str] | None, typer.Option(metavar="PASS", help="Capture without this pass; may be repeated.")
    ] = None,
    verified: Annotated[
        bool, typer.Option("--verify", help="Also run the graph and the model itself on two batches, and compare.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what autopar sees of a model: inputs, parameters, ops with their rules, repeated blocks.

    Ops without a rule are tried on small tensors, and get the rule that is found and proved; those of which none is
    found are kept whole on every rank. They stand first, because they limit what a plan can do. Those
    whose kernels on GPUs add in no fixed order are named: copies on several ranks may come apart by rounding. With
    --verify the captured graph and the model in eager mode run on the example batch, and on another one with other
    values, padding and labels: loss, gradients and buffers must be the same, or the first module that differs is named.

    A model becomes a graph by passes (--passes), each of which can be looked at (--dump-after) and, where no other one
    needs it, be left out (--skip-pass).

    Examples: autopar inspect gpt.py:make --verify; autopar inspect hf:llama/config.json --batch 8 --seq 2048 --graph
    """
    from autopar.capture.passes import observed, skipping

    runs: list[PassRun] = []

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        with skipping(skip_pass or ()), observed([dump_after] if dump_after else ()) as seen:
            yield
        runs.extend(seen)

    loaded, captured = load_and_capture(model, batch, seq, device="cpu" if verified else "meta", within=watching)
    if list_passes or dump_after:
        _print_passes(runs, dump_after, as_json)
        return
    compared = _compared(loaded, captured, model) if verified else []
    graph = captured.graph
    if graph_text and not as_json:
        print(graph)
        return
    with progress("finding blocks"):
        from autopar.planner.intra_op.building.fold import fold
        from autopar.rules.discovery import why_not_found
        from autopar.rules.families.fixed_order import without_fixed_order
        from autopar.rules.registry import rules_of, source_of_rule

        rules, blocks = rules_of(graph), fold(graph).blocks
    ops = [(i, node) for i, node in enumerate(graph.nodes) if node.kind == "op"]
    params = [node for _, node in graph.of_kind("param")]
    counts: Counter[str] = Counter(node.target for _, node in ops)
    lines: dict[str, set[str]] = {}
    where: dict[str, str] = {}
    sources: dict[str, dict[str, str]] = {"written": {}, "discovered": {}, "none": {}}
    work = dict.fromkeys(sources, 0.0)
    for i, node in ops:
        where.setdefault(node.target, node.where)
        if (rule := rules[i]) is not None:
            source = source_of_rule(node, rule)
            why = why_not_found(node, graph) if source == "none" and node.target not in sources["none"] else ""
            sources[source].setdefault(node.target, why)
            work[source] += rule.flops_at({})
            if source != "none":
                lines.setdefault(node.target, set()).add(str(rule).split("   ")[0])
    flags = (*graph.ways, *graph.parts)
    facts: dict[str, Any] = {
        "model": type(loaded.model).__name__,
        "fingerprint": graph.fingerprint,
        "inputs": {node.target: str(node.out) for _, node in graph.of_kind("input")},
        "loss": None if graph.loss is None else f"output {graph.loss}",
        "parameters": {
            "count": len(params),
            "elements": sum(p.out.n_elements for p in params),
            "bytes": sum(p.out.n_bytes for p in params),
            "without gradient": [p.target for p in params if not p.needs_grad],
            "tied": dict(graph.tied),
            "largest": [[p.target, str(p.out)] for p in sorted(params, key=lambda p: -p.out.n_bytes)[:5]],
        },
        "buffers": {node.target: str(node.out) for _, node in graph.of_kind("buffer") if node not in flags},
        "updated buffers": list(graph.written),
        "parameters written first": [] if graph.before is None else list(graph.before.updates),
        "branches followed": [[n.module, n.source, n.kwargs["answer"]] for n in graph.ways],
        "ops": len(ops),
        "ops that depend on no parameter": sum(not node.hot for _, node in ops),
        "blocks": [
            {"ops": length, "repeats": repeats, "first": ops[first][1].module, "last":
             ops[first + length * repeats - 1][1].module}
            for first, length, repeats in blocks
        ],
        "share of FLOPs": {source: n / max(sum(work.values()), 1.0) for source, n in work.items()},
        "without rule": {
            t: {"count": counts[t], "first": where[t], "why": why} for t, why in sorted(sources["none"].items())
        },
        "rules": {
            t: {"count": n, "rules": sorted(lines[t]), "discovered": t in sources["discovered"]}
            for t, n in counts.most_common() if t in lines
        },
    }  # fmt: skip
    loose: dict[str, dict[str, Any]] = {}
    for op in without_fixed_order(graph):
        row = loose.setdefault(op.node.target, {"count": 0, "first": op.node.where, "when": op.when, "why": op.why})
        row["count"] += 1
    facts["no fixed order on GPUs"] = loose
    if verified:
        facts["compared with eager mode"] = compared
    if graph_text:
        facts["graph"] = str(graph).splitlines()
    if as_json:
        print_json(facts, "inspect")
    else:
        _print(facts)


def _print_passes(runs: Sequence[PassRun], dump_after: str | None, as_json: bool) -> None:
    """Print the passes that ran, or the program behind one of them."""
    from autopar.capture.passes import passes, summary
    from autopar.report.fitted_tables import FittedTable

    rows = summary(runs)
    dumped = next((run for run in rows if run.name == dump_after), None)
    if dump_after and dumped is None:
        raise UsageError(f"pass '{dump_after}' did not run; leave out --skip-pass {dump_after}")
    if dumped is not None and not as_json:
        print(dumped.dump)
        return
    records = {p.name: p for p in passes()}
    facts = [
        {"pass": run.name, "phase": records[run.name].phase, "changed": run.changed, "nodes before": run.before,
         "nodes after": run.after, "seconds": run.seconds, "needs": list(records[run.name].needs),
         "required": bool(records[run.name].required), "reason": records[run.name].reason}
        for run in rows
    ]  # fmt: skip
    if as_json:
        print_json({"passes": facts, "program": None if dumped is None else dumped.dump.splitlines()}, "passes")
        return
    table = FittedTable("pass", "phase", "nodes", "time")
    table.add_column("reason", below=1, named=False)
    for run in rows:
        nodes = f"{run.before} -> {run.after}" if run.before != run.after else f"{run.after}, some replaced"
        nodes = nodes if run.changed else "unchanged"
        table.add_row(run.name, records[run.name].phase, nodes, show_seconds(run.seconds), records[run.name].reason)
    out().print(table)


def _compared(loaded: Any, captured: Any, spec: str) -> list[dict[str, Any]]:
    """Compare the captured graph with the model on the example batch and on another one."""
    from autopar.comparison import compare_with_eager
    from autopar.comparison.other_batch import other_batch

    check_values(loaded, spec)
    example = loaded.args, loaded.kwargs
    rows = []
    for name, tries in (("example batch", [example]),
                        ("another batch", [other_batch(example), other_batch(example, ignored=False)])):  # fmt: skip
        with progress(f"comparing with eager mode on the {name}"):
            for args, kwargs in tries:  # a loss may not take ignored labels
                comparison = compare_with_eager(captured, loaded.model, args, kwargs, bounded=False)
                if not comparison.note:
                    break
        rows.append({"batch": name, "loss": comparison.loss, "gradients": comparison.gradient,
                     "worst in": comparison.gradient_of, "buffers": comparison.buffer,
                     "not compared": comparison.note})  # fmt: skip
    return rows


def _print(facts: dict[str, Any]) -> None:
    from rich.text import Text

    from autopar.errors import first_few
    from autopar.report.fitted_tables import FittedTable

    console = out()
    p = facts["parameters"]
    console.print(styled("[bold]{}[/bold], fingerprint {}", facts["model"], facts["fingerprint"]))
    for name, spec in facts["inputs"].items():
        console.print(f"  input {name}: {spec}", markup=False)
    console.print(f"  loss: {facts['loss'] or 'none; a training step needs a scalar loss among the outputs'}")
    console.print(f"  {p['count']} parameters, {p['elements']:,} elements, {show_bytes(p['bytes'])}")
    for name, spec in p["largest"]:
        console.print(f"    {name}: {spec}", markup=False)
    for name, target in p["tied"].items():
        console.print(f"  {name} is tied to {target}", markup=False)
    if p["without gradient"]:
        console.print(f"  without gradient: {', '.join(p['without gradient'])}", markup=False)
    if facts["buffers"]:
        console.print(f"  {len(facts['buffers'])} buffers, {len(facts['updated buffers'])} of them changed by a step")
    if facts["parameters written first"]:
        console.print(f"  a call begins by writing to {first_few(facts['parameters written first'])}", markup=False)
    if facts["branches followed"]:
        places = list(dict.fromkeys(f"{line} ({answer})" for _, line, answer in facts["branches followed"]))
        console.print(
            f"  {len(facts['branches followed'])} branches on data, followed as the example takes them and checked at "
            f"every call: {', '.join(places[:MOST_PLACES])}" + (", .." if len(places) > MOST_PLACES else ""),
            markup=False,
        )
    for row in facts.get("compared with eager mode", ()):
        said = f"not compared: {row['not compared']}" if row["not compared"] else (
            f"loss {row['loss']:.1e}, gradients {row['gradients']:.1e}, buffers {row['buffers']:.1e} off (relative)"
        )  # fmt: skip
        console.print(f"  the model in eager mode, {row['batch']}: {said}", markup=False)
    console.print(f"  {facts['ops']} ops, {facts['ops that depend on no parameter']} of them depend on no parameter")
    shares = facts["share of FLOPs"]
    console.print(
        f"  FLOPs: {shares['written']:.1%} under written rules, {shares['discovered']:.1%} under discovered ones, "
        f"{shares['none']:.1%} under none"
    )
    for block in facts["blocks"]:
        console.print(f"  block of {block['ops']} ops x {block['repeats']}: {block['first']} .. {block['last']}")
    if not facts["blocks"]:
        console.print("  no repeated blocks")
    for target, row in facts["no fixed order on GPUs"].items():
        first = f"{row['count']} {target}, {row['when']}: {row['why']}; the first is {row['first']}"
        console.print(f"  adds in no fixed order on GPUs: {first}", markup=False)
    if facts["without rule"]:
        table = FittedTable("op without a rule (kept whole)", "count", "first", "why", header_style="bold yellow")
        for target, row in facts["without rule"].items():
            table.add_row(target, str(row["count"]), Text(row["first"]), Text(f"it {row['why']}" if row["why"] else ""))
        console.print(table)
    table = FittedTable("op", "count")
    table.add_column("rules", below=1, named=False)
    for target, row in facts["rules"].items():
        more = f"\n... {len(row['rules']) - MOST_RULES} more" if len(row["rules"]) > MOST_RULES else ""
        name = f"{target} (discovered)" if row["discovered"] else target
        table.add_row(name, str(row["count"]), Text("\n".join(row["rules"][:MOST_RULES]) + more))
    console.print(table)
