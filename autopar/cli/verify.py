"""``autopar verify``: compare plans with one device."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Batch,
    DeviceOption,
    Json,
    Seq,
    UsageError,
    check_ranks_here,
    check_values,
    load_and_capture,
    moved,
    open_plan,
    out,
    print_json,
    progress,
    styled,
    where_to_run,
    within,
)
from autopar.report import Facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.text import Text

    from autopar.capture import Captured
    from autopar.comparison.program_vs_eager import Difference
    from autopar.frontends.models import Loaded
    from autopar.planfile import Document
    from autopar.plans.plan import Plan
    from autopar.words.meshes import Mesh
    from autopar.words.precision import Precision
    from autopar.words.trees import PyTree
    from hardware_profiles import Cluster


def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="PATH.py:factory, or hf:PATH/config.json, with values: it is run.")
    ],
    mesh: Annotated[
        str | None, typer.Option("--mesh", "-m", help="Axes and sizes: data=2,tensor=2. Not for pipelined plans.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Hardware that plans are priced for. Default: this machine.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Verify this plan file instead of the best plan.")] = None,
    random_plans: Annotated[
        int, typer.Option("--random-plans", help="Number of random plans to verify in addition.", callback=within(0))
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first random plan.", callback=within(0, 2**31))] = 0,
    processes: Annotated[
        bool, typer.Option("--processes", help="Run real processes instead of many ranks in one process.")
    ] = False,
    device: DeviceOption = "auto",
    batch: Batch = None,
    seq: Seq = None,
    as_json: Json = False,
) -> None:
    """Compare plans with one device: loss, all gradients (also of inputs), and the weights after two steps of SGD.

    Many ranks run in this process, in double precision, so a difference above 1e-9 is a defect and not rounding, unless
    one device differs from itself as much when the last digits of its weights change, which is reported. Random plans
    give every op a random legal strategy: they show that any plan would be right. The exit code is 1 if a difference is
    too large.

    Examples: autopar verify gpt.py:make --mesh data=2,tensor=2 --random-plans 20; autopar verify gpt.py:make --mesh
    tensor=2 --processes
    """
    from autopar.planfile import bind
    from autopar.words.meshes import Mesh

    if device == "cuda" and not processes:
        raise UsageError("--device is cuda, and ranks in one process compute on the CPU; give --processes with it")
    document = open_plan(plan) if plan is not None else None
    if document is not None and len(document.meshes) > 1:
        check_ranks_here(sum(mesh.n_devices for mesh in document.meshes))
        if processes or random_plans or mesh:
            raise UsageError(f"{plan} is a plan in stages: it is verified in one process, without --mesh, --processes "
                             "and --random-plans")  # fmt: skip
        _report(_in_stages(model, batch, seq, document), "the plan's groups", as_json)
        return
    if mesh is None and document is None:
        raise UsageError("--mesh is missing; give axes and sizes, such as --mesh data=2,tensor=2")
    shape = Mesh.parse(mesh) if mesh is not None else document.meshes[0]  # type: ignore[union-attr]
    if document is not None and document.meshes[0] != shape:
        raise UsageError(f"the plan {plan} is for mesh {document.meshes[0].shown()}, --mesh is {shape.shown()}")
    from hardware_profiles import load_cluster

    check_ranks_here(shape.n_devices)
    hardware = load_cluster(cluster or f"local-x{shape.n_devices}")
    from autopar.plans.clusters import check_mesh

    check_mesh(shape, hardware)
    loaded, captured = load_and_capture(
        model,
        batch,
        seq,
        device="cpu",
        input_gradients=plan is None and not processes,
        precision=document.precision if document is not None else None,
    )
    check_values(loaded, model)
    given = bind(document, captured.graph) if document is not None else None
    if processes:
        rows = _in_processes(model, batch, seq, shape, hardware, loaded, captured, given, random_plans, seed, device)
    else:
        rows = _in_one(loaded, captured, shape, hardware, given, random_plans, seed)
    _report(rows, f"mesh {shape.shown()}", as_json)


def _report(differences: Sequence[Difference], where: str, as_json: bool) -> None:
    """Print the rows; exit with code 1 if rounding does not explain a difference."""
    rows: list[Facts] = [{**asdict(d), "worst": d.worst, "ok": d.fine} for d in differences]
    if as_json:
        print_json({"ok": all(r["ok"] for r in rows), "plans": rows}, "verify")
    else:
        _print(rows, where)
    if not all(r["ok"] for r in rows):
        raise typer.Exit(1)


def _in_stages(model: str, batch: int | None, seq: int | None, document: Document) -> list[Difference]:
    """Return the row of a plan of several stages."""
    from autopar.capture.microbatches import first_part
    from autopar.comparison.program_vs_eager import verify_pipeline
    from autopar.planfile import bind

    parts = (document.model or {}).get("parts")
    loaded, captured = load_and_capture(
        model, batch, seq, device="cpu", parts=parts, precision=document.precision
    )  # fmt: skip
    check_values(loaded, model)
    plan = bind(document, captured.graph)
    args, kwargs = first_part((loaded.args, loaded.kwargs), loaded.parts or 1)
    with progress("verifying"):
        return [verify_pipeline(captured, loaded.model, args, kwargs, plan)]


def _in_one(
    loaded: Loaded, captured: Captured, mesh: Mesh, cluster: Cluster, given: Plan | None, random_plans: int, seed: int
) -> list[Difference]:
    from autopar.comparison import program_vs_eager as v

    with progress("verifying") as say:
        return v.verify(
            captured, loaded.model, loaded.args, loaded.kwargs, mesh, cluster, plan=given, random_plans=random_plans,
            seed=seed, progress=say,
        )  # fmt: skip


def _in_processes(
    model: str, batch: int | None, seq: int | None, mesh: Mesh, cluster: Cluster,
    loaded: Loaded, captured: Captured,
    given: Plan | None, random_plans: int, seed: int, device: str,
) -> list[Difference]:  # fmt: skip
    """Verify the given or the best plan, then random ones, all on the same processes."""
    import torch

    from autopar.comparison import program_vs_eager as v
    from autopar.planner.intra_op.building.price import pricer
    from autopar.planner.intra_op.mesh_plan import plan_graph
    from autopar.planner.intra_op.random_plans import random_plan
    from autopar.plans.plan import Plan
    from autopar.rules.registry import rules_of
    from autopar.runtime.ranks.launch import backend_of, run_local

    if captured.graph.loss is None:
        raise UsageError(f"{model} returns no scalar loss, so there is no gradient to compare; return the loss")
    double = v.promoted(captured)
    weights, buffers = v.state_of(captured, loaded.model)
    inputs = v.inputs_of(captured, loaded.args, loaded.kwargs, buffers)
    with progress("one device"):
        v.against_eager(captured, loaded.model, loaded.args, loaded.kwargs)
        reference = v.train(
            double, v.one_device(double.graph), v.doubled(weights), v.doubled(buffers), v.doubled(inputs)
        )
    with progress(f"planning on {mesh.shown()}"):
        first = (
            Plan.alone(plan_graph(double.graph, cluster, mesh))
            if given is None else given.of_graph(double.graph.fingerprint)
        )  # fmt: skip
        kind, processes = where_to_run(device, first.n_devices)
        there = "" if kind == "cpu" else f" on {kind}"
        plans = {f"plan, {first.n_devices} processes{there}": first}
        rules, priced = rules_of(double.graph), pricer(cluster, mesh)
        for i in range(seed, seed + random_plans):
            plans[f"random {i}, {first.n_devices} processes{there}"] = Plan.alone(
                random_plan(double.graph, rules, priced, i)
            )
    with progress(f"{len(plans)} plans on {processes}"):
        state = {k: t.detach() for k, t in loaded.model.state_dict().items()}
        batches = (loaded.args, loaded.kwargs)
        given_to_ranks = model, batch, seq, list(plans.values()), state, batches, kind, captured.graph.precision
        results = run_local(_rank, first.n_devices, *given_to_ranks, backend=backend_of(kind))[0]
    rows = []
    for name, result in zip(plans, results, strict=True):
        mine = v.Trained(
            [torch.tensor(x, dtype=torch.float64) for x in result["losses"]],
            result["gradients"],
            {k: w for k, w in result["weights"].items() if k in reference.weights},
            {k: w for k, w in result["weights"].items() if k in reference.buffers},
        )
        buffers_here = {k: b for k, b in reference.buffers.items() if k in mine.buffers}
        here = replace(reference, buffers=buffers_here)
        rows.append(v.beside_rounding(
            v.compare(name, mine, here), here,
            lambda moved, shaken: v.train(
                double, v.one_device(double.graph), moved, v.doubled(buffers), v.doubled(inputs), shaken=shaken
            ),
            v.doubled(weights),
        ))  # fmt: skip
    return rows


def _rank(
    spec: str,
    batch: int | None,
    seq: int | None,
    plans: list[Plan],
    state: dict[str, torch.Tensor],
    inputs: PyTree,
    device: str,
    precision: Precision | None,
) -> list[Facts]:
    """Train two steps of SGD under each plan on one rank in double precision; rank 0 returns the whole tensors.

    ``state`` and ``inputs`` are passed because a factory may draw other values in every process.
    """
    import torch

    from autopar.comparison import program_vs_eager as v
    from autopar.torch_private import pytree

    loaded, captured = load_and_capture(spec, batch, seq, device="cpu", precision=precision)
    loaded.model.load_state_dict(state)
    v.widen(loaded.model)
    captured = replace(v.promoted(captured), constants=v.doubled(captured.constants))
    args, kwargs = pytree.tree_map_only(torch.Tensor, v.wide, inputs)
    loaded = moved(replace(loaded, args=args, kwargs=kwargs), device)
    return [_trained(loaded, captured, plan, loaded.args, loaded.kwargs) for plan in plans]


def _trained(loaded: Loaded, captured: Captured, plan: Plan, args: PyTree, kwargs: Facts) -> Facts:
    import torch

    import autopar
    from autopar.comparison import program_vs_eager as v
    from autopar.parallelizing.all_ranks import check_size, spread
    from autopar.runtime.as_module.parallel_module import parallel
    from autopar.runtime.ranks.agree import ensure_process_group

    ensure_process_group()
    check_size(plan, torch.distributed.get_world_size())
    model = copy.deepcopy(loaded.model)  # a module is parallelized once, and there may be more plans
    pm = parallel(spread(model, captured, plan, torch.distributed.group.WORLD))
    optimizer = torch.optim.SGD([p for p in pm.parameters() if p.requires_grad], **v.SGD)  # type: ignore[arg-type]
    losses, gradients = [], {}
    for step in range(2):
        torch.manual_seed(step)  # random ops draw what the one device draws in this step
        losses.append(float(pm.train_step(*args, **kwargs)))
        if step == 0:
            for name, p in pm.named_parameters():
                if p.grad is not None:
                    whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                    gradients[name] = whole.detach().cpu().clone()
        optimizer.step()
        optimizer.zero_grad()
    weights = autopar.full_state_dict(pm)
    first = torch.distributed.get_rank() == 0
    return {"losses": losses, "gradients": gradients, "weights": weights} if first else {}


def _print(rows: list[Facts], where: str) -> None:
    from autopar.comparison.program_vs_eager import OF_ONE_DEVICE
    from autopar.report.fitted_tables import FittedTable

    title = f"worst relative difference to one device, {where}"
    table = FittedTable(title=title)
    for name in ("plan", "loss", "gradients", "worst in", "weights", "worst in", ""):
        table.add_column(name)
    for r in rows:
        table.add_row(
            r["name"], f"{r['loss']:.1e}", f"{r['gradient']:.1e}", r["gradient_of"], f"{r['weight']:.1e}",
            r["weight_of"],
            _verdict(r),
        )  # fmt: skip
    out().print(table)
    worst = max(rows, key=lambda r: r["worst"] / r["limit"])
    out().print(f"worst: {worst['worst']:.1e} in '{worst['name']}'")
    rounding = max(r["rounding"] for r in rows)
    if rounding > min(r["limit"] for r in rows):
        out().print(
            f"one device differs from itself by {rounding:.1e} when the last digits of its numbers change: with "
            f"these weights and inputs the model magnifies rounding, and a difference below "
            f"{OF_ONE_DEVICE * rounding:.0e} does not show a defect\n"
            "  verify with trained weights, or scale them so that no norm's input varies by less than its eps"
        )


def _verdict(row: Facts) -> Text:
    """Return the last column: same, rounding (of the precision, or magnified by the model), or the limit exceeded."""
    if not row["ok"]:
        return styled("[red]more than {}[/red]", f"{row['limit']:.0e}")
    return styled("[green]same[/green]" if row["worst"] <= row["limit"] else "[yellow]rounding[/yellow]")
