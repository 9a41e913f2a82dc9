"""A strict reader of profile files: everything unknown, missing, negative or not finite is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from .measurements import (
    KEY,
    KINDS,
    OPTIMIZERS,
    OTHER,
    VERSION,
    Correction,
    Measured,
    MeasuredOp,
    OptimizerSeconds,
    Overheads,
    Points,
)
from .model import COLLECTIVES
from .reader import REQUIRED, Table, closest, is_beyond, shown
from .strict import shortened


def read_measured(root: Table) -> Measured:
    """Read the tables of a profile document; `root` is its top level, whose version is checked here."""
    failures = root.failures
    version = root.take(KEY)
    if version != VERSION or isinstance(version, bool):
        failures.add(KEY, f"got {shown(version)}, this autopar reads version {VERSION}: make the profile again")
    ops_table = root.table("ops")
    ops = {key: _op(ops_table.table(key)) for key in ops_table.data}
    kinds = root.table("corrections")
    corrections = {}
    for kind in kinds.data:
        inner = kinds.table(kind)
        if kind not in (*KINDS, OTHER):
            failures.add(inner.path, f"is no kind of op: known are {', '.join((*KINDS, OTHER))}")
        corrections[kind] = Correction(_pair(inner, "forward"), _pair(inner, "backward"))
        inner.close()
    if OTHER not in kinds.data:
        failures.add(f"corrections.{OTHER}", "is missing, add the correction of kinds that were not measured")
    moves = root.table("transfers")
    transfers = {}
    for kind in moves.data:
        if kind not in COLLECTIVES:
            failures.add(f"transfers.{kind}", f"is no collective: known are {', '.join(COLLECTIVES)}")
        transfers[kind] = _points(moves, kind)
    accumulate, accumulate_new = _points(root, "accumulate"), _points(root, "accumulate_new")
    overhead_table = root.table("overheads")
    overheads = Overheads(*(_seconds(overhead_table, name) for name in Overheads.__dataclass_fields__))
    overhead_table.close()
    table = root.table("optimizers")
    optimizers = {}
    for name in table.data:
        inner = table.table(name)
        if name not in OPTIMIZERS:
            failures.add(inner.path, f"is no optimizer of plans: {closest(name, OPTIMIZERS)}")
        optimizers[name] = OptimizerSeconds(_seconds(inner, "tensor_seconds"), _seconds(inner, "byte_seconds"))
        inner.close()
    said = root.table("provenance")
    provenance: dict[str, object] = {key: said.text(key) for key in ("date", "torch", "processor", "model")}
    provenance |= {key: said.integer(key, low=0) for key in ("threads", "processes", "rounds")}
    provenance |= {key: said.number(key) for key in ("load", "others")}
    for key in ("meshes", "left_out", "updated"):
        default = [] if key == "updated" else REQUIRED
        value = said.take(key, default, "a list of strings")
        provenance[key] = value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            failures.add(f"provenance.{key}", f"got {shown(value)}, expected a list of strings")
    said.close()
    return Measured(ops, corrections, transfers, accumulate, accumulate_new, overheads, optimizers, provenance)


def _op(table: Table) -> MeasuredOp:
    kind = table.text("kind")
    if kind not in KINDS:
        table.failures.add(f"{table.path}.kind", f"got '{shortened(kind)}': known are {', '.join(KINDS)}")
    names = ("forward_seconds", "backward_seconds", "input_seconds", "weight_seconds")
    seconds = MeasuredOp(kind, *(_seconds(table, name) for name in names))
    table.close()
    return seconds


def _seconds(table: Table, key: str) -> float:
    value = table.number(key)
    if not math.isfinite(value):
        table.failures.add(f"{table.path}.{key}", f"got {value}, expected a finite number of seconds: measure again")
        return 0.0
    return value


def _pair(table: Table, key: str) -> tuple[float, float]:
    value = table.take(key, expected="[seconds, factor]")
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_time, value)):
        wanted = "expected [seconds, factor], both finite and >= 0"
        table.failures.add(f"{table.path}.{key}", f"got {shown(value)}, {wanted}")
        return 0.0, 1.0
    return float(value[0]), float(value[1])


def _points(table: Table, key: str) -> Points:
    """Read ``[[bytes, seconds], ...]``, sizes rising."""
    where = f"{table.path}.{key}" if table.path else key
    value = table.take(key, expected="a list of [bytes, seconds]")
    good = isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value)
    if not good or not all(_is_time(x) for point in value for x in point):
        table.failures.add(where, "expected a list of [bytes, seconds], all finite and >= 0, at least one")
        return ((1.0, 0.0),)
    if any(a[0] >= b[0] for a, b in pairwise(value)):
        table.failures.add(where, "expected sizes that rise from one pair to the next: sort them")
    return tuple((float(a), float(b)) for a, b in value)


def _is_time(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value >= 0 and not is_beyond(value)


def is_measured(document: Mapping[str, object]) -> bool:
    """Return True if a document is a profile and not a plain cluster."""
    return KEY in document
