"""The form of a plan file: keys, types, meshes and the schedule; nothing that needs the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import autopar.lower.offloaded  # noqa: F401  (registers its decision about memory)
from autopar.errors import MeshError, PlanError, closest
from autopar.planfile import pins, previous
from autopar.planfile.file_errors import FileErrors, Section
from autopar.plans.clusters import get_cluster, in_file
from autopar.plans.memory_decisions import DECISIONS, SEGMENTS
from autopar.plans.plan import LIFETIMES, VERSION, Solution, one_stage
from autopar.plans.plan_options import OPTIMIZERS
from autopar.plans.prices import Price
from autopar.words.load_shares import Load, parse_load
from autopar.words.meshes import Mesh
from autopar.words.precision import Precision, parse_precision
from cost_models.schedules import Schedule, simulate, times
from cost_models.schedules import parse as parse_schedule
from hardware_profiles import Cluster
from hardware_profiles.strict import Unreadable, is_there, parse_count, parse_json, shortened

KEYS: dict[str, type] = {
    "autopar_plan": int, "model": dict, "fingerprint": str, "cluster": str, "optimizer": str, "seconds": float,
    "pins": dict, "schedule": list, "stages": list, "notes": list, "layouts": list, "checksum": str,
    "schema": str, "alternatives": list, "trainer": dict,
}  # fmt: skip
OPTIONAL = {"model", "seconds", "pins", "notes", "checksum", "layouts", "schema", "alternatives", "trainer"}
"""Optional keys; the last four, of ``autopar plan --json``, are ignored."""
STAGE_KEYS: dict[str, type] = {
    "first": str, "devices": list, "mesh": str, "fingerprint": str, "in_flight": int, "ops": dict, "params": dict,
    "buffers": dict, "inputs": dict, "outputs": list, "routes": dict, "memory": dict,
    "price": dict, "solution": dict, "checksum": dict,
}  # fmt: skip
STAGE_REQUIRED = ("first", "mesh", "ops", "params", "outputs")
SERVING_KIND = "autopar-serving-plan"
"""The value of ``kind`` in a serving plan, which :mod:`autopar.serving.plan_file` reads."""


def is_serving(raw: object) -> bool:
    """Return whether the JSON of a file is that of a serving plan."""
    return isinstance(raw, dict) and raw.get("kind") == SERVING_KIND


@dataclass(frozen=True)
class Document:
    """A parsed plan file with the right keys and types, without the model.

    Attributes:
        schedule: it completes and has as many stages as the file.
        meshes: the meshes of the stages.
        folder: the folder of the file; relative paths in it start there.
    """

    raw: Section
    where: str
    schedule: Schedule
    meshes: tuple[Mesh, ...]
    folder: Path = Path()

    @property
    def model(self) -> Section | None:
        """How to load the model, if the file says so."""
        return self.raw.get("model")

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.schedule.n_microbatches

    @property
    def precision(self) -> Precision | None:
        """The precision policy for the capture."""
        return parse_precision((self.raw.get("pins") or {}).get("precision"))

    @property
    def mode(self) -> str:
        """What the plan runs for: ``inference``, or empty for training."""
        return str((self.raw.get("pins") or {}).get("mode", ""))

    @property
    def expert_load(self) -> dict[str, Load]:
        """The distribution of rows over routed experts, for prices."""
        return parse_load((self.raw.get("pins") or {}).get("expert_load"), f"{self.where}: pins.expert_load")

    @property
    def cluster_name(self) -> str:
        """The cluster's name; its own files are looked up in the folder of the plan first."""
        return _in_folder(str(self.raw["cluster"]), self.folder)

    def cluster(self) -> Cluster:
        """Return the cluster that the file names."""
        return get_cluster(self.cluster_name)


def cluster_named(name: str, folder: Path) -> Cluster:
    """Return the cluster that a plan file in a folder names; see :meth:`Document.cluster`."""
    return get_cluster(_in_folder(name, folder))


def _in_folder(name: str, folder: Path) -> str:
    return in_file(name, lambda path: str(folder / path if is_there(folder / path) else path))


