"""What was measured on a cluster, beside what its data sheets say: a profile file is a cluster with these tables.

`autopar profile` writes such a file; wherever a cluster's name can stand, its path can:

    {"autopar_profile": 1, "cluster": "local-x2",
     "provenance": {"date": "2026-01-31", "torch": "2.13.0", "processor": "...", "threads": 1, "processes": 2, ...},
     "ops": {"aten.relu.default(float32[4 8]*)": {"kind": "pointwise", "forward_seconds": 4e-06, ...}, ...},
     "corrections": {"matmul": {"forward": [2e-06, 1.1], "backward": [3e-06, 1.2]}, "other": ...},
     "transfers": {"send_recv": [[1024, 0.0002], [1048576, 0.0011]], ...},
     "overheads": {"forward_seconds": 0.0001, ...},
     "accumulate": [[1024, 2e-06], ...], "accumulate_new": [[1024, 3e-06], ...],
     "optimizers": {"adamw": {"tensor_seconds": 0.0002, "byte_seconds": 1e-09}}}

All times are seconds, all sizes bytes. Reading is strict: whatever is unknown, missing, negative or not finite is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .model import COLLECTIVES
from .reader import Table

VERSION = 1
KEY = "autopar_profile"
KINDS = ("matmul", "conv", "attention", "pointwise", "reduce", "copy", "none")
OTHER = "other"
"""The correction of kinds of which nothing was measured."""
PROVENANCE = (
    "date", "torch", "processor", "threads", "processes", "rounds", "load", "others", "model", "meshes", "left_out")
NOT_IN_KEYS = ("seed", "site", "cut", "device")
"""Arguments of a local call that change nothing about its time."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class OpSeconds:
    """One local op on one device: its forward, its whole backward, and the backward in two halves.

    Attributes:
        kind: of the cost model, one of KINDS.
        input_seconds, weight_seconds: gradients of what earlier ops made, and of parameters, each alone.
    """

    kind: str
    forward_seconds: float
    backward_seconds: float
    input_seconds: float
    weight_seconds: float


@dataclass(frozen=True)
class Correction:
    """From computed to measured seconds of a kind of op: ``seconds + factor * computed``, one pair a direction."""

    forward: tuple[float, float]
    backward: tuple[float, float]


@dataclass(frozen=True)
class Overheads:
    """Seconds of a pipeline's executor beside the ops, each action of a microbatch once.

    Attributes:
        forward_seconds, backward_seconds: of an action F or B.
        input_seconds, weight_seconds: of an action I or W.
        input_op_seconds, weight_op_seconds: more for every op of the stage, where a backward is split.
        step_seconds: of a step as a whole.
    """

    forward_seconds: float
    backward_seconds: float
    input_seconds: float
    weight_seconds: float
    input_op_seconds: float
    weight_op_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class OptimizerSeconds:
    """One step of an optimizer: for every parameter tensor, and for every byte of parameters."""

    tensor_seconds: float
    byte_seconds: float


@dataclass(frozen=True, eq=False)
class Measured:
    """The measured tables of a cluster.

    Attributes:
        ops: seconds by :func:`op_key`.
        corrections: by kind of op, for ops that were not measured.
        transfers: ``(bytes, seconds)`` by collective, between two devices; sizes rise.
        accumulate: ``(bytes, seconds)`` of adding one gradient to another; ``accumulate_new``: of making the sum anew.
        optimizers: by the name that plans use.
        provenance: when, where and how.
    """

    ops: Mapping[str, OpSeconds]
    corrections: Mapping[str, Correction]
    transfers: Mapping[str, Points]
    accumulate: Points
    accumulate_new: Points
    overheads: Overheads
    optimizers: Mapping[str, OptimizerSeconds]
    provenance: Mapping[str, Any]


