"""Layouts that were not chosen, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class RefusedMemory:
    """Memory that a layout needs and a device does not have."""

    needed_bytes: Annotated[float, "bytes on the fullest device"]
    limit_bytes: Annotated[float, "bytes that a plan may fill there"]
    largest: Annotated[str, "the largest part of the needed bytes: parameters, gradients, optimizer, gathered copies, "
                            "activations, or working memory"]  # fmt: skip
    largest_bytes: Annotated[int, "bytes of that part"]


@dataclass(frozen=True, kw_only=True)
class AlternativeLayout:
    """A layout beside the plan: how it would do, and why it is not the plan."""

    layout: Annotated[str, "the words of the layout"]
    rank: Annotated[int, "place in the order of the list: those that fit by seconds, then those that do not fit by the "
                         "bytes that lack, then those that are impossible"]  # fmt: skip
    seconds: Annotated[float | None, "seconds of a step; null if the layout is impossible"]
    memory_bytes: Annotated[float | None, "bytes on the fullest device; null if the layout is impossible"]
    reason: Annotated[str, "why it is not the plan, or what it is: 'refused: 71.2 of 67.1 GiB, activations'"]
    refused: Annotated[RefusedMemory | None, "null unless the layout does not fit"] = None
    error: Annotated[str | None, "why the layout is impossible for this model and batch; null if it is not"] = None
