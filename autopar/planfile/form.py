"""The form of a plan file: keys, types, meshes; nothing that needs the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from autopar.clusters import FILES, get_cluster
from autopar.errors import MeshError, PlanError, closest
from autopar.placements import Mesh, parse_mesh
from autopar.plan import LIFETIMES, VERSION, Price, Solution
from hardware_profiles import Cluster
from hardware_profiles.strict import Unreadable, parse_json

KEYS = (
    "autopar_plan", "model", "fingerprint", "cluster", "mesh", "optimizer", "microbatches", "pipeline", "pins", "ops",
    "params", "buffers", "inputs", "outputs", "routes", "recompute", "gather_again", "in_flight", "price", "solution",
    "notes", "checksum",
)  # fmt: skip
OPTIONAL = set(KEYS) - {"autopar_plan", "fingerprint", "cluster", "mesh", "optimizer", "microbatches", "ops", "params",
                        "outputs"}  # fmt: skip
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd_momentum")
TYPES = {
    dict: "a table", list: "a list", str: "a string", int: "a whole number", float: "a number", bool: "true or false",
}  # fmt: skip
"""What a reader calls the types of a file."""


@dataclass(frozen=True)
class Document:
    """What a plan file says by itself, without the model: the parsed JSON, with the right keys and types."""

    raw: Mapping[str, Any]
    where: str
    mesh: Mesh
    folder: Path = Path()

    @property
    def model(self) -> Mapping[str, Any] | None:
        """How to load the model, if the file says so."""
        return self.raw.get("model")

    def cluster(self) -> Cluster:
        """The cluster that the file names; a file of one's own is looked up beside the plan, then from here.

        Raises:
            ClusterError: there is none, or it is malformed.
        """
        return cluster_named(str(self.raw["cluster"]), self.folder)


def cluster_named(name: str, folder: Path) -> Cluster:
    """The cluster that a plan file in a folder names; a file of one's own is looked up there, then from here.

    Raises:
        ClusterError: there is none, or it is malformed.
    """
    beside = folder / name
    return get_cluster(beside if name.endswith(FILES) and beside.is_file() else name)


def parse(text: str, where: str = "plan", folder: Path | None = None) -> Document:
    """Check the form of a plan file.

    Args:
        where: for messages.
        folder: where the file lies; relative paths in it start there.

    Raises:
        PlanError: no JSON, another version, unknown or missing keys, wrong types: all failures at once.
    """
    twice: list[str] = []
    try:
        raw = parse_json(text, twice)
    except Unreadable as error:
        raise PlanError(f"{where}: {error}") from error
    if not isinstance(raw, dict) or "autopar_plan" not in raw:
        raise PlanError(f"{where}: no plan file (it has no 'autopar_plan'); make one with 'autopar plan'")
    if raw["autopar_plan"] != VERSION:
        raise PlanError(
            f"{where}: autopar_plan: the file has version {raw['autopar_plan']!r}, this autopar reads version "
            f"{VERSION}; plan again, or use the autopar that wrote it"
        )
    bad = Failures(where)
    for key in twice:
        bad.add(key, "stands twice in one table; remove one of them")
    for key in raw:
        if key not in KEYS:
            bad.add(key, f"unknown key; {closest(key, KEYS)}")
    for key in KEYS:
        if key not in raw and key not in OPTIONAL:
            bad.add(key, "is missing; add it, or plan again")
    mesh: Mesh = ()
    if bad.type("mesh", raw.get("mesh", ""), str) and "mesh" in raw:
        try:
            mesh = parse_mesh(raw["mesh"])
        except MeshError as error:
            bad.add("mesh", str(error))
    for key in ("fingerprint", "cluster"):
        bad.type(key, raw.get(key, ""), str)
    if raw.get("model") is not None and bad.type("model", raw["model"], dict):
        for key, value in raw["model"].items():
            kind = {"spec": str, "batch": int, "seq": int, "parts": int}.get(key)
            if kind is None:
                bad.add(f"model.{key}", f"unknown key; {closest(key, ('spec', 'batch', 'seq', 'parts'))}")
            elif value is not None:
                bad.type(f"model.{key}", value, kind)
    if bad.type("optimizer", raw.get("optimizer", "adamw"), str) and raw.get("optimizer", "adamw") not in OPTIMIZERS:
        bad.add("optimizer", f"unknown optimizer '{raw['optimizer']}'; {closest(raw['optimizer'], OPTIMIZERS)}")
    bad.count("microbatches", raw.get("microbatches", 1))
    bad.count("in_flight", raw.get("in_flight", 1))
    pipeline = raw.get("pipeline", {"stages": 1})
    if bad.type("pipeline", pipeline, dict):
        for key in pipeline:
            if key != "stages":
                bad.add(f"pipeline.{key}", "unknown key; known: stages")
        if bad.count("pipeline.stages", pipeline.get("stages", 1)) and pipeline.get("stages", 1) != 1:
            bad.add("pipeline.stages", f"got {pipeline['stages']}; this version runs 1 stage")
    _check_pins(raw.get("pins", {}), bad)
    _check_sections(raw, bad)
    bad.raise_if_any()
    return Document(raw, where, mesh, folder or Path())


def _check_pins(pins: Any, bad: Failures) -> None:
    known = ("ops", "params", "inputs", "outputs", "memory_limit_bytes", "recompute")
    for key, value in pins.items() if bad.type("pins", pins, dict) else ():
        if key == "memory_limit_bytes":
            bad.count(f"pins.{key}", value)
        elif key == "recompute":
            for k, item in enumerate(value) if bad.type(f"pins.{key}", value, list) else ():
                bad.type(f"pins.{key}[{k}]", item, str)
        elif key not in known:
            bad.add(f"pins.{key}", f"unknown key; {closest(key, known)}")
        elif bad.type(f"pins.{key}", value, dict):
            for name, entry in value.items():
                at = f"pins.{key}[{json.dumps(name)}]"
                if bad.type(at, entry, dict if key == "ops" else str) and key == "ops":
                    for axis, factor in entry.items():
                        bad.type(f"{at}.{axis}", factor, str)
                if key == "outputs" and not name.isdecimal():
                    bad.add(at, f"'{name}' is no output number; outputs count from 0")


def _check_sections(raw: Mapping[str, Any], bad: Failures) -> None:
    for section in ("ops", "params", "buffers", "inputs", "routes"):
        value = raw.get(section, {})
        if not bad.type(section, value, dict):
            continue
        for pattern, entry in value.items():
            at = f"{section}[{json.dumps(pattern)}]"
            if section == "ops" and bad.type(at, entry, dict):
                for axis, factor in entry.items():
                    bad.type(f"{at}.{axis}", factor, str)
            elif section == "params" and bad.type(at, entry, dict):
                known = ("stored", "used", "lifetime")
                for key, item in entry.items():
                    if key not in known:
                        bad.add(f"{at}.{key}", f"unknown key; {closest(key, known)}")
                    else:
                        bad.type(f"{at}.{key}", item, str)
                for key in ("stored", "used"):
                    if key not in entry:
                        bad.add(f"{at}.{key}", "is missing; add a placement such as S0,I")
                if entry.get("lifetime", "step") not in LIFETIMES:
                    bad.add(f"{at}.lifetime", f"got {entry['lifetime']!r}; use {' or '.join(LIFETIMES)}")
            elif section in ("buffers", "inputs"):
                bad.type(at, entry, str)
            elif section == "routes" and bad.type(at, entry, list):
                for k, step in enumerate(entry):
                    if bad.type(f"{at}[{k}]", step, str) and step.count("->") != 1:
                        bad.add(f"{at}[{k}]", f"got '{step}'; write a step like 'P,I -> S0,I'")
    if bad.type("outputs", raw.get("outputs", []), list):
        for k, item in enumerate(raw.get("outputs", [])):
            if item is not None:
                bad.type(f"outputs[{k}]", item, str)
    if bad.type("recompute", raw.get("recompute", []), list):
        for k, item in enumerate(raw.get("recompute", [])):
            at = f"recompute[{k}]"
            if bad.type(at, item, list) and (len(item) != 2 or not all(isinstance(name, str) for name in item)):
                bad.add(at, f"got {json.dumps(item)}; write a segment as its first and its last operator")
    if bad.type("gather_again", raw.get("gather_again", []), list):
        for k, item in enumerate(raw.get("gather_again", [])):
            bad.type(f"gather_again[{k}]", item, str)
    if bad.type("notes", raw.get("notes", []), list):
        for k, item in enumerate(raw.get("notes", [])):
            bad.type(f"notes[{k}]", item, str)
    for section, cls in (("price", Price), ("solution", Solution)):
        value = raw.get(section)
        if value is not None and bad.type(section, value, dict):
            types = {f.name: {"int": int, "float": float, "str": str, "bool": bool}[str(f.type)] for f in fields(cls)}
            for key, item in value.items():
                if key not in types:
                    bad.add(f"{section}.{key}", f"unknown key; {closest(key, types)}")
                else:
                    bad.type(f"{section}.{key}", item, types[key])
            for key in (f.name for f in fields(cls) if f.default is MISSING):
                if key not in value:
                    bad.add(f"{section}.{key}", f"is missing; add it, or remove '{section}'")
    value = raw.get("checksum")
    if value is not None and bad.type("checksum", value, dict):
        for key, item in value.items():
            if key not in ("decisions", "rest"):
                bad.add(f"checksum.{key}", "unknown key; known: decisions, rest")
            bad.type(f"checksum.{key}", item, str)


class Failures:
    """All that is wrong with one file, reported together."""

    def __init__(self, where: str) -> None:
        self.where, self.lines = where, []

    lines: list[str]

    def add(self, path: str, problem: str) -> None:
        """One failure: the JSON path, what is there, what to do."""
        line = f"{path}: {problem}"
        if line not in self.lines:
            self.lines.append(line)

    def type(self, path: str, value: Any, kind: type) -> bool:
        """Whether a value has the type; if not, that is a failure."""
        fine = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fine:
            self.add(path, f"got {json.dumps(value)}; expected {TYPES[kind]}")
        return fine

    def count(self, path: str, value: Any) -> bool:
        """Whether a value is a whole number of at least 1."""
        fine = self.type(path, value, int)
        if fine and value < 1:
            self.add(path, f"got {value}; expected a whole number of 1 or more")
        return fine and value >= 1

    def raise_if_any(self) -> None:
        if self.lines:
            count = "1 problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
            raise PlanError(f"{self.where}: {count} in this plan\n" + "\n".join(f"  - {line}" for line in self.lines))
