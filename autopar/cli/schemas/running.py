"""Answers of ``run``, ``verify`` and ``profile``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from autopar.cli.schemas.registry import answer


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """Predictions and measurements of the first rank of a group of devices."""

    predicted_kinds: Annotated[dict[str, float], "seconds by kind of operator"]
    measured_kinds: Annotated[dict[str, float], "the same, measured"]
    longest: Annotated[list[list[str | float]], "the twenty longest operators: name, seconds, number"]
    predicted_bytes: Annotated[int, "peak of memory"]
    measured_bytes: Annotated[int, "the same, measured"]


@answer("run", "autopar run")
@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """Training under a plan: losses, and predictions beside measurements."""

    losses: Annotated[list[float | None], "of every step; null: not finite"]
    seconds: Annotated[list[float], "of every step"]
    measured_seconds: Annotated[float, "median of the steps without the first"]
    predicted_seconds: Annotated[float, "of a step, on the cluster of the plan"]
    cluster: Annotated[str, "the cluster of the plan"]
    ran_on: Annotated[str, "where it ran"]
    notes: Annotated[list[str], "notes of the plan"]
    groups: Annotated[list[MeasuredGroup], "by group of devices; empty under torchrun"] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class VerifiedPlan:
    """The largest relative differences of one plan from one device; null: not finite on one side."""

    name: Annotated[str, "the plan"]
    loss: Annotated[float | None, "of the losses"]
    gradient: Annotated[float | None, "of gradients"]
    gradient_of: Annotated[str, "the parameter with that difference"]
    weight: Annotated[float | None, "of weights after two steps"]
    weight_of: Annotated[str, "the parameter with that difference"]
    rounding: Annotated[float | None, "of one device from itself, where last digits change"]
    limit: Annotated[float, "what rounding of the precision explains"]
    worst: Annotated[float | None, "the largest"]
    ok: Annotated[bool, "rounding explains it"]


@answer("verify", "autopar verify")
@dataclass(frozen=True, kw_only=True)
class VerifyAnswer:
    """Plans beside one device: exit code 0 if all are the same, else 1."""

    ok: Annotated[bool, "rounding explains every difference"]
    plans: Annotated[list[VerifiedPlan], "one device beside eager mode, then the plans"]


@dataclass(frozen=True, kw_only=True)
class ProfiledKind:
    """Measured operators of a kind, forward and backward."""

    ops: Annotated[int, "operators"]
    forward_seconds: Annotated[float, "all of them"]
    backward_seconds: Annotated[float, "all of them"]
    forward: Annotated[list[float], "a + b x formula, for other sizes: a in seconds, b"]
    backward: Annotated[list[float], "the same for the backward"]


@answer("profile", "autopar profile")
@dataclass(frozen=True, kw_only=True)
class ProfileAnswer:
    """The measurements of this machine."""

    profile: Annotated[str, "path of the written file"]
    ops: Annotated[int, "measured operators"]
    kinds: Annotated[dict[str, ProfiledKind], "by kind of operator"]
    provenance: Annotated[dict[str, Any], "date, torch, processor and circumstances, as in the file"]
