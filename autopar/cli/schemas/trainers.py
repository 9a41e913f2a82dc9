"""Answers of ``export``, ``price`` and ``launch``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from autopar.cli.schemas.registry import answer


@dataclass(frozen=True, kw_only=True)
class UnsaidDecision:
    """A decision of the plan that the trainer cannot express."""

    what: Annotated[str, "the decision"]
    plan: Annotated[Any, "in the plan"]
    written: Annotated[Any, "in the files"]


@dataclass(frozen=True, kw_only=True)
class UnsaidCost:
    """The decisions of a plan that a trainer cannot express, and the cost of all of them."""

    decisions: list[UnsaidDecision]
    seconds: Annotated[float, "seconds of a step more than the plan"]
    memory_bytes: Annotated[float, "bytes on the fullest device more than the plan"]


@answer("export", "autopar export")
@dataclass(frozen=True, kw_only=True)
class ExportAnswer:
    """A plan that was written for a trainer; autopar.json in its folder is the same without folder and files."""

    plan: Annotated[str, "name of the plan file"]
    target: Annotated[str, "the trainer"]
    layout: Annotated[str, "words of the layout that was written"]
    cluster: Annotated[str, "the cluster"]
    batch: Annotated[int, "rows of a step over all ranks"]
    sequence: Annotated[int | None, "sequence length"]
    precision: Annotated[str | None, "precision policy"]
    optimizer: Annotated[str, "optimizer"]
    seconds: Annotated[float, "seconds of a step by the trainer's software"]
    memory_bytes: Annotated[float, "bytes on the fullest device"]
    limit_bytes: Annotated[float, "bytes that a plan may fill there"]
    fill_in: Annotated[list[str], "what you fill in: data and paths"]
    notes: Annotated[list[str], "how the words were followed"]
    not_said: Annotated[UnsaidCost | None, "null if the trainer says all of the plan"]
    folder: Annotated[str, "the folder that was written"]
    files: Annotated[list[str], "its files"]


@answer("export-serving", "autopar export")
@dataclass(frozen=True, kw_only=True)
class ExportServingAnswer:
    """A serving plan that was written for an engine; autopar.json in its folder is the plan itself."""

    plan: Annotated[str, "name of the plan file"]
    engine: Annotated[str, "the engine"]
    cluster: Annotated[str, "the cluster"]
    devices: Annotated[int, "devices that are used"]
    first_token_seconds: Annotated[float, "predicted mean time to the first token"]
    token_seconds: Annotated[float, "predicted mean time per output token after the first"]
    memory_bytes: Annotated[float, "bytes on the fullest device"]
    start: Annotated[list[str], "the commands that start it"]
    fill_in: Annotated[list[str], "what you fill in: the checkpoint, addresses"]
    notes: Annotated[list[str], "what the engine decides by rules of its own, and what to know"]
    folder: Annotated[str, "the folder that was written"]
    files: Annotated[list[str], "its files"]


@dataclass(frozen=True, kw_only=True)
class HelpfulChange:
    """A change of a config that helps."""

    change: Annotated[str, "the change in words"]
    layout: Annotated[str, "words of the layout with it"]
    saved_seconds: Annotated[float, "seconds of a step that it saves; negative if it only makes it fit"]
    seconds: Annotated[float, "seconds of a step with it"]
    memory_bytes: Annotated[float, "bytes on the fullest device with it"]
    fits: Annotated[bool, "it fits with it"]


@answer("price", "autopar price")
@dataclass(frozen=True, kw_only=True)
class PriceAnswer:
    """The price of a trainer's config: exit code 0 if it fits, else 1."""

    config: Annotated[str, "path of the file"]
    target: Annotated[str, "the trainer"]
    software: Annotated[str, "the software by which it is priced"]
    layout: Annotated[str, "words of the layout"]
    cluster: Annotated[str, "the cluster"]
    seconds: Annotated[float, "seconds of a step"]
    fits: Annotated[bool, "every device has the memory"]
    memory_bytes: Annotated[float, "bytes on the fullest device"]
    limit_bytes: Annotated[float, "bytes that a plan may fill there"]
    over_bytes: Annotated[float, "memory_bytes less limit_bytes: negative if it fits"]
    memory: Annotated[dict[str, int], "bytes by category on the fullest device"]
    time: Annotated[dict[str, float], "seconds by what they go to, on the devices that work longest"]
    changes: Annotated[list[HelpfulChange], "the changes that help most, the best first"]
    unpriced: Annotated[list[str], "what the price leaves out"]
    ignored: Annotated[list[str], "fields that do not matter to a price"]
    notes: Annotated[list[str], "how the words were followed"]


@dataclass(frozen=True, kw_only=True)
class MachinesEntry:
    """Machines that are alike and follow each other in the order of ranks."""

    count: Annotated[int, "number of machines"]
    ranks: Annotated[int, "ranks on each"]
    device: Annotated[str, "name of the device"]
    size: Annotated[int, "devices of each machine"]
    visible: Annotated[list[int], "devices of a machine that the job uses, by local rank; empty: the first ones"]


@answer("launch", "autopar launch")
@dataclass(frozen=True, kw_only=True)
class LaunchAnswer:
    """The commands that start a plan on its cluster."""

    nodes: Annotated[int, "machines"]
    ranks: Annotated[int, "processes, one for each device"]
    machines: Annotated[list[MachinesEntry], "machines in the order of ranks"]
    environment: Annotated[dict[str, str], "environment of every rank"]
    argv: Annotated[list[str], "what a rank runs"]
    commands: Annotated[list[str], "the command of each machine; $host is the name of machine 0"]
    notes: Annotated[list[str], "what to know"]
    written: Annotated[dict[str, str], "path of the written file by option"]
