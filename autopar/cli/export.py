"""``autopar export``: a plan as the files of another trainer, a serving plan as those of an engine."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Json,
    ModelOption,
    PlanPath,
    Trust,
    UsageError,
    bound,
    load_and_capture,
    open_plan,
    print_json,
    print_lines,
    progress,
    show_bytes,
    show_seconds,
    spec_of,
)
from autopar.cli.serving_plans import serving_plan_in
from hardware_profiles.strict import parse_json

if TYPE_CHECKING:
    from autopar.planfile import Document
    from autopar.planner.layouts.pricing import PricedLayout
    from autopar.serving.records import ServingPlan
    from autopar.targets.exporting import ExportCost, Exporter
    from autopar.targets.target import Export, WrittenFiles
    from autopar.words.graph import Graph

RECORD = "autopar.json"
"""The file of a folder that says what it was made from; a folder with it may be written again."""


def export(
    path: PlanPath,
    to: Annotated[str, typer.Option("--to", help="The trainer: fsdp2, torchtitan, megatron, deepspeed, accelerate; "
                                            "for serving the engine: vllm, sglang, tensorrt-llm, dynamo.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; it is made.")],
    model: ModelOption = None,
    trust: Trust = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds other files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a plan as what a person runs with another trainer: its config, its command, nothing to fill in but data.

    A plan made by autopar plan --for TRAINER is written as it is. Of any other plan the nearest layout that the trainer
    can express is written, and what it cannot express is listed with its cost in seconds and bytes.

    A serving plan is written as the options of an engine. What the engine cannot run is one error; what it decides by
    rules of its own is listed.

    Examples: autopar plan hf:llama/config.json --batch 128 --cluster dgx-h100-x8 --for megatron -o plan.json

    autopar export plan.json --to megatron -o run

    autopar export serving.json --to vllm -o run
    """
    if serving := serving_plan_in(path):
        export_serving(serving, path, to, output, force=force, as_json=as_json)
        return
    from autopar.targets import target_named
    from autopar.targets.engines import engines
    from autopar.targets.starting import launchers

    if to in engines():
        raise UsageError(
            f"--to is {to}, an engine that serves, and {path} is a plan for training; give a trainer, or a plan of "
            "'autopar plan --mode inference'"
        )
    target = target_named(to)
    _check_folder(output, force)
    document = open_plan(path)
    exporter = _exporter(document, path, to, model, trust=trust)
    with progress(f"pricing for {target.title}") as say:
        exporter.say = say
        found, cost = _layout(exporter, document)
        made, written = exporter.export(found)
    files = {**written.files, **launchers(made, written), RECORD: _record(path, made, written, cost)}
    _write(output, files)
    if as_json:
        print_json({**parse_json(files[RECORD]), "folder": str(output), "files": sorted(files)}, "export")
        return
    print_lines(*_answer(output, made, written, cost))


def export_serving(plan: ServingPlan, path: Path, to: str, output: Path, *, force: bool, as_json: bool) -> None:
    """Write a serving plan as the files of an engine."""
    from autopar.planfile.parsing import cluster_named
    from autopar.serving.plan_file import dumps
    from autopar.targets import targets
    from autopar.targets.engines import engine_named
    from autopar.targets.engines.serving_engine import deployment_of, export_to

    if to in targets():
        raise UsageError(
            f"--to is {to}, a trainer, and {path} is a serving plan; give an engine, or a plan for training"
        )
    engine = engine_named(to)
    _check_folder(output, force)
    deployment = deployment_of(plan, cluster_named(plan.cluster, path.parent))
    written = export_to(engine, deployment)
    files = {**written.files, RECORD: dumps(plan)}
    _write(output, files)
    if as_json:
        print_json({
            "plan": path.name, "engine": to, "cluster": plan.cluster, "devices": plan.devices,
            "first_token_seconds": plan.served.first_token_seconds, "token_seconds": plan.served.token_seconds,
            "memory_bytes": max(worker.memory.total for worker in plan.workers), "start": list(written.start),
            "fill_in": list(written.fill_in), "notes": list(written.notes), "folder": str(output),
            "files": sorted(files),
        }, "export-serving")  # fmt: skip
        return
    lines = [f"{output}: {plan.model} on {plan.devices} devices of {plan.cluster}, for {engine.title}"]
    lines += [f"  {name}" for name in sorted(files)]
    lines += [f"  note: {note}" for note in written.notes]
    lines += [f"fill in: {what}" for what in written.fill_in]
    print_lines(*lines, *(f"start it: {line}" for line in written.start))


