"""``autopar run``: train a few steps under a plan on processes of this machine, or inside torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.common import (
    DeviceOption,
    Json,
    ModelOption,
    PlanPath,
    UsageError,
    bound,
    check_values,
    model_of,
    moved,
    open_plan,
    optimizers_of,
    out,
    print_json,
    progress,
    seconds_within,
    show_bytes,
    show_seconds,
    styled,
    what_if,
    where_to_run,
    within,
)
from autopar.cli.simulate import check_trace
from autopar.plans.plan import Plan
from autopar.plans.prices import bytes_together
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.report.fitted_tables import FittedTable
    from autopar.words.graph import Graph


def run(
    path: PlanPath,
    steps: Annotated[int, typer.Option("--steps", help="Training steps.", callback=within(1))] = 10,
    lr: Annotated[
        float,
        typer.Option("--lr", help="Learning rate of the optimizer that the plan names.", callback=within(0, 1_000_000)),
    ] = 1e-3,
    model: ModelOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Time-out of the command in seconds.", callback=seconds_within)
    ] = 600.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the last step's timeline for Perfetto (plans in stages).")
    ] = None,
    update: Annotated[
        Path | None,
        typer.Option("--update", help="Correct this profile, with which the plan was made, by the measurements."),
    ] = None,
    device: DeviceOption = "auto",
    as_json: Json = False,
) -> None:
    """Train a model under a plan, and compare predictions with measurements.

    In addition to the seconds of a step, the seconds by kind of operator (with collectives) and the memory of every
    group of devices are measured, in one more step each. --update writes the kinds back into the profile that priced
    the plan, so that the next plan is priced by whole steps.

    One process per device of the plan is started on this machine, with a GPU or one thread each. Under torchrun the
    ranks are those of torchrun. The batch is the model's example inputs, the same in every step.

    Examples: autopar run plan.json --steps 20; torchrun --nproc-per-node 4 -m autopar run plan.json
    """
    document = open_plan(path)
    if update is not None:
        _check_update(update, document.raw["cluster"], path)
    if trace is not None and len(document.meshes) == 1:
        raise UsageError(f"--trace is for plans in stages, {path} has one")
    check_trace(trace)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        kind, where = where_to_run(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        result = train(str(path), model, steps, lr, kind)
        if int(os.environ.get("RANK", "0")) == 0:
            _report({**result, "ran_on": where}, document.raw["cluster"], as_json)
        return
    from autopar.capture import check_products_run
    from autopar.frontends.models import split_spec

    loaded, captured = model_of(document, path, model, trust=True)
    spec = model if model is not None else str((document.model or {})["spec"])
    if not split_spec(spec)[0]:  # frontends make models without values here, and with values on the ranks
        check_values(loaded, spec)
    plan, cluster = bound(document, captured)  # report a wrong plan before processes start
    check_products_run(captured.graph)
    if captured.graph.loss is None:
        raise UsageError("the model has no scalar loss among its outputs, so it cannot be trained; return the loss")
    from autopar.comparison.parts_of_loss import with_notes
    from autopar.runtime.ranks.launch import backend_of, run_local

    noted = with_notes(plan, captured, loaded.model, (loaded.args, loaded.kwargs, ()))
    kind, where = where_to_run(device, plan.n_devices)
    if kind == "cpu":
        _check_memory(plan)
    with progress(f"training {steps} steps on {where}"):
        given = str(path), model, steps, lr, kind
        ranks = run_local(train, plan.n_devices, *given, timeout=timeout, backend=backend_of(kind))
    if trace is not None:
        from autopar.report import trace as traces

        _, timeline = what_if(captured, plan, cluster).simulated()
        traces.write(trace, [*traces.predicted(timeline), *traces.measured([rank["spans"] for rank in ranks])])
    more: Facts = {"predicted_seconds": plan.seconds, "ran_on": where, "notes": list(noted.notes)}
    groups = _groups(captured.graph, plan, ranks)
    if update is not None:
        _update(update, groups)
    more["groups"] = groups
    _report({**ranks[0], **more}, document.raw["cluster"], as_json)


def _check_update(update: Path, cluster: str, path: Path) -> None:
    """Refuse to correct a profile that did not price the plan."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("--update needs measurements of all groups: run the plan without torchrun, on this machine")
    priced_by = (path.parent / cluster).resolve()
    if not update.exists() or update.resolve() != priced_by:
        raise UsageError(
            f"--update is {update}, and {path} was priced by {cluster}; plan with the profile first: autopar plan ... "
            f"--cluster {update}"
        )


def _groups(graph: Graph, plan: Plan, ranks: list[Facts]) -> list[Facts]:
    """Return predicted and measured seconds by kind, and bytes, of the first rank of every group of devices."""
    from autopar.profiling.by_kind import predicted

    rows = []
    for of_group, kinds in zip(plan.schedule.stages_of_rank, predicted(graph, plan), strict=True):
        stages = [plan.stages[s] for s in of_group]
        rank = ranks[stages[0].devices[0]]
        rows.append({
            "predicted_kinds": kinds, "measured_kinds": rank["kinds"], "longest": rank["longest"],
            "predicted_bytes": bytes_together([stage.price for stage in stages]), "measured_bytes": rank["peak_bytes"],
        })  # fmt: skip
    return rows


def _update(update: Path, groups: list[Facts]) -> None:
    """Rewrite the profile with the measurements of all groups together."""
    from collections import Counter

    from autopar.profiling.document import dumps
    from autopar.profiling.update import updated
    from hardware_profiles.strict import parse_json, read_text

    sums: list[Counter[str]] = [Counter(), Counter()]
    for group in groups:
        for total, name in zip(sums, ("predicted_kinds", "measured_kinds"), strict=True):
            for kind, seconds in group[name].items():
                total[kind] += seconds
    document = parse_json(read_text(update))
    assert isinstance(document, dict)  # a plan was priced with it
    written = update.with_name(f".{update.name}.new")
    written.write_text(dumps(updated(document, *sums)), encoding="utf-8")
    written.replace(update)


