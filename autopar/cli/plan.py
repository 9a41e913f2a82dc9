"""``autopar plan``: from a model and a cluster to a plan file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Batch,
    Json,
    Seq,
    UsageError,
    err,
    load_and_capture,
    out,
    parse_bytes,
    parse_pin,
    parse_place,
    progress,
    show_bytes,
    show_mesh,
    show_seconds,
    show_solution,
)
from autopar.collection import uncollected

if TYPE_CHECKING:
    from autopar.graph import Graph
    from autopar.placements import Mesh
    from autopar.plan import Plan
    from autopar.planner.intra_op.mesh_plan import Options
    from hardware_profiles import Cluster


@uncollected()  # an eighth of the time of a large plan, imports included
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="PATH.py:factory, or hf:PATH/config.json.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Name of a cluster, or a .toml or .json file.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", "-m", help="Axes and sizes: data=8,tensor=8. Default: the fastest of several."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan file.")] = None,
    batch: Batch = None,
    seq: Seq = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Bytes per device: 70GiB. Default: 0.9 of its memory.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin", help="PATTERN:axis=factor: how ops are cut, such as 'layers.*.mlp.up:tensor=n'. Repeatable."
        ),
    ] = None,
    keep_replicated: Annotated[
        list[str] | None,
        typer.Option("--keep-replicated", help="Pattern of parameters that stay whole on every rank. Repeatable."),
    ] = None,
    pin_param: Annotated[
        list[str] | None,
        typer.Option(
            "--pin-param",
            help="How parameters are stored: 'PATTERN=S0,I', with 'S0,I step' (gathered once a step) or 'S0,I use' "
            "(gathered again for the backward). Repeatable.",
        ),
    ] = None,
    pin_input: Annotated[
        list[str] | None, typer.Option("--pin-input", help="How an input arrives: NAME=S0,R. Repeatable.")
    ] = None,
    pin_output: Annotated[
        list[str] | None, typer.Option("--pin-output", help="How an output comes out: NUMBER=S0,I. Repeatable.")
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            "--recompute",
            help="Modules that keep only their inputs and run again in the backward: a pattern of paths. Repeatable. "
            "none: nothing runs again. Default: the planner chooses.",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, sgd or sgd_momentum.")] = "adamw",
    microbatches: Annotated[
        str | None,
        typer.Option(
            "--microbatches",
            help="auto, or several such as 4,8,16: the example is the batch of a step, and the number of pieces "
            "that it is cut into is chosen. One number: so many batches like the example are a step. Default: auto; 1 "
            "with --mesh and no stages.",
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages", help="Pipeline over so many groups of devices, or auto. Default: auto; 1 group with --mesh."
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option("--schedule", help="gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v, dualpipe-v, searched. Repeatable"),
    ] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(
            "--cut",
            help="What a stage begins with: path of a module, or module:op. Once for every stage but the first.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", help="Show so many of the best layouts, with memory, tokens/s and utilisation.")
    ] = 1,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            help="Price a layout beside the best: tp=8,pp=16,dp=128,vp=8,mbs=1,recompute=none. Also cp, m, schedule; "
            "zero and sp are left to the planner.",
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds for one run of the solver.")] = 120.0,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What autopar profile measured: stands for --cluster.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest way to spread a model over a cluster, and write it to a plan file.

    Without flags everything is searched: meshes of up to three axes, stages, schedules, interleaving, numbers of
    microbatches, recomputation, ways to keep parameters. The example is the batch of a step. Flags restrict.

    Examples:

    autopar plan hf:llama/config.json --batch 128 --seq 8192 --cluster dgx-h100-x8 -o plan.json

    autopar plan hf:llama/config.json --batch 128 --cluster dgx-h100-x8 --top 5 --like tp=8,pp=2,dp=4,mbs=1

    autopar plan gpt.py:make --cluster dgx-h100 --mesh data=2,tensor=4 -o plan.json

    autopar plan hf:llama/config.json --batch 8 --seq 2048 --cluster dgx-h100-x8 --memory-limit 70GiB -o plan.json

    autopar plan gpt.py:make -c local-x4 --stages 2 --microbatches 8 --schedule 1f1b -o plan.json

    autopar plan gpt.py:make -c local-x4 --stages auto --microbatches auto -o plan.json

    autopar plan gpt.py:make -c local-x4 --stages 2 --cut layers.1 --microbatches 8 -o plan.json

    autopar plan gpt.py:make -c local-x4 --pin 'layers.*.mlp.up:tensor=n' --keep-replicated '*.norm.weight'
    """
    from autopar.clusters import profile_of
    from autopar.planfile import dumps, parse_mesh, save
    from hardware_profiles import load_cluster

    if cluster is None and profile is None:
        raise UsageError("give the cluster to plan for with --cluster (autopar clusters lists them), or a --profile")
    cluster = profile_of(profile, cluster) if profile is not None else str(cluster)
    hardware = load_cluster(cluster)
    wanted = parse_mesh(mesh) if mesh is not None else None
    pins: dict[str, dict[str, str]] = {}
    for text in pin or ():
        pattern, choices = parse_pin(text)
        pins.setdefault(pattern, {}).update(choices)
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    if wanted is None and (pin_input or pin_output or pin_param):
        raise UsageError("--pin-param, --pin-input and --pin-output need --mesh: a placement has one part per axis")
    piped = stages is not None or bool(schedule) or bool(cut)
    everything = wanted is None and not piped and microbatches is None
    if (like is not None or top != 1) and not everything:
        flags = "--like" if like is not None else "--top"
        raise UsageError(
            f"{flags} is for the search over everything: leave out --mesh, --stages, --schedule, --cut and "
            "--microbatches"
        )
    counts = numbers_of(microbatches or ("auto" if piped else "1"))
    check_options(optimizer, min(counts, default=1), time_limit)
    if len(counts) != 1 and not piped:
        raise UsageError(f"--microbatches {microbatches} is for pipelines: give --stages too, or one number")
    nothing_again = list(recompute or ()) == ["none"]
    from autopar.planner.intra_op.mesh_plan import Options

    options = Options(
        constraints=pins or None,
        params={**dict.fromkeys(keep_replicated or (), "replicate"), **_kept(pin_param, wanted or ())} or None,
        inputs=dict(parse_place(text, wanted or (), "--pin-input") for text in pin_input or ()) or None,
        outputs=_outputs(pin_output, wanted or ()),
        memory_limit_bytes=limit,
        optimizer=optimizer,
        microbatches=counts[0] if len(counts) == 1 else 1,
        time_limit_seconds=time_limit,
        recompute=() if nothing_again else tuple(recompute or ()),
    )
    loaded, captured = load_and_capture(model, batch, seq)
    folder = output.parent if output else Path()
    if cluster.endswith((".toml", ".json")):
        cluster = Path(os.path.relpath(Path(cluster).resolve(), folder.resolve())).as_posix()
    if everything:
        from autopar.cli import layouts

        if layouts.is_searched(captured, loaded):
            layouts.make(
                loaded, captured, hardware, cluster, options, not nothing_again, like, top, output, as_json
            )  # fmt: skip
            return
        if like is not None or top != 1:
            raise UsageError("--like and --top need a model that returns its loss, and a batch with rows")
    if piped:
        from autopar.cli import pipeline

        pipeline.make(
            loaded,
            captured,
            hardware,
            cluster,
            stages or "auto",
            schedule,
            cut,
            counts,
            wanted,
            options,
            output,
            as_json,
            not nothing_again,
        )
        return
    found = plan_on(captured.graph, hardware, wanted, options, cluster)
    named = loaded.named(folder)
    if output is not None:
        save(output, found, captured.graph, named)
    if as_json:
        sys.stdout.write(dumps(found, captured.graph, named))
    else:
        summary(found, output)
        if hardware.measured is not None:
            from autopar.report.measured import coverage, line

            out().print("  " + line(coverage([captured.graph], [found], hardware, [None]) or {}), markup=False)