def _exporter(document: Document, path: Path, to: str, model: str | None, *, trust: bool) -> Exporter:
    """Return the exporter of a plan file's model, with the batch of a step."""
    from autopar.capture.microbatches import rows_of
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.planner.planning import options_of
    from autopar.plans.pins import Pins
    from autopar.plans.request import PlanRequest
    from autopar.targets import target_named
    from autopar.targets.exporting import Exporter

    named = document.model or {}
    spec, folder = spec_of(document, path, model, trust=trust)
    loaded, captured = load_and_capture(
        spec, named.get("batch"), named.get("seq"), folder=folder, precision=document.precision
    )
    limit = (document.raw.get("pins") or {}).get("memory_limit_bytes")
    pins = Pins(memory_limit_bytes=limit, offload=_on_host(document, captured.graph))
    options = options_of(PlanRequest(pins, document.raw["optimizer"]))
    example = loaded.args, loaded.kwargs
    layouts = PricedLayouts(loaded.model, captured, example, options)
    return Exporter(target_named(to), loaded, captured, layouts, document.cluster_name, rows_of(example))


def _on_host(document: Document, graph: Graph) -> str:
    """Return what a plan file stores on the host, in the words of ``offload``.

    Layouts of a trainer are made again by the words that they were made by; of other plans shares of bytes are taken,
    since what the planner was free to choose it has chosen.
    """
    from autopar.plans.offload_options import Offload
    from autopar.targets.host_shares import shares_on_host

    pins = document.raw.get("pins") or {}
    if pins.get("layout"):
        return str(pins.get("offload", ""))
    patterns = {name: how for stage in document.raw["stages"] for name, how in stage["params"].items()}
    on_host = {
        node.target: how["lifetime"] for _, node in graph.of_kind("param") for pattern, how in patterns.items()
        if how.get("on_host") and fnmatchcase(node.target, pattern)
    }  # fmt: skip
    shares = shares_on_host(on_host, graph)
    return Offload(None, shares.steps or None, shares.parameters or None).text


def _layout(exporter: Exporter, document: Document) -> tuple[PricedLayout, ExportCost | None]:
    """Return the layout to write: that of the plan, or the nearest one with what it costs."""
    from dataclasses import replace

    from autopar.planner.layouts.pricing import graph_for
    from autopar.targets.exporting import is_of_words
    from autopar.targets.space import refusal

    part = exporter.layouts.part(document.microbatches)
    plan, _ = bound(document, replace(part, graph=graph_for(part.graph, document.raw["fingerprint"])))
    words = plan.pins.layout
    if words:
        found = exporter.layouts.price(exporter.where, words)
        if is_of_words(plan, found.plan) and not refusal(exporter.target, found.layout, exporter.model):
            return exporter.of_words(words), None
    cost = exporter.nearest(plan)
    return cost.found, cost


def _record(path: Path, made: Export, written: WrittenFiles, cost: ExportCost | None) -> str:
    """Return the file that says what a folder was made from, and what was promised of it."""
    from autopar.cli.schemas import id_of

    plan = made.priced.plan
    said = {
        "schema": id_of("export"), "plan": path.name, "target": plan.pins.target, "layout": made.layout.text,
        "cluster": made.cluster_name, "batch": made.rows, "sequence": made.sequence,
        "precision": None if made.precision is None else str(made.precision), "optimizer": made.optimizer,
        "seconds": plan.seconds, "memory_bytes": made.priced.memory_bytes, "limit_bytes": made.priced.limit_bytes,
        "fill_in": list(written.fill_in), "notes": [*made.priced.pinned.notes, *written.notes],
        "not_said": cost.facts() if cost is not None else None,
    }  # fmt: skip
    return json.dumps(said, indent=2, ensure_ascii=False) + "\n"


def _answer(output: Path, made: Export, written: WrittenFiles, cost: ExportCost | None) -> list[str]:
    """Return the answer as lines of text."""
    priced = made.priced
    lines = [
        f"{output}: {made.layout.text} for {made.cluster_name}; {show_seconds(priced.seconds)} a step, "
        f"{show_bytes(priced.memory_bytes)} of {show_bytes(priced.limit_bytes)}"
    ]
    if cost is not None:
        lines += ["what the trainer cannot say of the plan:", *(f"  {line}" for line in cost.lines())]
    lines += [f"  {name}" for name in sorted(written.files)]
    lines += [f"  note: {note}" for note in (*priced.pinned.notes, *written.notes)]
    lines += [f"fill in: {what}" for what in written.fill_in]
    return [*lines, f"start it: cd {output} && bash launch.sh, or sbatch launch.slurm"]


def _check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that holds something else than an earlier export."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--output is {folder}, which is no folder; give the name of a new one")
    if not folder.parent.is_dir():
        raise UsageError(f"--output is {folder}, and there is no folder {folder.parent}; make it first")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file() and not force:
        raise UsageError(f"--output is {folder}, which holds other files; give a new folder, or --force to write there")


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write the files; scripts may be run."""
    try:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                file.unlink()
            file.write_text(text, encoding="utf-8")
            if name.endswith((".sh", ".slurm")):
                os.chmod(file, 0o755)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or folder}: {error.strerror}; choose another folder") from None