def parse(text: str, where: str = "plan", folder: Path | None = None) -> Document:
    """Check the form of a plan file and return it; one of the previous version is converted.

    ``where`` names the file in messages; all failures are raised at once as a PlanError.
    """
    raw = _raw(text, where)
    bad = FileErrors(where)
    _check_keys(raw, KEYS, [key for key in KEYS if key not in OPTIONAL], bad)
    if isinstance(raw.get("model"), dict):
        _check_model(raw["model"], bad)
    if isinstance(raw.get("optimizer"), str) and raw["optimizer"] not in OPTIMIZERS:
        hint = closest(raw["optimizer"], OPTIMIZERS)
        bad.add("optimizer", f"unknown optimizer '{shortened(raw['optimizer'])}'; {hint}")
    for key in ("schedule", "notes"):
        if isinstance(raw.get(key), list):
            bad.texts(key, raw[key])
    if isinstance(raw.get("pins"), dict):
        pins.check(raw["pins"], bad)
    stages = _list(raw, "stages")
    if "stages" in raw and not stages:
        bad.add("stages", "has no entries; a plan has at least one stage")
    meshes = []
    for number, stage in enumerate(stages):
        if bad.type(f"stages[{number}]", stage, dict):
            stages[number] = stage = previous.with_one_table(stage)
            meshes.append(_check_stage(stage, bad.within(f"stages[{number}]")))
    bad.raise_if_any()
    return Document(raw, where, _schedule(raw["schedule"], len(stages), where), tuple(meshes), folder or Path())


def _raw(text: str, where: str) -> Section:
    """Return the JSON of a plan file of this version, into which one of the previous version is converted."""
    twice: list[str] = []
    try:
        raw = parse_json(text, twice)
    except Unreadable as error:
        raise PlanError(f"{where}: {error}") from error
    if is_serving(raw):
        raise PlanError(
            f"{where}: a serving plan, and a plan for training is wanted here; 'autopar show' prints it and 'autopar "
            "export' writes it for an engine"
        )
    if not isinstance(raw, dict) or not ("autopar_plan" in raw or previous.is_one(raw)):
        raise PlanError(f"{where}: no plan file (it has no 'autopar_plan'); make one with 'autopar plan'")
    bad = FileErrors(where)
    for key in dict.fromkeys(twice):
        bad.add(key, "is repeated in one table; remove one of them")
    bad.raise_if_any()
    if previous.is_one(raw):
        raw = previous.converted(raw, where)
    if raw["autopar_plan"] != VERSION:
        raise PlanError(
            f"{where}: autopar_plan: the file has version {shortened(repr(raw['autopar_plan']))}, this autopar reads "
            f"version {VERSION}; plan again, or use the autopar that wrote it"
        )
    return raw


def _check_model(model: Section, bad: FileErrors) -> None:
    kinds = {"spec": str, "batch": int, "seq": int, "parts": int}
    for key, value in model.items():
        kind = kinds.get(key)
        if kind is None:
            bad.unknown(f"model.{key}", key, kinds)
        elif value is not None and kind is int:
            bad.count(f"model.{key}", value)
        elif value is not None:
            bad.type(f"model.{key}", value, kind)


def _check_keys(
    raw: Mapping[str, object], kinds: Mapping[str, type], required: Collection[str], bad: FileErrors
) -> None:
    for key in raw:
        if key not in kinds:
            bad.unknown(key, key, kinds)
    for key in required:
        if key not in raw:
            bad.add(key, "is missing; add it, or plan again")
    for key, kind in kinds.items():
        if raw.get(key) is not None or (key in required and key in raw):
            bad.type(key, raw[key], kind)


def _schedule(lines: list[str], n_stages: int, where: str) -> Schedule:
    """Return the schedule of a file; the rows of a single stage may be absent."""
    try:
        head = lines[0].split() if len(lines) == 1 else []
        if head[:4] == ["schedule", "none", "stages", "1"] and head[4:5] == ["microbatches"]:
            schedule = one_stage(parse_count(head[5])).validate()
        else:
            schedule = parse_schedule("\n".join(lines))
            simulate(schedule, times(schedule.n_stages))
    except (ValueError, IndexError) as error:
        raise PlanError(f"{where}: schedule: {error}") from None
    if schedule.n_stages != n_stages:
        raise PlanError(
            f"{where}: the schedule has {schedule.n_stages} stages, the plan {n_stages}; they must agree, so "
            "plan again with --stages and --schedule"
        )
    return schedule


