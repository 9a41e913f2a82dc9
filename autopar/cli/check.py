"""``autopar check``: the certificate of a plan file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from autopar.cli.common import (
    Json,
    ModelOption,
    PlanPath,
    Trust,
    bound,
    model_of,
    open_plan,
    out,
    print_json,
    progress,
    show_bytes,
    show_seconds,
    styled,
)
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.certificate import Report
    from autopar.plans.plan import StagePlan
    from autopar.plans.prices import Price


def check(path: PlanPath, model: ModelOption = None, trust: Trust = False, as_json: Json = False) -> None:
    """Certify a plan: recount its seconds and bytes from the program that it emits.

    The program of every stage runs once on tensors without values, forward and backward, and passes the type checker of
    spmd-types. Peak memory is then counted allocation by allocation; it can be a little more than the plan says, and
    excludes transfers between pipeline stages. The exit code is 1 if a claim does not hold, or if the peak is above the
    memory limit.

    Plans with products in formats that are priced alone (mxfp8, nvfp4) are refused: no program multiplies so.

    Example: autopar check plan.json --trust
    """
    from autopar.capture import check_products_run

    document = open_plan(path)
    _, captured = model_of(document, path, model, trust=trust)
    plan, cluster = bound(document, captured)
    check_products_run(captured.graph)
    with progress("checking") as say:
        from autopar import certificate
        from autopar.plans.prices import bytes_together
        from autopar.plans.stage_graphs import cut

        reports = []
        of_stages: list[certificate.Peak | None] = []
        for stage, part in zip(plan.stages, cut(captured.graph, plan.starts), strict=True):
            say(f"stage {part.number + 1} of {len(plan.stages)}" if len(plan.stages) > 1 else "")
            reports.append(certificate.check(stage, part.graph, cluster, types=True))
            counts = certificate.has_backward(part.graph) or part.graph.forward_only
            of_stages.append(certificate.peak_of(stage, part.graph) if counts else None)
        most: list[tuple[certificate.Peak, int]] = []
        for of_rank in plan.schedule.stages_of_rank:
            on_rank = [plan.stages[s] for s in of_rank]
            peak = certificate.in_pipeline([of_stages[s] for s in of_rank], [reports[s] for s in of_rank], on_rank)
            if peak is None:
                continue
            claimed_bytes = bytes_together([stage.price for stage in on_rank])
            most.append((peak, claimed_bytes))
            limit = plan.pins.memory_limit_bytes
            above = certificate.over_limit(peak, on_rank[0], cluster, limit, claimed_bytes)
            reports[of_rank[0]].failures += [above] if above is not None else []
    fullest, fullest_said = max(most, key=lambda counted: counted[0].n_bytes, default=(None, 0))
    if as_json:
        counted = {} if fullest is None else {"peak_bytes": fullest.n_bytes, "peak_at": fullest.at}
        stages = [_as_json(r) for r in reports]
        print_json({"certified": all(r.ok for r in reports), "stages": stages, **counted}, "check")
    else:
        _show(plan.stages, reports)
        if fullest is not None:
            out().print(
                f"peak memory: {show_bytes(fullest.n_bytes)}, counted allocation by allocation, in {fullest.at}; "
                f"the plan says {show_bytes(fullest_said)}", soft_wrap=True,
            )  # fmt: skip
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _state_bytes(price: Price) -> int:
    """Return the bytes of parameters, gradients, optimizer state and buffers that are counted."""
    return price.state_bytes


def _as_json(report: Report) -> Facts:
    counted = report.price
    kinds = [{"axis": axis, "kind": kind, "times": n} for (axis, kind), n in sorted(report.collectives.items())]
    return {
        "seconds": counted.seconds, "kept_bytes": report.kept_bytes, "again_bytes": counted.again_bytes,
        "parameter_bytes": counted.parameter_bytes, "gradient_bytes": counted.gradient_bytes,
        "optimizer_bytes": counted.optimizer_bytes, "collectives": kinds, "failures": report.failures,
    }  # fmt: skip


def _show(stages: tuple[StagePlan, ...], reports: list[Report]) -> None:
    from autopar.report.fitted_tables import FittedTable

    table = FittedTable(title="what the plan claims, and what its program does")
    for name in ("stage", "seconds", "counted", "state", "counted", "activations", "counted", "collectives"):
        text = name in ("stage", "collectives")
        table.add_column(name, justify="left" if text else "right", below=name == "collectives")
    for number, (stage, report) in enumerate(zip(stages, reports, strict=True)):
        claimed, counted = stage.price, report.price
        kinds = (f"{n} {kind} over {axis}" for (axis, kind), n in sorted(report.collectives.items()))
        table.add_row(
            str(number), show_seconds(claimed.seconds), show_seconds(counted.seconds),
            show_bytes(_state_bytes(claimed)), show_bytes(_state_bytes(counted)), show_bytes(stage.kept_bytes),
            show_bytes(report.kept_bytes), "\n".join(kinds),
        )  # fmt: skip
    console = out()
    console.print(table)
    failures = [f"stage {number}: {failure}" for number, report in enumerate(reports) for failure in report.failures]
    for failure in failures:
        console.print(styled("[red]{}[/red]", failure), soft_wrap=True)
    if not failures:
        console.print("certified: the emitted programs do what the plan says, and pass the type checker of spmd-types")