def numbers_of(text: str) -> tuple[int, ...]:
    """Of ``--microbatches``: one number, several, or none for auto."""
    parts = [p.strip() for p in text.split(",")]
    if text != "auto" and not all(p.isdigit() for p in parts):
        raise UsageError(f"--microbatches is '{text}'; give a number, several such as 4,8,16, or auto")
    return () if text == "auto" else tuple(dict.fromkeys(map(int, parts)))


def check_options(optimizer: str, microbatches: int, time_limit: float) -> None:
    """Refuse what the planner could not use."""
    known = ("adamw", "sgd", "sgd_momentum")
    if optimizer not in known:
        raise UsageError(f"unknown optimizer '{optimizer}'; use {', '.join(known)}")
    if microbatches < 1:
        raise UsageError(f"--microbatches is {microbatches}; it is 1 or more")
    if time_limit <= 0:
        raise UsageError(f"--time-limit is {time_limit:g} s; it is more than 0")


def _kept(texts: list[str] | None, mesh: Mesh) -> dict[str, str]:
    from autopar.pins import parse_kept

    found = {}
    for text in texts or ():
        pattern, equals, how = text.partition("=")
        if not equals or not pattern:
            raise UsageError(
                f"--pin-param '{text}' is no PATTERN=PLACEMENT; write it like --pin-param '*.weight=S0,I use'"
            )
        found[pattern] = parse_kept(how, mesh, f"--pin-param {pattern}")
    return found