def _check_stage(raw: Section, bad: FileErrors) -> Mesh:
    """Check the form of a stage and return its mesh."""
    _check_keys(raw, STAGE_KEYS, STAGE_REQUIRED, bad)
    mesh = Mesh()
    if isinstance(raw.get("mesh"), str):
        try:
            mesh = Mesh.parse(raw["mesh"])
        except MeshError as error:
            bad.add("mesh", str(error))
    for k, device in enumerate(_list(raw, "devices")):
        if bad.type(f"devices[{k}]", device, int) and device < 0:
            bad.add(f"devices[{k}]", f"got {device}; ranks count from 0")
    bad.count("in_flight", raw.get("in_flight", 1))
    _check_placements(raw, bad)
    for name, entries in _table(raw, "memory").items():
        _check_memory(f"memory: {name}", name, entries, bad)
    for section, cls in (("price", Price), ("solution", Solution)):
        if value := _table(raw, section):
            _check_numbers(section, cls, value, bad)
    for key, item in _table(raw, "checksum").items():
        if key not in ("decisions", "rest"):
            bad.add(f"checksum.{key}", "unknown key; known: decisions, rest")
        bad.type(f"checksum.{key}", item, str)
    return mesh


def _check_placements(raw: Section, bad: FileErrors) -> None:
    """Check the form of a stage's ops, parameters, buffers, inputs, reshard paths and outputs."""
    for pattern, entry in _table(raw, "ops").items():
        at = f"ops[{json.dumps(pattern)}]"
        for axis, factor in entry.items() if bad.type(at, entry, dict) else ():
            bad.type(f"{at}.{axis}", factor, str)
    for pattern, entry in _table(raw, "params").items():
        _check_param(f"params[{json.dumps(pattern)}]", entry, bad)
    for section in ("buffers", "inputs"):
        for pattern, entry in _table(raw, section).items():
            bad.type(f"{section}[{json.dumps(pattern)}]", entry, str)
    for pattern, entry in _table(raw, "routes").items():
        at = f"routes[{json.dumps(pattern)}]"
        for k, step in enumerate(entry) if bad.type(at, entry, list) else ():
            if bad.type(f"{at}[{k}]", step, str) and step.count("->") != 1:
                bad.add(f"{at}[{k}]", f"got '{step}'; write a step like 'P,I -> S0,I'")
    for k, item in enumerate(_list(raw, "outputs")):
        if item is not None:
            bad.type(f"outputs[{k}]", item, str)


def _check_memory(at: str, name: str, entries: Any, bad: FileErrors) -> None:
    """Check what one decision about memory is made for."""
    named = [key for key, record in DECISIONS.items() if record.of]
    if name not in named:
        bad.unknown(at, name, named)
    elif not bad.type(at, entries, list):
        return
    elif DECISIONS[name].of != SEGMENTS:
        bad.texts(at, entries)
    else:
        for k, item in enumerate(entries):
            within = f"{at}[{k}]"
            if bad.type(within, item, list) and (len(item) != 2 or not all(isinstance(op, str) for op in item)):
                bad.add(within, f"got {json.dumps(item)}; write a segment as its first and its last operator")


def _table(raw: Section, key: str) -> Section:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _list(raw: Section, key: str) -> list[Any]:
    value = raw.get(key)
    return value if isinstance(value, list) else []


def _check_param(at: str, entry: Any, bad: FileErrors) -> None:
    if not bad.type(at, entry, dict):
        return
    keys = ("stored", "used", "lifetime", "on_host")
    for key, item in entry.items():
        if key not in keys:
            bad.unknown(f"{at}.{key}", key, keys)
        else:
            bad.type(f"{at}.{key}", item, bool if key == "on_host" else str)
    for key in ("stored", "used"):
        if key not in entry:
            bad.add(f"{at}.{key}", "is missing; add a placement such as S0,I")
    if entry.get("lifetime", "step") not in LIFETIMES:
        bad.add(f"{at}.lifetime", f"got {entry['lifetime']!r}; use {' or '.join(LIFETIMES)}")


def _check_numbers(
    section: str, cls: type[Price] | type[Solution], value: Mapping[str, object], bad: FileErrors
) -> None:
    """Check the fields of a dataclass of plain values."""
    types = {f.name: {"int": int, "float": float, "str": str, "bool": bool}[str(f.type)] for f in fields(cls)}
    for key, item in value.items():
        if key not in types:
            bad.unknown(f"{section}.{key}", key, types)
        else:
            bad.type(f"{section}.{key}", item, types[key])
    for key in (f.name for f in fields(cls) if f.default is MISSING):
        if key not in value:
            bad.add(f"{section}.{key}", f"is missing; add it, or remove '{section}'")
