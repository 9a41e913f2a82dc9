"""The result of a simulation: times of all actions, idle time, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .actions import Action, Schedule, Step
from .times import Times


class LinkUse(NamedTuple):
    """A microbatch's tensors (`F`) or gradients (`B`) on the link between two ranks."""

    source: int  # stages
    target: int
    kind: str
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of a schedule: step i of rank r runs from `starts[r][i]` to `ends[r][i]` seconds.

    Of a schedule that deadlocks, only what ran before.
    """

    schedule: Schedule
    times: Times
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    transfers: tuple[LinkUse, ...]

    @property
    def makespan_seconds(self) -> float:
        """From the first start to the last end, transfers apart: the optimizer step waits for every rank."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Compute seconds per rank."""
        return tuple(
            sum(step_seconds(step, self.times) for step, _ in zip(row, starts))
            for row, starts in zip(self.schedule.rows, self.starts)
        )

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Idle seconds per rank, from 0 to the makespan."""
        return tuple(self.makespan_seconds - busy for busy in self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, sum(idle) / (ranks x makespan).

        With equal stages this is GPipe's (S - 1) / (m + S - 1) (arXiv:1811.06965, section 2.3). Megatron's "bubble time
        fraction" (arXiv:2104.04473) is idle over *ideal* time, x / (1 - x) of this. Unequal stages count as bubble.
        """
        total = self.schedule.n_ranks * self.makespan_seconds
        return sum(self.idle_seconds) / total if total > 0 else 0.0

    @property
    def span_seconds(self) -> float:
        """The longest time of a rank from its own first start to its own last end."""
        return max((b[-1] - a[0] for a, b in zip(self.starts, self.ends) if a), default=0.0)

    @property
    def span_bubble_fraction(self) -> float:
        """The zero-bubble paper's rate: (cost - m (F + I + W)) / cost (arXiv:2401.10241, section 5.3).

        It leaves out what a rank waits before its first forward, and after its last action for the others: the paper's
        ranks go on to the next step without waiting for each other.
        """
        span = self.span_seconds
        return max(0.0, span - max(self.busy_seconds)) / span if span > 0 else 0.0

    @property
    def live_per_stage(self) -> tuple[int, ...]:
        """The most microbatches of which a stage keeps something: from F to B, or to W."""
        return live_per_stage(self.schedule)

    @property
    def live_per_rank(self) -> tuple[int, ...]:
        """The same for all stages of a rank together, at one time."""
        return live_per_rank(self.schedule)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak bytes per rank, static bytes included. See `peak_bytes`."""
        return peak_bytes(self.schedule, self.times)


def step_seconds(step: Step, times: Times) -> float:
    """Return the seconds of one step; an overlapped pair less what it hides."""
    if isinstance(step, Action):
        return times.seconds(step.stage, step.kind)
    f, b = (times.seconds(a.stage, a.kind) for a in step)
    return f + b - times.overlap * min(f, b)


def live_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return the most microbatches of which each stage keeps something at one time: from F to B, or to W."""
    live = [0] * schedule.n_stages
    most = [0] * schedule.n_stages
    for _, (stage, kind, _) in schedule.actions():
        if kind == "F":
            live[stage] += 1
            most[stage] = max(most[stage], live[stage])
        elif kind != "I":
            live[stage] -= 1
    return tuple(most)


def live_at_peak(schedule: Schedule, stage_bytes: Sequence[float]) -> tuple[int, ...]:
    """Return the number of microbatches that each stage keeps at its rank's peak of memory; at least one.

    Where a rank holds one stage these are those of :func:`live_per_stage`; stages of one rank have their largest
    numbers at different moments, so their sum would be more than there ever is. `stage_bytes` is what a stage keeps of
    a microbatch, until its weight gradient.
    """
    at_peak = [1] * schedule.n_stages
    for row in schedule.flat_rows:
        live: dict[int, int] = {}
        bytes_held = peak = 0.0
        for stage, kind, _ in row:
            if kind == "F":
                live[stage] = live.get(stage, 0) + 1
                bytes_held += stage_bytes[stage]
                if bytes_held > peak:
                    peak = bytes_held
                    for s, n in live.items():
                        at_peak[s] = max(1, n)
            elif kind != "I":
                live[stage] -= 1
                bytes_held -= stage_bytes[stage]
    return tuple(at_peak)


def live_per_rank(schedule: Schedule) -> tuple[int, ...]:
    """Return the most (stage, microbatch) pairs of which each rank keeps something at one time."""
    ones = (1.0,) * schedule.n_stages
    return tuple(round(x) for x in _peaks(schedule, ones, ones))


def peak_bytes(schedule: Schedule, times: Times) -> tuple[float, ...]:
    """Return the peak bytes of each rank: static, activations, and inputs of pending weight gradients.

    A rank does one thing at a time, so this follows from the order alone. Buffers of transfers in flight and
    temporaries of a step are not included.
    """
    peaks = _peaks(schedule, times.activation_bytes, times.weight_grad_bytes)
    return tuple(peak + times.static_of(rank) for rank, peak in enumerate(peaks))


def _peaks(schedule: Schedule, activation: tuple[float, ...], waiting: tuple[float, ...]) -> list[float]:
    out = []
    for row in schedule.flat_rows:
        bytes_held = peak = 0.0
        for stage, kind, _ in row:
            if kind == "F":
                # Nothing is kept for a backward that never comes.
                bytes_held += 0.0 if schedule.forward_only else activation[stage]
            elif kind == "B":
                bytes_held -= activation[stage]
            elif kind == "I":
                bytes_held += waiting[stage] - activation[stage]
            else:
                bytes_held -= waiting[stage]
            if bytes_held > peak:
                peak = bytes_held
        out.append(peak)
    return out