def _outputs(texts: list[str] | None, mesh: Mesh) -> dict[int, tuple[str, ...]] | None:
    found = {}
    for text in texts or ():
        name, state = parse_place(text, mesh, "--pin-output")
        if not name.isdigit():
            raise UsageError(f"--pin-output '{text}': '{name}' is no output number; outputs count from 0")
        found[int(name)] = state
    return found or None


def plan_on(graph: Graph, cluster: Cluster, mesh: Mesh | None, options: Options, name: str) -> Plan:
    """The best plan on a mesh; without one, the fastest over the usual shapes for the whole cluster."""
    from autopar.api import mesh_shapes
    from autopar.errors import InfeasibleError
    from autopar.pins import plan_pinned

    if mesh is not None:
        with progress(f"planning on {show_mesh(mesh)}"):
            return plan_pinned(graph, cluster, mesh, options, name)
    named = {axis for axes in (options.constraints or {}).values() for axis in axes}
    shapes = [s for s in mesh_shapes(cluster.n_devices) if named <= {axis for axis, _ in s}]
    if not shapes:
        raise UsageError(f"the pins name axes {', '.join(sorted(named))}; give the mesh that you mean with --mesh")
    best: Plan | None = None
    failed: InfeasibleError | None = None
    for shape in shapes:
        with progress(f"planning on {show_mesh(shape)}"):
            try:
                found = plan_pinned(graph, cluster, shape, options, name)
            except InfeasibleError as error:
                failed = error
                continue
        if err().is_terminal:
            err().print(f"[dim]{show_mesh(shape)}: {show_seconds(found.price.seconds)} a step[/dim]")
        if best is None or found.price.seconds < best.price.seconds:
            best = found
    if best is None:
        assert failed is not None
        raise failed
    return best


def summary(plan: Plan, path: Path | None) -> None:
    """A few lines about a plan."""
    p, console = plan.price, out()
    console.print(f"[bold]{show_mesh(plan.mesh)}[/bold] on {plan.cluster}: {show_seconds(p.seconds)} a step")
    console.print(
        f"  compute {show_seconds(p.compute_seconds)}, activation collectives {show_seconds(p.activation_seconds)}, "
        f"parameter collectives {show_seconds(p.parameter_seconds)}"
    )
    console.print(
        f"  memory per device {show_bytes(p.memory_bytes)}: parameters {show_bytes(p.parameter_bytes)}, gradients "
        f"{show_bytes(p.gradient_bytes)}, optimizer {show_bytes(p.optimizer_bytes)}, gathered "
        f"{show_bytes(p.gathered_bytes)}, activations {show_bytes(p.activation_bytes)}"
    )
    if plan.solution is not None:
        console.print(f"  {show_solution(plan.solution)}")
    for note in plan.notes:
        console.print(f"  [yellow]note:[/yellow] {note}")
    if path is not None:
        console.print(f"  written to {path}; look at it with: autopar show {path}")