def op_key(target: str, args: Any, kwargs: Mapping[str, Any], tensor: Callable[[Any], str | None]) -> str:
    """What an op is measured and looked up by: its name, its tensors and its other arguments.

    ``tensor`` gives the text of a value that is (or stands for) a tensor, None for anything else. A tensor's text is
    ``float32[4 8]``, with a star where a gradient flows to it.
    """

    def show(value: Any) -> str:
        text = tensor(value)
        if text is not None:
            return text
        if isinstance(value, (tuple, list)):
            return "[" + " ".join(map(show, value)) + "]"
        return str(value)

    named = [f"{k}={show(kwargs[k])}" for k in sorted(kwargs) if k not in NOT_IN_KEYS]
    return f"{target}({', '.join([*map(show, args), *named])})"


def tensor_text(dtype: str, shape: Any, grad: bool) -> str:
    """A tensor in an :func:`op_key`."""
    return f"{dtype}[{' '.join(map(str, shape))}]" + ("*" if grad else "")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_measured(root: Table) -> Measured:
    """The tables of a profile document; `root` is its top level, whose version is checked here."""
    failures = root.failures
    version = root.take(KEY)
    if version != VERSION or isinstance(version, bool):
        failures.add(KEY, f"got {version!r}, this autopar reads version {VERSION}: make the profile again")
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
    own = root.table("overheads")
    overheads = Overheads(*(_seconds(own, name) for name in Overheads.__dataclass_fields__))
    own.close()
    table = root.table("optimizers")
    optimizers = {}
    for name in table.data:
        inner = table.table(name)
        optimizers[name] = OptimizerSeconds(_seconds(inner, "tensor_seconds"), _seconds(inner, "byte_seconds"))
        inner.close()
    said = root.table("provenance")
    provenance = {key: said.take(key, expected="where the numbers come from") for key in PROVENANCE}
    said.close()
    return Measured(ops, corrections, transfers, accumulate, accumulate_new, overheads, optimizers, provenance)


def _op(table: Table) -> OpSeconds:
    kind = table.text("kind")
    if kind not in KINDS:
        table.failures.add(f"{table.path}.kind", f"got '{kind}': known are {', '.join(KINDS)}")
    names = ("forward_seconds", "backward_seconds", "input_seconds", "weight_seconds")
    found = OpSeconds(kind, *(_seconds(table, name) for name in names))
    table.close()
    return found


def _seconds(table: Table, key: str) -> float:
    value = table.number(key)
    if not math.isfinite(value):
        table.failures.add(f"{table.path}.{key}", f"got {value}, expected a finite number of seconds: measure again")
        return 0.0
    return value


def _pair(table: Table, key: str) -> tuple[float, float]:
    value = table.take(key, expected="[seconds, factor]")
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_time, value)):
        table.failures.add(f"{table.path}.{key}", f"got {value!r}, expected [seconds, factor], both finite and >= 0")
        return 0.0, 1.0
    return float(value[0]), float(value[1])


def _points(table: Table, key: str) -> Points:
    """``[[bytes, seconds], ...]``, sizes rising."""
    where = f"{table.path}.{key}" if table.path else key
    value = table.take(key, expected="a list of [bytes, seconds]")
    good = isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value)
    if not good or not all(_is_time(x) for point in value for x in point):
        table.failures.add(where, "expected a list of [bytes, seconds], all finite and >= 0, at least one")
        return ((1.0, 0.0),)
    if any(a[0] >= b[0] for a, b in pairwise(value)):
        table.failures.add(where, "expected sizes that rise from one pair to the next: sort them")
    return tuple((float(a), float(b)) for a, b in value)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def is_measured(document: Mapping[str, Any]) -> bool:
    """Whether a document is a profile and not a plain cluster."""
    return KEY in document


__all__ = [
    "KEY", "KINDS", "OTHER", "VERSION", "Correction", "Measured", "OpSeconds", "OptimizerSeconds", "Overheads",
    "Points", "is_measured", "op_key", "read_measured", "tensor_text",
]  # fmt: skip
