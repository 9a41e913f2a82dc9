"""``autopar plan``: make a plan file from a model and a cluster."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import layouts, plan_for, plan_inference
from autopar.cli.common import (
    MOST_LAYOUTS,
    Batch,
    Json,
    Model,
    Seq,
    UsageError,
    cluster_from,
    out,
    print_json,
    print_lines,
    seconds_within,
    show_bytes,
    show_seconds,
    show_solution,
    styled,
    within,
)
from autopar.cli.output_files import PLAN, Force, OutputFile
from autopar.cli.plan_search import PlanSearch, precision_note
from autopar.garbage_collection import uncollected
from autopar.plans.offload_options import parse_offload
from autopar.plans.plan_options import OPTIMIZERS, PLAN_OPTIONS
from autopar.plans.request import as_option, request_of
from autopar.report import Facts
from hardware_profiles.strict import parse_json

if TYPE_CHECKING:
    from autopar.capture import Captured
    from autopar.frontends import Loaded
    from autopar.planner.layouts.pricing import PricedLayout
    from autopar.planner.planning import Outcome
    from autopar.plans.plan import Plan
    from autopar.plans.request import PlanRequest
    from autopar.words.graph import Graph
    from hardware_profiles import Cluster


def plan(
    model: Model,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Name of a cluster, or a .toml or .json file.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option("--as", help="Price for another trainer than autopar's runtime: megatron-2023, nemo, "
                     "torchtitan (autopar clusters lists them). Also behind the cluster's name: 'dgx-h100 as nemo'."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--for", help="Search only what another trainer can express, priced with its software: fsdp2, "
                     "torchtitan, megatron, deepspeed, accelerate. autopar export writes its files."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan file.")] = None,
    top: Annotated[
        int,
        typer.Option("--top", help="Number of best layouts to show, with memory, tokens/s and utilization.",
                     callback=within(1, MOST_LAYOUTS)),
    ] = 1,
    like: Annotated[
        list[str] | None,
        typer.Option(
            "--like",
            help="Also price this layout, exactly as written: tp=8,sp,pp=16,dp=128,vp=8,mbs=1,zero=1,"
            "recompute=full. Repeatable. dp, tp, sp, cp (cp=4:ring, allgather, ulysses), ep, pp, vp; zero=0 to 3 or "
            "fsdp; mbs, or m (gas) microbatches, mbs=1 where neither is given; schedule; recompute=none, full, full:2 "
            "(blocks of each stage), every:2 or selective:MODULE; optimizer, precision.",
        ),
    ] = None,
    like_output: Annotated[
        Path | None, typer.Option("--like-output", help="Where to write the plan of the layout of --like.")
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="A profile written by autopar profile, in place of --cluster.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
    **chosen: Any,
) -> None:  # fmt: skip
    """Find the fastest parallelization of a model on a cluster, and write it to a plan file.

    Without flags everything is searched: meshes of up to three axes, pipeline stages, schedules, interleaving, numbers
    of microbatches, recomputation, storage of parameters. The example inputs are one full step's batch. Flags restrict
    the search: --stages 1, --microbatches 1, --recompute none. Ctrl-C or SIGTERM ends it with the best plan so far.

    Examples: autopar plan hf:llama/config.json --batch 128 --seq 8192 --cluster dgx-h100-x8 -o plan.json

    autopar plan hf:llama/config.json --batch 128 --cluster dgx-h100-x8 --top 5 --like tp=8,pp=2,dp=4,mbs=1

    autopar plan gpt.py:make -c dgx-h100-x8 -o best.json --like tp=8,dp=8 --like-output ours.json

    autopar plan hf:llama/config.json --batch 128 --cluster dgx-h100-x8 --for megatron --top 5 -o plan.json

    autopar plan gpt.py:make --cluster dgx-h100 --mesh data=2,tensor=4 -o plan.json

    autopar plan hf:llama/config.json --batch 8 --seq 2048 --cluster dgx-h100-x8 --memory-limit 70GiB -o plan.json

    autopar plan gpt.py:make -c local-x4 --stages 2 --microbatches 8 --schedule 1f1b -o plan.json

    autopar plan gpt.py:make -c local-x4 --stages auto --microbatches auto -o plan.json

    autopar plan gpt.py:make -c local-x4 --stages 2 --cut layers.1 --microbatches 8 -o plan.json

    autopar plan hf:llama/config.json -c dgx-h100 --mode inference --isl 4000 --osl 500 --tpot 30ms --top 5

    autopar plan gpt.py:make -c local-x4 --pin 'layers.*.mlp.up:tensor=n' --keep-replicated '*.norm.weight'
    """
    from autopar.planfile import dumps
    from autopar.plans.clusters import as_trainer, profile_of
    from autopar.report.alternatives import ranked
    from autopar.words.precision import parse_choice
    from hardware_profiles import load_cluster

    if plan_inference.requested(chosen):
        others = {"--as": trainer, "--for": target, "--like-output": like_output, "--batch": batch, "--seq": seq,
                  "--profile": profile}  # fmt: skip
        plan_inference.run(model, cluster, chosen, others, like=list(like or ()), top=top, output=output, force=force,
                           as_json=as_json)  # fmt: skip
        return
    if cluster is None and profile is None:
        raise UsageError("give the cluster to plan for with --cluster (autopar clusters lists them), or a --profile")
    likes = list(like or ())
    layouts.check_outputs(output, like_output, len(likes))
    files = {option: OutputFile(path, PLAN, option, force)
             for option, path in (("-o", output), ("--like-output", like_output)) if path is not None}  # fmt: skip
    for file in files.values():
        file.check()
    cluster = profile_of(profile, cluster) if profile is not None else str(cluster)
    if target is not None:
        trainer = _software_of(target, trainer, chosen)
    if trainer is not None:
        cluster = as_trainer(cluster, trainer)
    hardware = load_cluster(cluster)
    allowed = parse_choice(chosen["precision"])
    wanted = request_of(_arguments({**chosen, "precision": None} if allowed else chosen), spelled=as_option)
    if (likes or top != 1) and not wanted.everything:
        raise UsageError(
            f"{'--like' if likes else '--top'} needs the full search: leave out --mesh, --stages, --schedule, --cut "
            "and --microbatches"
        )
    if target is not None:
        plan_for.check_free(wanted, len(likes))
    if allowed and target is not None:
        raise UsageError(
            f"--precision {chosen['precision']} is a choice, which --for {target} does not make: give one policy, such "
            f"as {allowed[0]}, and compare the seconds"
        )
    words = layouts.parsed(likes)
    search = PlanSearch(model, batch, seq, cluster, hardware, replace(wanted, top=top), chosen, bool(likes))
    if allowed:
        under, outcome, policy_note = search.fastest(allowed)
        priced = layouts.priced(under.loaded, under.captured, cluster, under.request, likes, words, like_output)
    else:
        under = search.under(wanted.pins.precision)
        policy_note = precision_note(wanted.pins.precision, under.loaded, under.captured, hardware)
        if target is not None:
            file = files.get("-o")
            _plan_for(target, under.loaded, under.captured, cluster, under.request, file, policy_note, as_json)
            return
        priced = layouts.priced(under.loaded, under.captured, cluster, under.request, likes, words, like_output)
        outcome = search.find(under)
    loaded, captured = under.loaded, under.captured
    outcome, where = _noted(outcome, loaded, policy_note), outcome.plan.cluster
    if output is not None:
        files["-o"].write(dumps(*_file(outcome, loaded, captured, where, output.parent)))
    found = [row.found for row in priced if row.found is not None]
    if like_output is not None:
        described = _file(_noted(_as_outcome(found[0]), loaded, policy_note), loaded, captured, cluster,
                          like_output.parent)  # fmt: skip
        files["--like-output"].write(dumps(*described))
    if as_json:
        text = dumps(*_file(outcome, loaded, captured, where, output.parent if output else Path()))
        rows = [row.facts(hardware, _plan_of(row, loaded, captured, cluster)) for row in priced]
        beside = ranked(layouts.alternatives(outcome, top, priced))
        if priced or top > 1:
            print_json({**parse_json(text), "layouts": rows, "alternatives": beside}, "plan")
        else:
            sys.stdout.write(text)
    else:
        _summary(outcome, outcome.cluster or hardware, output, top)
        layouts.show(outcome, hardware, top, priced, output, like_output)


def _plan_of(like: layouts.Priced, loaded: Loaded, captured: Captured, cluster: str) -> Facts | None:
    """Return the plan file of a layout as values; None if it has no plan."""
    from autopar.planfile import dumps

    if like.found is None:
        return None
    facts: Facts = parse_json(dumps(*_file(_as_outcome(like.found), loaded, captured, cluster, Path())))
    return facts


def _software_of(target: str, trainer: str | None, chosen: Facts) -> str:
    """Return the software by which a trainer's layouts are priced."""
    from autopar.targets import target_named

    if parse_offload(chosen["offload"], "--offload").activations is not None:
        raise UsageError(
            f"--offload {chosen['offload']} lets activations leave the device, and a plan --for {target} cannot say "
            "which: leave them out, as in --offload optimizer"
        )
    software = target_named(target).software
    if trainer not in (None, software):
        raise UsageError(f"--as says {trainer}, and --for {target} is priced as {software}; leave --as out")
    return software


