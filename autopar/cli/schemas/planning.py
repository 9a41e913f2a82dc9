"""Answers of ``plan`` and ``fits``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from autopar.cli.schemas.alternatives import AlternativeLayout, RefusedMemory
from autopar.cli.schemas.plans import OnHostEntry
from autopar.cli.schemas.registry import OtherKeys, answer


@dataclass(frozen=True, kw_only=True)
class LikeLayout:
    """A layout of ``--like``: its price, or the error because of which it has none."""

    like: Annotated[str, "the words of the layout"]
    error: Annotated[str | None, "why it cannot be priced; only key besides like then"] = None
    seconds: Annotated[float | None, "seconds of a step"] = None
    fits: Annotated[bool | None, "every device has the memory"] = None
    memory_bytes: Annotated[float | None, "bytes on the fullest device"] = None
    limit_bytes: Annotated[float | None, "bytes that a plan may fill there"] = None
    idle: Annotated[float | None, "idle share of all groups of devices, 0 to 1"] = None
    tokens_per_second: Annotated[float | None, "tokens, or rows without tokens, per second"] = None
    of_peak: Annotated[float | None, "model-flops utilization, 0 to 1"] = None
    runs: Annotated[bool | None, "autopar's own runtime can run it"] = None
    notes: Annotated[list[str], "how the words were followed"] = field(default_factory=list)
    plan: Annotated[dict[str, Any] | None, "the plan file of the layout"] = None


@dataclass(frozen=True, kw_only=True)
class RestrictionCost:
    """The cost of one choice of a trainer."""

    what: Annotated[str, "the choice"]
    seconds: Annotated[float, "seconds of a step"]


@dataclass(frozen=True, kw_only=True)
class TrainerRestriction:
    """The trainer of ``--for``, and what its restrictions cost."""

    target: Annotated[str, "its name"]
    software: Annotated[str, "the software by which it is priced"]
    own_seconds: Annotated[float | None, "seconds of a step of autopar's own best plan; null without --top"]
    restrictions: Annotated[list[RestrictionCost], "what each restriction costs; empty without --top"]
    notes: Annotated[list[str], "how the words of its best layout were followed"] = field(default_factory=list)


@answer("plan", "autopar plan --top, --like or --for", "autopar show, where the model is not loaded")
@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """A plan file, with other layouts beside it.

    ``autopar plan --json`` without ``--top``, ``--like`` and ``--for`` prints the plan file itself, byte for byte as
    ``-o`` writes it: it has its own version, ``autopar_plan``, and no key ``schema``.
    """

    plan_file: Annotated[dict[str, Any], OtherKeys("guides/edit-a-plan.md"), "all keys of the plan file"]
    layouts: Annotated[list[LikeLayout], "the layouts of --like, in the order given"] = field(default_factory=list)
    alternatives: Annotated[list[AlternativeLayout], "layouts of --top, of --like and of --for, ranked"] = field(
        default_factory=list
    )
    trainer: Annotated[TrainerRestriction | None, "only with --for"] = None
    warning: Annotated[str | None, "why the file is shown as it is: the model was not loaded"] = None


@dataclass(frozen=True, kw_only=True)
class PublishedErrors:
    """Errors of predictions against published runs, as fractions of the measured value."""

    software: Annotated[str, "the trainer of the runs"]
    device: Annotated[str, "the device of the runs, or any"]
    rows: Annotated[int, "runs with compared seconds"]
    seconds_median: Annotated[float | None, "median error of seconds"]
    seconds_90: Annotated[float | None, "nine of ten errors of seconds are smaller"]
    memory_rows: Annotated[int, "runs with compared memory"]
    memory_median: Annotated[float | None, "median error of memory"]
    memory_90: Annotated[float | None, "nine of ten errors of memory are smaller"]


@dataclass(frozen=True, kw_only=True)
class FittingLayout:
    """A layout near the one that was asked about, which fits."""

    like: Annotated[str, "its words"]
    memory_bytes: Annotated[float, "bytes on the fullest device"]
    seconds: Annotated[float, "seconds of a step"]


@answer("fits", "autopar fits")
@dataclass(frozen=True, kw_only=True)
class FitsAnswer:
    """The verdict on a layout's memory: exit code 0 if it fits, 1 if not; and similar layouts that fit."""

    like: Annotated[str, "the words of the layout"]
    fits: Annotated[bool, "every device has the memory"]
    runs: Annotated[bool, "autopar's own runtime can run it"]
    memory_bytes: Annotated[float, "bytes on the fullest device"]
    limit_bytes: Annotated[float, "bytes that a plan may fill there"]
    over_bytes: Annotated[float, "memory_bytes less limit_bytes: negative if it fits"]
    seconds: Annotated[float, "seconds of a step"]
    error_band: Annotated[PublishedErrors | None, "how far such predictions were off; null if no run is known"]
    notes: Annotated[list[str], "how the words were followed"]
    refused: Annotated[RefusedMemory | None, "null if it fits"]
    would_do: Annotated[list[FittingLayout], "the alternatives that fit, those with the fewest changes first"]
    alternatives: Annotated[list[AlternativeLayout], "all layouts near it that were tried, ranked; empty if it fits"]
    on_host: Annotated[list[OnHostEntry], "what is in the memory of the host"] = field(default_factory=list)