def _check_memory(plan: Plan) -> None:
    """Refuse a plan whose ranks do not fit into this machine's memory together."""
    needed = sum(
        bytes_together([plan.stages[s].price for s in group]) * len({d for s in group for d in plan.stages[s].devices})
        for group in plan.schedule.stages_of_rank
    )
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UsageError(
            f"the plan is for {plan.n_devices} devices, which need {show_bytes(needed)} in total; this machine has "
            f"{show_bytes(there)}\n  start it under torchrun on machines that have the devices, or "
            "plan a smaller model"
        )


def train(path: str, model: str | None, steps: int, lr: float, device: str = "cpu") -> Facts:
    """Train on one rank: return losses, seconds of every step, spans of the last step, seconds by kind, peak memory.

    Seconds by kind of operator and the peak memory come from one more step each. ``device`` is ``cpu`` or ``cuda``,
    where each rank takes its own GPU.
    """
    import time

    import torch
    import torch.distributed as dist

    from autopar.parallelizing.all_ranks import check_size, spread
    from autopar.profiling import by_kind
    from autopar.runtime.as_module.parallel_module import parallel
    from autopar.runtime.ranks.agree import ensure_process_group

    document = open_plan(Path(path))
    torch.manual_seed(0)
    loaded, captured = model_of(document, Path(path), model, device="cpu", trust=True)
    check_values(loaded, model if model is not None else str((document.model or {})["spec"]))
    plan, _ = bound(document, captured)
    ensure_process_group()
    check_size(plan, dist.get_world_size())
    loaded = moved(loaded, device)
    pm = parallel(spread(loaded.model, captured, plan, dist.group.WORLD))
    params = {name: param for name, param in pm.named_parameters() if param.requires_grad}
    optimizers = optimizers_of(plan.optimizer, captured.graph, params, lr)
    options: Facts = {"microbatches": plan.microbatches} if len(plan.stages) == 1 else {}

    def step_once() -> torch.Tensor:
        loss: torch.Tensor = pm.train_step(*loaded.args, **options, **loaded.kwargs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    losses, seconds = [], []
    spans: list[Any] = []
    for step in range(steps):
        if step == steps - 1 and len(plan.stages) > 1:
            spans = pm.record()
        dist.barrier()
        start = time.perf_counter()
        losses.append(float(step_once()))
        if device != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    kinds, longest = by_kind.measured(step_once, device)
    of_each = [of_one for optimizer in optimizers for of_one in optimizer.state.values()]
    state = [x for of_one in of_each for x in of_one.values() if isinstance(x, torch.Tensor)]
    held = [*pm.parameters(), *state]
    most = by_kind.peak_bytes(step_once, held, (loaded.args, loaded.kwargs), device)
    return {"losses": losses, "seconds": seconds, "predicted_seconds": plan.seconds, "spans": spans,
            "notes": list(plan.notes), "kinds": kinds, "longest": longest, "peak_bytes": most}  # fmt: skip


def _report(result: Facts, cluster: str, as_json: bool) -> None:
    steps = sorted(result["seconds"][1:] or result["seconds"])
    median = steps[len(steps) // 2]
    of_rank = ("spans", "kinds", "longest", "peak_bytes")
    result = {**{key: value for key, value in result.items() if key not in of_rank}, "measured_seconds": median,
              "cluster": cluster}  # fmt: skip
    if as_json:
        print_json(result, "run")
        return
    from autopar.report.fitted_tables import FittedTable

    table = FittedTable("step", "loss", "seconds")
    shown = list(enumerate(zip(result["losses"], result["seconds"], strict=True)))
    for k, (loss, seconds) in shown if len(shown) <= 12 else [*shown[:4], *shown[-4:]]:
        if len(shown) > 12 and k == shown[-4][0]:
            table.add_row("...", "", "")
        table.add_row(str(k), f"{loss:.6f}", show_seconds(seconds))
    console = out()
    console.print(table)
    if result.get("groups"):
        console.print(_table(result["groups"]))
    for note in result.get("notes", ()):
        console.print(styled("[yellow]note:[/yellow] {}", note))
    console.print(
        f"measured here on {result['ran_on']}: {show_seconds(median)} a step (median without the first); predicted for "
        f"{result['cluster']}: {show_seconds(result['predicted_seconds'])}; ratio "
        f"{median / result['predicted_seconds']:.2f}"
    )


def _table(groups: list[Facts]) -> FittedTable:
    """Return predicted next to measured values: operator kinds of at least 1% of the step, and memory."""
    from autopar.report.fitted_tables import FittedTable

    table = FittedTable("group", "what")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    for number, group in enumerate(groups):
        predicted, measured = group["predicted_kinds"], group["measured_kinds"]
        least = max(sum(predicted.values()), sum(measured.values())) / 100
        for kind in sorted({*predicted, *measured}, key=lambda kind: -measured.get(kind, 0.0)):
            pair = predicted.get(kind, 0.0), measured.get(kind, 0.0)
            if max(pair) >= least:
                ratio = f"{pair[1] / pair[0]:.2f}" if pair[0] else "-"
                table.add_row(str(number), kind, *map(show_seconds, pair), ratio)
        pair = group["predicted_bytes"], group["measured_bytes"]
        table.add_row(str(number), "memory", *map(show_bytes, pair), f"{pair[1] / max(1, pair[0]):.2f}")
    return table
