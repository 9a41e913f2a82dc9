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
``pins`` is what the user asked for, those about operators and parameters by the names of the whole model: as in a plan
without pipeline, it decides nothing here, and is for solving again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, MeshError, PlanError
from autopar.graph import Graph
from autopar.pins import parse_kept
from autopar.pipeline import PipelinePins, PipelinePlan, StageChoice
from autopar.placements import Mesh, parse_state
from autopar.plan import Pins
from autopar.planfile.bind import loads as loads_stage
from autopar.planfile.form import Failures, _check_pins, closest, format_mesh, parse_mesh
from autopar.planfile.write import _pins as stage_pins
from autopar.planfile.write import dumps as dumps_stage
from autopar.staging import cut
from cost_models.pipeline import live_per_stage, parse
from hardware_profiles import Cluster

VERSION = 1
KEYS = ("autopar_pipeline", "model", "fingerprint", "cluster", "optimizer", "seconds", "pins", "schedule", "stages",
        "notes")  # fmt: skip


def dumps(plan: PipelinePlan, graph: Graph, model: Mapping[str, Any] | None = None) -> str:
    """The text of a pipelined plan; the same plan gives the same bytes."""
    stages = []
    for choice, stage in zip(plan.stages, cut(graph, plan.starts), strict=True):
        own = json.loads(dumps_stage(choice.plan, stage.graph))
        stages.append({"first": choice.first, "devices": list(choice.devices), "plan": own})
    document = {
        "autopar_pipeline": VERSION, "model": dict(model) if model else None, "fingerprint": plan.fingerprint,
        "cluster": plan.cluster, "optimizer": plan.optimizer, "seconds": plan.seconds,
        **({"pins": pinned} if (pinned := _pins(plan.pins)) else {}),
        "schedule": plan.schedule.text().splitlines(), "stages": stages, "notes": list(plan.notes),
    }  # fmt: skip
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


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
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where}: no JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    bad = [f"unknown key '{k}'; {closest(k, KEYS)}" for k in raw if k not in KEYS]
    bad += [f"'{k}' is missing" for k in KEYS[2:] if k not in raw and k not in ("model", "notes", "pins", "seconds")]
    if raw.get("autopar_pipeline") != VERSION:
        bad.append(f"'autopar_pipeline' is {raw.get('autopar_pipeline')!r}, this version reads {VERSION}")
    kinds = {"fingerprint": str, "cluster": str, "optimizer": str, "schedule": list, "stages": list}
    bad += [
        f"'{k}' is a {type(raw[k]).__name__}, expected a {kind.__name__}"
        for k, kind in kinds.items() if k in raw and not isinstance(raw[k], kind)
    ]  # fmt: skip
    stages = raw.get("stages")
    for i, stage in enumerate(stages if isinstance(stages, list) else []):
        if not isinstance(stage, dict) or set(stage) != {"first", "devices", "plan"}:
            bad.append(f"stages[{i}] must have first, devices and plan")
        elif not isinstance(stage["devices"], list) or not all(type(d) is int and d >= 0 for d in stage["devices"]):
            bad.append(f"stages[{i}].devices must be a list of rank numbers")
    bad += _bad_pins(raw.get("pins", {}))
    if bad:
        raise PlanError(f"{where}:\n  " + "\n  ".join(bad))
    return dict(raw)


def loads(text: str, graph: Graph, cluster: Cluster | None = None, *, where: str = "plan") -> PipelinePlan:
    """The pipelined plan in ``text``, for the model with this graph (of one microbatch).

    Raises:
        PlanError: whatever does not fit, with its place in the file and what to do.
    """
    raw = read(text, where)
    if raw["fingerprint"] != graph.fingerprint:
        raise PlanError(
            f"{where}: the plan is for a model with fingerprint {raw['fingerprint']}, this one has {graph.fingerprint} "
            "(operators, shapes or names differ); plan this model again"
        )
    try:
        schedule = parse("\n".join(map(str, raw["schedule"])))
    except ValueError as error:
        raise PlanError(f"{where}: schedule: {error}") from None
    graphs = cut(graph, [str(s["first"]) for s in raw["stages"][1:]])
    live = live_per_stage(schedule)
    if len(live) != len(graphs):
        raise PlanError(f"{where}: the schedule has {len(live)} stages, the plan {len(graphs)}")
    choices = []
    for i, (entry, stage) in enumerate(zip(raw["stages"], graphs, strict=True)):
        try:
            own = loads_stage(json.dumps(entry["plan"]), stage.graph, cluster, where=f"{where}, stages[{i}].plan")
        except AutoparError as error:
            raise type(error)(str(error)) from None
        choices.append(StageChoice(str(entry["first"]), tuple(entry["devices"]), own.with_in_flight(live[i])))
    return PipelinePlan(
        raw["fingerprint"], raw["cluster"], tuple(choices), schedule, raw["optimizer"],
        float(raw.get("seconds") or 0.0), tuple(raw.get("notes") or ()),
        _asked(raw.get("pins", {}), choices[0].mesh, where),
    ).validate()  # fmt: skip


def load(path: str | Path, graph: Graph, cluster: Cluster | None = None) -> PipelinePlan:
    """The plan in a file; see :func:`loads`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read plan {path}: {error.strerror}") from error
    return loads(text, graph, cluster, where=str(path))


__all__ = ["dumps", "is_pipeline", "load", "loads", "read"]