def _plan_for(
    target: str, loaded: Loaded, captured: Captured, cluster: str, request: PlanRequest, file: OutputFile | None,
    note: str, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest layout that a trainer can express, and write its plan."""
    from autopar.planfile import dumps

    search, found = plan_for.search_of(loaded, captured, cluster, request, target)
    own = plan_for.beside_own(loaded, captured, cluster, request, found.best) if request.top > 1 else None
    folder = file.path.parent if file is not None else Path()
    text = dumps(*_file(_noted(_as_outcome(found.best), loaded, note), loaded, captured, cluster, folder))
    if file is not None:
        file.write(text)
    if as_json:
        print_json({**parse_json(text), **plan_for.facts(search, found, request.top, own)}, "plan")
        return
    plan_for.show(found, cluster, request.top, own)
    if note:
        print_lines(f"  note: {note}")
    if file is not None:
        print_lines(f"{file.path} has the plan; autopar export {file.path} --to {target} -o FOLDER writes its files")


def _as_outcome(found: PricedLayout) -> Outcome:
    """Return a priced layout in the form of a search's outcome."""
    from autopar.planner.planning import Outcome

    return Outcome(found.plan, found.captured, found.timeline)


def _noted(outcome: Outcome, loaded: Loaded, policy_note: str) -> Outcome:
    """Add notes about the model's loss and its precision to the plan."""
    from autopar.capture.graph.marked_products import none_narrow
    from autopar.comparison.parts_of_loss import with_notes

    plan = with_notes(outcome.plan, outcome.captured, loaded.model, (loaded.args, loaded.kwargs, ()))
    notes = tuple(filter(None, (policy_note, none_narrow(outcome.captured.graph))))
    return replace(outcome, plan=replace(plan, notes=(*notes, *plan.notes)))


def _file(
    outcome: Outcome, loaded: Loaded, captured: Captured, cluster: str, folder: Path
) -> tuple[Plan, Graph, Facts]:
    """Return the contents of a plan file in ``folder``: plan, graph, and the specification of the model.

    ``captured`` is the graph of the whole batch; for a plan of a microbatch the file says how the batch is divided.
    """
    if outcome.captured is not captured:
        loaded = replace(loaded, parts=outcome.plan.microbatches)
    return replace(outcome.plan, cluster=cluster_from(cluster, folder)), outcome.captured.graph, loaded.named(folder)


def _arguments(chosen: Facts) -> Facts:
    """Return the arguments of :func:`autopar.plan` that the options give; options without a value are absent."""
    given: Facts = {}
    for option in PLAN_OPTIONS:
        for flag in option.flags:
            text = chosen[flag.parameter]
            if text is None or text == []:
                continue
            value = flag.read(text)
            given[option.name] = {**given.get(option.name, {}), **value} if isinstance(value, dict) else value
    if given.get("optimizer", OPTIMIZERS[0]) not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer '{given['optimizer']}'; use {', '.join(OPTIMIZERS)}")
    return given


def _with_flags(command: Any) -> Any:
    """Add a command-line option for every flag of every plan option, before the command's own last ones."""
    signature = inspect.signature(command, eval_str=True)
    arguments = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = []
    for flag in (flag for option in PLAN_OPTIONS for flag in option.flags):
        kind = list[str] | None if flag.repeatable else flag.kind | None
        option = typer.Option(*flag.names, help=flag.help, callback=seconds_within if flag.kind is float else None)
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=None,
                                       annotation=annotation))  # fmt: skip
    parameters = [*(p.replace(kind=p.KEYWORD_ONLY) for p in arguments[:2]), *flags,
                  *(p.replace(kind=p.KEYWORD_ONLY) for p in arguments[2:])]  # fmt: skip
    command.__signature__ = signature.replace(parameters=parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


# without collections an eighth of the time of a large plan is saved, imports included
plan = uncollected()(plan_inference.with_serving_flags(_with_flags(plan)))


def _summary(outcome: Outcome, hardware: Cluster, path: Path | None, top: int) -> None:
    """Print a few lines about a plan of one stage, or tables of several stages."""
    from autopar.cli.stages import describe
    from autopar.report.coverage import coverage, line

    plan, console = outcome.plan, out()
    if outcome.timeline is not None:
        tried = outcome.tried if top == 1 else ()
        describe(outcome.captured, plan, outcome.timeline, hardware, False, {"tried": tried})
    else:
        _of_one_stage(plan, outcome.captured.graph)
        if profiled := coverage([outcome.captured.graph], plan.stages, hardware):
            console.print("  " + line(profiled), markup=False)
    if path is not None:
        console.print(f"  written to {path}; show it with: autopar show {path} --trust")


def _of_one_stage(plan: Plan, graph: Graph) -> None:
    from autopar.cli.stages import print_layout

    p, console = plan.price, out()
    mesh, seconds = plan.mesh.shown(), show_seconds(p.seconds)
    console.print(styled("[bold]{}[/bold] on {}: {} a step", mesh, plan.cluster, seconds))
    print_layout(graph, plan, "  ")
    console.print(
        f"  compute {show_seconds(p.compute_seconds)}, activation collectives {show_seconds(p.activation_seconds)}, "
        f"parameter collectives {show_seconds(p.parameter_seconds)}"
        + (f" ({show_seconds(p.hidden_seconds)} of them overlapped with compute)" if p.hidden_seconds else "")
        + (f", executor {show_seconds(p.overhead_seconds)}" if p.overhead_seconds else "")
        + (f", optimizer {show_seconds(p.optimizer_seconds)}" if p.optimizer_seconds else "")
    )
    console.print(
        f"  memory per device {show_bytes(p.memory_bytes)}: parameters {show_bytes(p.parameter_bytes)}, gradients "
        f"{show_bytes(p.gradient_bytes)}, optimizer {show_bytes(p.optimizer_bytes)}, gathered "
        f"copies {show_bytes(p.gathered_bytes)}, "
        + (f"weight versions {show_bytes(p.version_bytes)}, " if p.version_bytes else "")
        + f"activations {show_bytes(p.activation_bytes)}, "
        + (
            f"working memory {show_bytes(p.working_bytes)}"
            if p.working_bytes >= 0
            else f"of which {show_bytes(-p.working_bytes)} are never live at the same time"
        )
    )
    if plan.solution is not None:
        console.print(f"  {show_solution(plan.solution)}")
    for note in plan.notes:
        console.print(styled("  [yellow]note:[/yellow] {}", note))
