"""Seconds per stage and edge, and bytes per stage and rank, for the simulation of a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Edge(NamedTuple):
    """One microbatch's tensors from one stage to a later one, and their gradients back."""

    source: int
    target: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


@dataclass(frozen=True)
class Times:
    """Seconds and bytes of one microbatch on each stage, one entry a stage unless stated. Made by `times`.

    `backward_seconds` is the full backward; `input_seconds` and `weight_seconds` are its halves. `edges` may skip to
    any later stage. `activation_bytes` are kept from a forward to its backward (or its input gradient),
    `weight_grad_bytes` from the input gradient to the weight gradient. `static_bytes` are per rank. `overlap` is the
    share of the shorter half of an overlapped pair that is hidden behind the longer: 0 runs one after the other, 1
    hides it wholly.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    input_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]
    edges: tuple[Edge, ...]
    activation_bytes: tuple[float, ...]
    weight_grad_bytes: tuple[float, ...]
    static_bytes: tuple[float, ...] = ()
    overlap: float = 0.0

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_seconds)

    def seconds(self, stage: int, kind: str) -> float:
        """Return the seconds of one action."""
        return {
            "F": self.forward_seconds, "B": self.backward_seconds, "I": self.input_seconds, "W": self.weight_seconds,
        }[kind][stage]  # fmt: skip

    def static_of(self, rank: int) -> float:
        """Return the static bytes of a rank."""
        return self.static_bytes[rank] if self.static_bytes else 0.0


PerStage = float | Sequence[float]


def times(  # noqa: PLR0913 - an argument for each field of Times
    n_stages: int,
    forward_seconds: PerStage = 1.0,
    input_seconds: PerStage = 1.0,
    weight_seconds: PerStage = 1.0,
    backward_seconds: PerStage | None = None,
    transfer_seconds: float = 0.0,
    edges: Sequence[Edge] | None = None,
    activation_bytes: PerStage = 1.0,
    weight_grad_bytes: PerStage | None = None,
    static_bytes: Sequence[float] = (),
    overlap: float = 0.0,
) -> Times:
    """Return `Times`; a single number stands for all stages.

    Defaults: the full backward is the sum of its halves; the edges are the chain 0 -> 1 -> .., `transfer_seconds` each
    way; all activations wait for the weight gradient (`weight_grad_bytes` = `activation_bytes`). Everything that is
    wrong is raised as one ValueError.
    """
    wrong: list[str] = []

    def spread(name: str, value: PerStage) -> tuple[float, ...]:
        out = (float(value),) * n_stages if isinstance(value, int | float) else tuple(float(v) for v in value)
        if len(out) != n_stages:
            wrong.append(f"{name}: {len(out)} numbers for {n_stages} stages")
        wrong.extend(f"{name}[{i}] is {v}: must be finite and >= 0" for i, v in enumerate(out) if not 0 <= v < math.inf)
        return out

    forward = spread("forward_seconds", forward_seconds)
    halves = spread("input_seconds", input_seconds), spread("weight_seconds", weight_seconds)
    full = tuple(i + w for i, w in zip(*halves)) if backward_seconds is None else backward_seconds
    backward = spread("backward_seconds", full)
    activation = spread("activation_bytes", activation_bytes)
    waiting = activation if weight_grad_bytes is None else spread("weight_grad_bytes", weight_grad_bytes)
    if edges is None:
        edges = [Edge(s, s + 1, transfer_seconds, transfer_seconds) for s in range(n_stages - 1)]
    for edge in edges:
        if not 0 <= edge.source < edge.target < n_stages:
            wrong.append(f"edge {edge.source} -> {edge.target}: must go from a stage to a later one of {n_stages}")
        if not (0 <= edge.forward_seconds < math.inf and 0 <= edge.backward_seconds < math.inf):
            wrong.append(
                f"edge {edge.source} -> {edge.target}: {edge.forward_seconds} and {edge.backward_seconds} seconds "
                "must be finite and >= 0"
            )
    pairs = [(e.source, e.target) for e in edges]
    for pair in sorted({p for p in pairs if pairs.count(p) > 1}):
        wrong.append(f"edge {pair[0]} -> {pair[1]} is given {pairs.count(pair)} times: add its tensors up")
    if not 0 <= overlap <= 1:
        wrong.append(f"overlap is {overlap}: must be between 0 and 1")
    if any(not 0 <= b < math.inf for b in static_bytes):
        wrong.append(f"static_bytes {list(static_bytes)}: must be finite and >= 0")
    if wrong:
        raise ValueError("these times cannot be:\n  " + "\n  ".join(wrong))
    return Times(
        forward, backward, *halves, tuple(edges), activation, waiting, tuple(float(b) for b in static_bytes), overlap
    )
