"""From the text of a plan file and a graph to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from autopar.errors import PlanError
from autopar.planfile import pins as pin_section
from autopar.planfile.file_errors import FileErrors
from autopar.planfile.parsing import Document, parse
from autopar.planfile.repricing import Setting, stage_plan
from autopar.planfile.stage_entries import StageReader
from autopar.planfile.writing import step_checksum
from autopar.planner.inter_op.simulating.timing import step_of, timing_of
from autopar.plans.device_groups import check_places, check_within
from autopar.plans.pins import Pins
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.stage_graphs import StageGraph, cut, first_op, stage_edges_of
from autopar.plans.weight_versions import versions_of
from autopar.rules.experts.expert_load import with_load
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.schedules import live_at_peak
from hardware_profiles import Cluster
from hardware_profiles.strict import Unreadable, read_text


def load(path: str | Path, graph: Graph, cluster: Cluster | None = None) -> Plan:
    """Read a plan file for a model; see :func:`loads`."""
    return bind(open_(path), graph, cluster)


def open_(path: str | Path) -> Document:
    """Read a plan file and check its form."""
    return parse(read(path), str(path), Path(path).parent)


def read(path: str | Path) -> str:
    """Return the text of a plan file."""
    try:
        return read_text(path)
    except Unreadable as error:
        raise PlanError(f"cannot read the plan {path}: {error}") from error


def loads(text: str, graph: Graph, cluster: Cluster | None = None, *, where: str = "plan") -> Plan:
    """Return the plan in ``text``, for the model with this graph.

    A stage that was edited by hand is priced anew on its own devices, and so are all where the cluster, the schedule or
    the pins were edited; then the step is simulated anew.

    Args:
        text: the text of the plan file.
        graph: the graph of the whole model, at the size of a microbatch.
        where: name of the file, for messages.
        cluster: prices what has to be priced anew; by default the cluster that the file names, and only when needed.

    Raises:
        PlanError: whatever does not fit, all failures at once, each with its place in the file, the numbers on both
            sides and what to do.
        ClusterError, MeshError: the cluster is needed, and there is none of that name, or it lacks a device.
    """
    return bind(parse(text, where), graph, cluster)


def bind(document: Document, graph: Graph, cluster: Cluster | None = None) -> Plan:
    """Return the plan of a parsed file for the model with this graph; see :func:`loads`."""
    raw, where, schedule, meshes = document.raw, document.where, document.schedule, document.meshes
    bad = FileErrors(where)
    if raw["fingerprint"] != graph.fingerprint:
        n = document.microbatches
        part = f"a microbatch, {n} of which make up a step, of " if n > 1 else ""
        bad.add(
            "fingerprint",
            f"the plan is for {part}a model with fingerprint {raw['fingerprint']}, this one has {graph.fingerprint} "
            "(operators, shapes or names differ); plan this model again, or write its fingerprint into the file to "
            "try these decisions on it",
        )
        bad.raise_if_any()
    graph = with_load(graph, document.expert_load)
    devices = [
        tuple(stage.get("devices") or range(mesh.n_devices)) for stage, mesh in zip(raw["stages"], meshes, strict=True)
    ]
    try:
        graphs = cut(graph, [stage["first"] for stage in raw["stages"][1:]])
        check_places(schedule, meshes, devices)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    _check_cuts(document, graphs)

    @cache
    def hardware() -> Cluster:
        machine = cluster or document.cluster()
        check_within(devices, machine.n_devices, f"devices are in cluster '{raw['cluster']}'")
        return machine

    pins = _pins(document, graph, bad)
    readers = [
        StageReader(entry, mesh, stage.graph, bad.within(f"stages[{stage.number}]"))
        for entry, mesh, stage in zip(raw["stages"], meshes, graphs, strict=True)
    ]
    decided = [reader.decisions() for reader in readers]
    bad.raise_if_any()
    stages: list[StagePlan] = []
    anew, of_stages = False, versions_of(schedule)
    for reader, decisions, ranks in zip(readers, decided, devices, strict=True):
        in_flight = reader.raw.get("in_flight", 1)
        setting = Setting(hardware, raw["cluster"], ranks, raw["optimizer"], schedule.n_microbatches, in_flight, pins,
                          of_stages[len(stages)])  # fmt: skip
        stage, priced = stage_plan(reader, decisions, setting)
        stages.append(stage)
        anew = anew or priced
    plan = Plan(
        graph.fingerprint, raw["cluster"], tuple(stages), schedule, stage_edges_of(graphs),
        float(raw.get("seconds") or 0.0), tuple(raw.get("notes") or ()), pins, graph,
    )  # fmt: skip
    if anew or raw.get("checksum") != step_checksum(plan):
        live = live_at_peak(schedule, [stage.kept_bytes for stage in stages])
        plan = replace(plan, stages=tuple(stage.with_in_flight(n) for stage, n in zip(stages, live, strict=True)))
        plan = replace(plan, seconds=_step_seconds(plan, graphs, hardware))
    return plan


def _step_seconds(plan: Plan, graphs: Sequence[StageGraph], hardware: Callable[[], Cluster]) -> float:
    """Return the simulated seconds of a step."""
    if len(graphs) == 1:
        return plan.stages[0].price.seconds
    return step_of(plan.schedule, *timing_of(graphs, plan.stages, plan.schedule, hardware()))[1]


def _check_cuts(document: Document, graphs: Sequence[StageGraph]) -> None:
    """Refuse stages that do not begin where they began when their decisions were made."""
    for entry, stage in zip(document.raw["stages"], graphs, strict=True):
        where = f"{document.where}, stages[{stage.number}]"
        if entry["first"] not in ("", first_op(stage.graph)) and stage.number == 0:
            raise PlanError(
                f"{where}: 'first' is '{entry['first']}', the model begins at '{first_op(stage.graph)}'; write that"
            )
        made_for = entry.get("fingerprint")
        if made_for not in (None, stage.graph.fingerprint) and len(graphs) > 1:
            raise PlanError(
                f"{where}: the stage has fingerprint {stage.graph.fingerprint}, its plan is for {made_for}; a cut is "
                "moved by planning again: autopar plan --cut"
            )


def _pins(document: Document, graph: Graph, bad: FileErrors) -> Pins:
    """Return the pins; placements are for the requested mesh, or for that of the first stage."""
    raw, meshes = document.raw.get("pins") or {}, document.meshes
    given = Mesh.parse(raw["mesh"]) if "mesh" in raw else None
    axes = dict.fromkeys(axis for mesh in (*meshes, *([given] if given else [])) for axis in mesh.names)
    return pin_section.read(raw, pin_section.Model(graph, given or meshes[0], tuple(axes), bad))
