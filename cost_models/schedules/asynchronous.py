"""Pipelines that never drain: PipeDream with weight stashing, and PipeDream-2BW. They change the training result.

Both run 1F1B over an endless stream of microbatches (here a finite piece of it) and update weights while microbatches
are in flight, so gradients are of older weights than those they are added to. With version t = the weights after t
updates:

    pipedream       arXiv:1806.03377 (SOSP 2019, section 3.3). Every backward is followed by an update of its stage.
                    A forward uses the newest version, its backward the same one, stashed until then. Stage s of S is
                    S - 1 - s late:
                        w_s(t + 1) = w_s(t) - lr * grad_s at (w_0(t - S + 1), .., w_s(t - S + 1 + s), .., w_{S-1}(t))
    pipedream-2bw   arXiv:2006.09503, section 3.1. One update for `n_accumulate` >= S microbatches; all stages compute
                    batch t with version t - 1, so two versions are enough:
                        w(t + 1) = w(t) - lr * grad at w(t - 1)

with versions before 0 read as 0. Nothing chooses them unasked.

A plan has the rows of the first step; :func:`stream` has those of many. A step in between fills up with the backwards
that the one before left over, so it has no bubble (:func:`steady`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .actions import Action, Schedule
from .builders import one_f_one_b
from .simulate import simulate
from .timeline import Timeline, peak_bytes
from .times import Times

SETTLED, AVERAGED = 4, 4
"""Steps of a stream before one is taken for all later ones, and steps over which its seconds are averaged."""


@dataclass(frozen=True)
class AsynchronousSchedule:
    """A schedule with weight updates after every `n_accumulate` backwards of a stage.

    `delay` is None when a forward takes the newest version (PipeDream), else the batches by which every stage lags
    (2BW).
    """

    schedule: Schedule
    n_accumulate: int
    delay: int | None

    def updates(self, action: Action) -> bool:
        """Return True if the stage of `action` makes a new version right after it."""
        return action.kind == "B" and (action.microbatch + 1) % self.n_accumulate == 0

    def versions(self) -> dict[tuple[int, int], int]:
        """Return {(stage, microbatch): version} of its forward and backward."""
        return self._walk()[0]

    def versions_held(self) -> tuple[int, ...]:
        """Return, per stage, the most versions that exist at one time.

        They are the newest, and those of microbatches in flight (2BW: and those that a later microbatch starts with).
        """
        return self._walk()[1]

    def peak_bytes(self, times: Times, weight_bytes: tuple[float, ...]) -> tuple[float, ...]:
        """Return the peak bytes per rank; `weight_bytes` are of one version per stage.

        `times.static_bytes` hold the newest version already.
        """
        if len(weight_bytes) != self.schedule.n_stages:
            raise ValueError(f"weight_bytes of {len(weight_bytes)} stages for {self.schedule.n_stages}")
        versions = self.versions_held()
        peaks = peak_bytes(self.schedule, times)
        return tuple(
            peak + sum((versions[s] - 1) * weight_bytes[s] for s in stages)
            for peak, stages in zip(peaks, self.schedule.stages_of_rank)
        )

    def _walk(self) -> tuple[dict[tuple[int, int], int], tuple[int, ...]]:
        newest = [0] * self.schedule.n_stages
        most_alive = [1] * self.schedule.n_stages
        in_flight: list[dict[int, int]] = [{} for _ in newest]
        used: dict[tuple[int, int], int] = {}
        for _, action in self.schedule.actions():
            stage, kind, microbatch = action
            if kind == "F":
                version = newest[stage]
                if self.delay is not None:
                    version = max(0, microbatch // self.n_accumulate - self.delay)
                    # Made by then: rows that run too far ahead are refused where they are built.
                    assert version <= newest[stage], f"{action} wants version {version} of {newest[stage]}"
                used[stage, microbatch] = in_flight[stage][microbatch] = version
            else:
                del in_flight[stage][microbatch]
                newest[stage] += self.updates(action)
            alive = {newest[stage], *in_flight[stage].values()}
            if self.delay is not None and (coming := _next(microbatch, kind, in_flight[stage])) is not None:
                if coming < self.schedule.n_microbatches:
                    alive |= set(range(max(0, coming // self.n_accumulate - self.delay), newest[stage] + 1))
            most_alive[stage] = max(most_alive[stage], len(alive))
        return used, tuple(most_alive)


def _next(microbatch: int, kind: str, in_flight: dict[int, int]) -> int | None:
    """Return the microbatch that the stage forwards next: 1F1B goes in order."""
    if kind == "F":
        return microbatch + 1
    return max(in_flight) + 1 if in_flight else microbatch + 1


def pipedream(n_stages: int, n_microbatches: int) -> AsynchronousSchedule:
    """Build PipeDream: an update after every microbatch, stashed weights; stage s keeps up to S - s versions."""
    rows = one_f_one_b(n_stages, n_stages, n_microbatches)
    return AsynchronousSchedule(_named(rows, "pipedream"), 1, None)


def pipedream_2bw(n_stages: int, n_microbatches: int, n_accumulate: int | None = None) -> AsynchronousSchedule:
    """Build PipeDream-2BW: an update after `n_accumulate` microbatches (default: stages), two versions.

    A ValueError says that a stage would start a batch before the version that it needs exists (fewer microbatches per
    batch than stages), or that the stream ends within a batch.
    """
    batch = n_stages if n_accumulate is None else n_accumulate
    if batch < n_stages:
        raise ValueError(
            f"pipedream-2bw accumulates {batch} microbatches over {n_stages} stages: with fewer than stages, two "
            f"versions are not enough; use at least {n_stages}"
        )
    if n_microbatches < 1 or n_microbatches % batch:
        raise ValueError(
            f"pipedream-2bw of {n_microbatches} microbatches in batches of {batch}: use a multiple of {batch}"
        )
    rows = one_f_one_b(n_stages, n_stages, n_microbatches)
    return AsynchronousSchedule(_named(rows, "pipedream-2bw"), batch, 1)


def _named(schedule: Schedule, name: str) -> Schedule:
    return Schedule(name, schedule.n_stages, schedule.n_microbatches, schedule.stages_of_rank, schedule.rows)


ASYNCHRONOUS: dict[str, Callable[[int, int], AsynchronousSchedule]] = {
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
}


def updates_of_step(schedule: Schedule) -> int:
    """Return how often each stage updates its weights in a step of an asynchronous schedule."""
    return schedule.n_microbatches if schedule.name == "pipedream" else 1


def stream(schedule: Schedule, n_steps: int) -> AsynchronousSchedule:
    """Return `n_steps` steps of an asynchronous schedule, given the first one.

    Raises:
        ValueError: its rows are not those of the schedule that it is named after; it says what to do.
    """
    n, m, name = schedule.n_stages, schedule.n_microbatches, schedule.name
    make = {
        "pipedream": lambda k: pipedream(n, k * m), "pipedream-2bw": lambda k: pipedream_2bw(n, k * m, m),
    }[name]  # fmt: skip
    first = make(1).schedule
    if (first.rows, first.stages_of_rank) != (schedule.rows, schedule.stages_of_rank):
        raise ValueError(
            f"schedule '{name}' has other rows than those of its first step: a stream of steps follows from the name "
            "alone; leave the rows as they were planned, or give them another name, with which they run with one "
            "update a step"
        )
    return make(n_steps)


def steady(schedule: Schedule, times: Times, update_seconds: Sequence[float] = ()) -> Timeline:
    """Return a step of a stream that has been full for a while: what happens from one first forward to the next.

    Microbatches are numbered within their steps. What is under way at the end is cut off there, and is what a step
    begins with.

    Args:
        update_seconds: what all updates of a stage in a step take on its rank; a part of them follows each backward.
    """
    m = schedule.n_microbatches
    more = tuple(update_seconds) or (0.0,) * schedule.n_stages
    with_updates = dataclasses.replace(
        times, backward_seconds=tuple(b + u / m for b, u in zip(times.backward_seconds, more, strict=True))
    )
    timeline = simulate(stream(schedule, SETTLED + AVERAGED + 2).schedule, with_updates)
    rows = timeline.schedule.flat_rows
    begins = {a.microbatch: start for a, start in zip(rows[0], timeline.starts[0], strict=True) if a.kind == "F"}
    since = begins[SETTLED * m]
    until = since + (begins[(SETTLED + AVERAGED) * m] - since) / AVERAGED
    kept = []
    for row, starts_, ends_ in zip(rows, timeline.starts, timeline.ends, strict=True):
        first = next(i for i, start in enumerate(starts_) if start >= since)
        kept.append([
            (Action(a.stage, a.kind, a.microbatch % m), min(start, until) - since, min(end, until) - since)
            for a, start, end in zip(*(values[first : first + 2 * m] for values in (row, starts_, ends_)), strict=True)
        ])  # fmt: skip
    step = dataclasses.replace(schedule, rows=tuple(tuple(a for a, _, _ in row) for row in kept))
    sent = tuple(
        use._replace(
            microbatch=use.microbatch % m, start_seconds=use.start_seconds - since,
            end_seconds=min(use.end_seconds, until) - since,
        )
        for use in timeline.transfers if since <= use.start_seconds < until
    )  # fmt: skip
    starts = tuple(tuple(start for _, start, _ in row) for row in kept)
    ends = tuple(tuple(end for _, _, end in row) for row in kept)
    return Timeline(step, with_updates, starts, ends, sent)
