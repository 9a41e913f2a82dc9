"""Answers of ``inspect``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autopar.cli.schemas.registry import Key, answer


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """The parameters of a model."""

    count: Annotated[int, "parameters"]
    elements: Annotated[int, "elements of all"]
    bytes: Annotated[int, "bytes of all"]
    without_gradient: Annotated[list[str], Key("without gradient"), "those that are not trained"]
    tied: Annotated[dict[str, str], "name by the name that it is tied to"]
    largest: Annotated[list[list[str]], "the five largest, each as a name and a format with a shape"]


@dataclass(frozen=True, kw_only=True)
class RepeatedBlock:
    """A block of operators that repeats."""

    ops: Annotated[int, "operators of one copy"]
    repeats: Annotated[int, "copies"]
    first: Annotated[str, "module of the first operator"]
    last: Annotated[str, "module of the last operator"]


@dataclass(frozen=True, kw_only=True)
class SharesOfWork:
    """Shares of floating-point operations, 0 to 1, by the origin of the rules."""

    written: float
    discovered: float
    none: float


@dataclass(frozen=True, kw_only=True)
class RulelessOp:
    """An operator without a rule, which every rank computes whole."""

    count: Annotated[int, "how often it occurs"]
    first: Annotated[str, "file and line of the first"]
    why: Annotated[str, "why no rule was found"]


@dataclass(frozen=True, kw_only=True)
class RuledOp:
    """An operator with rules."""

    count: Annotated[int, "how often it occurs"]
    rules: Annotated[list[str], "its rules"]
    discovered: Annotated[bool, "they were found by trial, and proved"]


@dataclass(frozen=True, kw_only=True)
class LooseOp:
    """An operator whose kernels on GPUs add in no fixed order."""

    count: Annotated[int, "how often it occurs"]
    first: Annotated[str, "file and line of the first"]
    when: Annotated[str, "in the forward or the backward"]
    why: str


@dataclass(frozen=True, kw_only=True)
class ComparedBatch:
    """The captured graph beside the model in eager mode, as relative differences."""

    batch: Annotated[str, "which batch"]
    loss: Annotated[float | None, "difference of the loss; null: not finite on one side"]
    gradients: Annotated[float | None, "largest difference of gradients"]
    worst_in: Annotated[str, Key("worst in"), "the parameter with that difference"]
    buffers: Annotated[float | None, "largest difference of buffers"]
    not_compared: Annotated[str, Key("not compared"), "why nothing was compared; else empty"]


@answer("inspect", "autopar inspect")
@dataclass(frozen=True, kw_only=True)
class InspectAnswer:
    """The captured graph of a model, in numbers."""

    model: Annotated[str, "its class"]
    fingerprint: Annotated[str, "of its graph"]
    inputs: Annotated[dict[str, str], "format and shape by input"]
    loss: Annotated[str | None, "the output that is the loss"]
    parameters: ModelParameters
    buffers: Annotated[dict[str, str], "format and shape by buffer"]
    updated_buffers: Annotated[list[str], Key("updated buffers"), "those that a step changes"]
    written_first: Annotated[list[str], Key("parameters written first"), "those that a call begins by writing"]
    branches: Annotated[list[list[str | bool | None]], Key("branches followed"), "branches on data: module, line, "
                        "answer"]  # fmt: skip
    ops: Annotated[int, "operators"]
    cold_ops: Annotated[int, Key("ops that depend on no parameter"), "those among them"]
    blocks: Annotated[list[RepeatedBlock], "blocks that repeat"]
    shares: Annotated[SharesOfWork, Key("share of FLOPs")]
    without_rule: Annotated[dict[str, RulelessOp], Key("without rule"), "by operator"]
    rules: Annotated[dict[str, RuledOp], "by operator"]
    loose: Annotated[dict[str, LooseOp], Key("no fixed order on GPUs"), "by operator"]
    compared: Annotated[list[ComparedBatch] | None, Key("compared with eager mode"), "only with --verify"] = None
    graph: Annotated[list[str] | None, "lines of the graph; only with --graph"] = None


@dataclass(frozen=True, kw_only=True)
class PassEntry:
    """A pass of capture."""

    name: Annotated[str, Key("pass")]
    phase: Annotated[str, "on what it works"]
    changed: Annotated[bool, "it changed the program"]
    before: Annotated[int, Key("nodes before"), "nodes that it got"]
    after: Annotated[int, Key("nodes after"), "nodes that it left"]
    seconds: Annotated[float, "time of the pass"]
    needs: Annotated[list[str], "passes before it that it needs"]
    required: Annotated[bool, "capture cannot do without it"]
    reason: Annotated[str, "what it is for"]


@answer("passes", "autopar inspect --passes or --dump-after")
@dataclass(frozen=True, kw_only=True)
class PassesAnswer:
    """The passes by which a model became a graph, in order."""

    passes: list[PassEntry]
    program: Annotated[list[str] | None, "lines of the program behind the pass of --dump-after; else null"]
