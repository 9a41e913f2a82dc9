"""Measurements on a cluster, in addition to its data sheets: a profile file is a cluster with these tables.

`autopar profile` writes such a file; wherever a cluster's name can stand, its path can:

    {"autopar_profile": 1, "cluster": "local-x2",
     "provenance": {"date": "2026-01-31", "torch": "2.13.0", "processor": "...", "threads": 1, "processes": 2, ...},
     "ops": {"aten.relu.default(float32[4 8]*)": {"kind": "pointwise", "forward_seconds": 4e-06, ...}, ...},
     "corrections": {"matmul": {"forward": [2e-06, 1.1], "backward": [3e-06, 1.2]}, "other": ...},
     "transfers": {"send_recv": [[1024, 0.0002], [1048576, 0.0011]], ...},
     "overheads": {"forward_seconds": 0.0001, ...},
     "accumulate": [[1024, 2e-06], ...], "accumulate_new": [[1024, 3e-06], ...],
     "optimizers": {"adamw": {"tensor_seconds": 0.0002, "byte_seconds": 1e-09}}}

All times are seconds, all sizes bytes. :mod:`.profile_file` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

VERSION = 1
KEY = "autopar_profile"
KINDS = ("matmul", "conv", "attention", "pointwise", "reduce", "copy", "none")
OPTIMIZERS = ("adam", "adamw", "sgd", "sgd_momentum")
OTHER = "other"
"""Name of the correction of kinds without measurements."""
NOT_IN_KEYS = ("seed", "site", "cut", "device")
"""Arguments of a local call that change nothing about its time."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MeasuredOp:
    """One local op on one device: its forward, its whole backward, and the backward in two halves.

    Attributes:
        kind: the kind in the cost model, one of KINDS.
        input_seconds, weight_seconds: gradients of what earlier ops made, and of parameters, each alone.
    """

    kind: str
    forward_seconds: float
    backward_seconds: float
    input_seconds: float
    weight_seconds: float


@dataclass(frozen=True)
class Correction:
    """A line from computed to measured seconds of a kind of op: ``seconds + factor * computed`` per direction."""

    forward: tuple[float, float]
    backward: tuple[float, float]


@dataclass(frozen=True)
class Overheads:
    """Seconds of a pipeline's executor in addition to the ops, each action of a microbatch once.

    Attributes:
        forward_seconds, backward_seconds: seconds of an action F or B.
        input_seconds, weight_seconds: seconds of an action I or W.
        input_op_seconds, weight_op_seconds: more for every op of the stage, where a backward is split.
        step_seconds: seconds of a step as a whole.
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
    """Seconds of one optimizer step: per parameter tensor, and per byte of parameters."""

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

    ops: Mapping[str, MeasuredOp]
    corrections: Mapping[str, Correction]
    transfers: Mapping[str, Points]
    accumulate: Points
    accumulate_new: Points
    overheads: Overheads
    optimizers: Mapping[str, OptimizerSeconds]
    provenance: Mapping[str, object]


def op_key(
    target: str, args: Iterable[object], kwargs: Mapping[str, object], tensor: Callable[[object], str | None]
) -> str:
    """Return the key of an op's measurements: its name, its tensors and its other arguments.

    ``tensor`` returns the text of a value that is (or represents) a tensor, None for anything else. A tensor's text is
    ``float32[4 8]``, with a star where a gradient flows to it.
    """

    def show(value: object) -> str:
        text = tensor(value)
        if text is not None:
            return text
        if isinstance(value, (tuple, list)):
            return "[" + " ".join(map(show, value)) + "]"
        return str(value)

    named = [f"{k}={show(kwargs[k])}" for k in sorted(kwargs) if k not in NOT_IN_KEYS]
    return f"{target}({', '.join([*map(show, args), *named])})"


def tensor_text(dtype: str, shape: Iterable[int], grad: bool) -> str:
    """Return a tensor's text in an :func:`op_key`."""
    return f"{dtype}[{' '.join(map(str, shape))}]" + ("*" if grad else "")
