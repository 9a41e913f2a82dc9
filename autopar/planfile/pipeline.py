"""The file of a pipelined plan: stages with their plans, and the schedule as text.

    {
      "autopar_pipeline": 1,                    version of this format
      "model": {"spec": "gpt.py:make"}, "fingerprint": "26fa0c71b0a3b94c", "cluster": "dgx-h100",
      "optimizer": "adamw", "seconds": 0.17,
      "pins": {"stages": 2, "cuts": ["layers.12"], "schedules": ["1f1b"], "microbatches": 4},
      "schedule": ["schedule 1f1b stages 2 microbatches 4", "rank 0 holds 0: 0F0 0F1 0B0 ...", ...],
      "stages": [{"first": "embedding", "devices": [0, 1], "plan": {...}}, ...]
    }

A stage begins at its first operator and ends where the next one begins; its plan has the form of a plan without
pipeline (:mod:`autopar.planfile`), for the operators of the stage. Ranks of the schedule are groups of devices.
``checksum`` tells whether devices, cluster or schedule were edited: stages are then priced anew where they are.
``pins`` is what the user asked for, those about operators and parameters by the names of the whole model: as in a plan
without pipeline, it decides nothing here, and is for solving again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from autopar.errors import MeshError, PlanError, closest
from autopar.graph import Graph
from autopar.pins import parse_kept
from autopar.pipeline import PipelinePins, PipelinePlan, check_places, check_within
from autopar.placements import Mesh, format_mesh, parse_mesh, parse_state
from autopar.plan import Pins, Plan
from autopar.planfile.bind import bind
from autopar.planfile.bind import read as read_file
from autopar.planfile.form import (
    OPTIMIZERS,
    Document,
    Failures,
    _check_pins,
    cluster_named,
)
from autopar.planfile.form import parse as parse_stage
from autopar.planfile.write import _pins as stage_pins
from autopar.planfile.write import digest, rest
from autopar.planfile.write import dumps as dumps_stage
from autopar.planner.inter_op.timing import timing_of
from autopar.staging import StageGraph, crossings_of, cut
from cost_models.pipeline import Schedule, live_at_peak, parse, simulate, times
from hardware_profiles import Cluster
from hardware_profiles.strict import Unreadable, parse_json

VERSION = 1
TYPES: dict[str, type] = {
    "model": dict, "fingerprint": str, "cluster": str, "optimizer": str, "seconds": float, "pins": dict,
    "schedule": list, "stages": list, "notes": list, "checksum": str,
}  # fmt: skip
OPTIONAL = ("model", "notes", "pins", "seconds", "checksum")
KEYS = ("autopar_pipeline", *TYPES)


def dumps(plan: PipelinePlan, graph: Graph, model: Mapping[str, Any] | None = None) -> str:
    """The text of a pipelined plan; the same plan gives the same bytes."""
    stages = []
    for choice, stage in zip(plan.stages, cut(graph, plan.starts), strict=True):
        own = json.loads(dumps_stage(choice, stage.graph))
        stages.append({"first": choice.first, "devices": list(choice.devices), "plan": own})
    document = {
        "autopar_pipeline": VERSION, "model": dict(model) if model else None, "fingerprint": plan.fingerprint,
        "cluster": plan.cluster, "optimizer": plan.optimizer, "seconds": plan.seconds,
        **({"pins": pinned} if (pinned := _pins(plan.pins)) else {}),
        "schedule": plan.schedule.text().splitlines(), "stages": stages, "notes": list(plan.notes),
        "checksum": places(plan),
    }  # fmt: skip
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def places(plan: PipelinePlan) -> str:
    """Checksum of what decides the price of stages and step beside the stages' own plans, and of the step's price."""
    return digest(
        plan.cluster, [(s.first, s.devices) for s in plan.stages], plan.schedule.text(), float(plan.seconds)
    )  # fmt: skip


def _pins(pins: PipelinePins) -> dict[str, Any]:
    document: dict[str, Any] = {
        "stages": pins.stages, "cuts": list(pins.cuts), "schedules": list(pins.schedules),
        "microbatches": pins.microbatches, "mesh": format_mesh(pins.mesh) if pins.mesh else None,
        **stage_pins(pins.plan),
    }  # fmt: skip
    return {key: value for key, value in document.items() if value}


def _bad_pins(raw: Any) -> list[str]:
    """What is wrong with the form of the pins."""
    bad = Failures("pins")
    own = ("stages", "microbatches", "cuts", "schedules", "mesh")
    known = (*own, *(f.name for f in fields(Pins)))
    if bad.type("pins", raw, dict):
        for key in raw.keys() & {"stages", "microbatches"}:
            bad.count(f"pins.{key}", raw[key])
        for key in raw.keys() & {"cuts", "schedules"}:
            for k, item in enumerate(raw[key]) if bad.type(f"pins.{key}", raw[key], list) else ():
                bad.type(f"pins.{key}[{k}]", item, str)
        if "mesh" in raw and bad.type("pins.mesh", raw["mesh"], str):
            try:
                parse_mesh(raw["mesh"])
            except MeshError as error:
                bad.add("pins.mesh", str(error))
        for key in raw.keys() - {*known}:
            bad.add(f"pins.{key}", f"unknown key; {closest(key, known)}")
        _check_pins({key: value for key, value in raw.items() if key in known and key not in own}, bad)
    return bad.lines


def _asked(raw: Mapping[str, Any], mesh: Mesh, where: str) -> PipelinePins:
    """The pins of a file, for groups of a mesh where the file pins none."""
    own = parse_mesh(raw["mesh"]) if "mesh" in raw else None
    mesh = own or mesh
    params, inputs, outputs = (raw.get(key, {}) for key in ("params", "inputs", "outputs"))
    plan = Pins(
        {pattern: dict(axes) for pattern, axes in raw.get("ops", {}).items()},
        {k: parse_kept(how, mesh, f"{where}: pins.params[{json.dumps(k)}]") for k, how in params.items()},
        {k: parse_state(v, mesh, f"{where}: pins.inputs[{json.dumps(k)}]") for k, v in inputs.items()},
        {int(k): parse_state(v, mesh, f"{where}: pins.outputs[{json.dumps(k)}]") for k, v in outputs.items()},
        raw.get("memory_limit_bytes"), tuple(raw.get("recompute", ())),
    )  # fmt: skip
    cuts, schedules = (tuple(raw.get(key, ())) for key in ("cuts", "schedules"))
    return PipelinePins(raw.get("stages"), cuts, schedules, raw.get("microbatches"), own, plan)


def is_pipeline(text: str) -> bool:
    """Whether a plan file is that of a pipeline."""
    return '"autopar_pipeline"' in text[:200]


def read(text: str, where: str = "plan") -> dict[str, Any]:
    """The file's content, its form checked.

    Raises:
        PlanError: no JSON, another version, unknown or missing keys, wrong types.
    """
    twice: list[str] = []
    try:
        raw = parse_json(text, twice)
    except Unreadable as error:
        raise PlanError(f"{where}: {error}") from None
    if not isinstance(raw, dict):
        raise PlanError(f"{where}: no plan file; make one with 'autopar plan --stages'")
    if raw.get("autopar_pipeline") != VERSION:
        raise PlanError(
            f"{where}: 'autopar_pipeline' is {raw.get('autopar_pipeline')!r}, this version reads {VERSION}; plan "
            "again, or use the autopar that wrote it"
        )
    bad = Failures(where)
    for key in twice:
        bad.add(key, "stands twice in one table; remove one of them")
    for key in raw:
        if key not in KEYS:
            bad.add(key, f"unknown key '{key}'; {closest(key, KEYS)}")
    for key, kind in TYPES.items():
        if key not in raw and key not in OPTIONAL:
            bad.add(key, "is missing; add it, or plan again")
        elif raw.get(key) is not None:
            bad.type(key, raw[key], kind)
    if isinstance(raw.get("optimizer"), str) and raw["optimizer"] not in OPTIMIZERS:
        bad.add("optimizer", f"unknown optimizer '{raw['optimizer']}'; {closest(raw['optimizer'], OPTIMIZERS)}")
    for key in ("schedule", "notes"):
        for k, item in enumerate(raw[key]) if isinstance(raw.get(key), list) else ():
            bad.type(f"{key}[{k}]", item, str)
    for key, value in raw["model"].items() if isinstance(raw.get("model"), dict) else ():
        known = {"spec": str, "batch": int, "seq": int, "parts": int}
        if key not in known:
            bad.add(f"model.{key}", f"unknown key; {closest(key, tuple(known))}")
        elif bad.type(f"model.{key}", value, known[key]) and key == "parts":
            bad.count("model.parts", value)
    for i, stage in enumerate(raw["stages"] if isinstance(raw.get("stages"), list) else ()):
        if bad.type(f"stages[{i}]", stage, dict):
            _check_stage(f"stages[{i}]", stage, bad)
    bad.lines += _bad_pins(raw.get("pins", {}))
    bad.raise_if_any()
    return dict(raw)


def _check_stage(at: str, stage: Mapping[str, Any], bad: Failures) -> None:
    known = {"first": str, "devices": list, "plan": dict}
    for key in stage:
        if key not in known:
            bad.add(f"{at}.{key}", f"unknown key; {closest(key, known)}")
    for key, kind in known.items():
        if key not in stage:
            bad.add(f"{at}.{key}", "is missing; a stage has first, devices and plan")
        elif bad.type(f"{at}.{key}", stage[key], kind) and key == "devices":
            for k, device in enumerate(stage[key]):
                if bad.type(f"{at}.devices[{k}]", device, int) and device < 0:
                    bad.add(f"{at}.devices[{k}]", f"got {device}; ranks count from 0")


def loads(
    text: str, graph: Graph, cluster: Cluster | None = None, *, where: str = "plan", folder: Path | None = None
) -> PipelinePlan:  # fmt: skip
    """The pipelined plan in ``text``, for the model with this graph (of one microbatch).

    A stage that was edited by hand is priced anew on its own devices, all stages where devices or the cluster were
    edited; then the step is simulated anew.

    Args:
        cluster: prices what has to be priced anew; by default the cluster that the file names, and only when needed.
        folder: where the file lies; a cluster's file is looked up there first.

    Raises:
        PlanError: whatever does not fit, with its place in the file and what to do.
        ClusterError, MeshError: the cluster is needed, and there is none of that name, or it lacks a device.
    """
    raw = read(text, where)
    if raw["fingerprint"] != graph.fingerprint:
        raise PlanError(
            f"{where}: the plan is for a model with fingerprint {raw['fingerprint']}, this one has {graph.fingerprint} "
            "(operators, shapes or names differ); plan this model again"
        )
    schedule = _schedule(raw, where)
    devices = [tuple(stage["devices"]) for stage in raw["stages"]]

    @cache
    def hardware() -> Cluster:
        found = cluster or cluster_named(raw["cluster"], folder or Path())
        check_within(devices, found.n_devices, f"devices are in cluster '{raw['cluster']}'")
        return found

    try:
        graphs = cut(graph, [s["first"] for s in raw["stages"][1:]])
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    documents = [_document(raw, stage, schedule.n_microbatches, where) for stage in graphs]
    try:
        check_places(schedule, [d.mesh for d in documents], devices)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    plans = [bind(d, g.graph, hardware, devices=own) for d, g, own in zip(documents, graphs, devices, strict=True)]
    seconds = float(raw.get("seconds") or 0.0)
    live = live_at_peak(schedule, [own.kept_bytes for own in plans])
    choices = tuple(own.with_in_flight(live[k]) for k, own in enumerate(plans))
    plan = PipelinePlan(
        raw["fingerprint"], raw["cluster"], choices, schedule, crossings_of(graphs), raw["optimizer"], seconds,
        tuple(raw.get("notes") or ()), _asked(raw.get("pins", {}), choices[0].mesh, where),
    )  # fmt: skip
    moved = raw.get("checksum") != places(plan)
    if moved:
        for k, (document, stage) in enumerate(zip(documents, graphs, strict=True)):
            again = bind(document, stage.graph, hardware, devices=devices[k], anew=True)
            if again.price != plans[k].price:
                plans[k] = again
    live = live_at_peak(schedule, [own.kept_bytes for own in plans])
    if moved or any(_priced_anew(d, own) for d, own in zip(documents, plans, strict=True)):
        choices = tuple(own.with_in_flight(n) for own, n in zip(plans, live, strict=True))
        timing, step = timing_of(graphs, choices, schedule, hardware())
        plan = replace(plan, stages=choices, seconds=simulate(schedule, timing).makespan_seconds + step)
    return plan


def _priced_anew(document: Document, plan: Plan) -> bool:
    """Whether a stage costs something else than its file says."""
    return (document.raw.get("checksum") or {}).get("rest") != rest(plan)


def _schedule(raw: Mapping[str, Any], where: str) -> Schedule:
    """The schedule of a file, which comes to an end and has as many stages as the file."""
    try:
        schedule = parse("\n".join(raw["schedule"]))
        simulate(schedule, times(schedule.n_stages))
    except ValueError as error:
        raise PlanError(f"{where}: schedule: {error}") from None
    if schedule.n_stages != len(raw["stages"]):
        raise PlanError(
            f"{where}: the schedule has {schedule.n_stages} stages, the plan {len(raw['stages'])}; they must agree, so "
            "plan again with --stages and --schedule"
        )
    return schedule


def _document(raw: Mapping[str, Any], stage: StageGraph, microbatches: int, where: str) -> Document:
    """The part of a file that is a stage's plan, for the operators between its cut and the next."""
    entry, where = raw["stages"][stage.number], f"{where}, stages[{stage.number}]"
    first = next(n.name for n in stage.graph.nodes if n.kind == "op" and n.hot)
    if entry["first"] != first:
        raise PlanError(f"{where}: 'first' is '{entry['first']}', the model begins at '{first}'; write that")
    made_for = entry["plan"].get("fingerprint")
    if made_for not in (None, stage.graph.fingerprint):
        raise PlanError(
            f"{where}: the stage has fingerprint {stage.graph.fingerprint}, its plan is for {made_for}; a cut is moved "
            "by planning again: autopar plan --cut"
        )
    found = parse_stage(json.dumps({**entry["plan"], "cluster": raw["cluster"]}), f"{where}.plan")
    for name, default, all_ in (("optimizer", "adamw", raw["optimizer"]), ("microbatches", 1, microbatches)):
        if (mine := found.raw.get(name, default)) != all_:
            raise PlanError(f"{where}.plan: {name} is {mine}, that of the whole plan {all_}; write the same in both")
    return found


def load(path: str | Path, graph: Graph, cluster: Cluster | None = None) -> PipelinePlan:
    """The plan in a file; see :func:`loads`."""
    return loads(read_file(path), graph, cluster, where=str(path), folder=Path(path).parent)


__all__ = ["dumps", "is_pipeline", "load", "loads", "read"]
