"""A simulation of schedules: a longest path, no polling and no clock.

A rank runs its row in order, each step as soon as the step before it has ended and its inputs have arrived:

    F of stage s    the output of every stage with an edge into s
    B or I          its own F, and the gradient from every stage that s has an edge to
    W               its own I

Outputs leave when F ends, gradients when B or I ends. Sends are asynchronous with buffers as needed: they occupy the
link (one transfer at a time for each ordered pair of ranks, in the order in which they were posted), not the ranks; on
the same rank they are free. Only one rank posts to such a link, in the order of its row, so times follow in one pass:
a worklist of ranks, each run until it waits, and woken by what it waits for.

A message leaves its link behind all that was posted there before, and a receiver keeps a few of those at most
(:mod:`.channels`). A rank that wants one from farther behind has no buffer for those in front, and waits for ever.
"""

from __future__ import annotations

from collections import deque

from .actions import Action, Overlap, Schedule, Step, parts
from .channels import Stop, first_blocked_rank
from .deadlock import deadlock_message
from .drawing import draw
from .timeline import LinkUse, Timeline
from .times import Times


class Deadlock(ValueError):
    """An error for a schedule that waits for itself. `timeline` is what ran before."""

    def __init__(self, message: str, timeline: Timeline):
        super().__init__(message)
        self.timeline = timeline


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Return the start and end of each step and each transfer.

    Deadlock (a ValueError), with the grid of what ran and who waits for what, means that ranks wait for each other, for
    what no rank computes, or for a message too far behind others. Times of another number of stages or ranks raise
    ValueError.
    """
    if times.n_stages != schedule.n_stages:
        raise ValueError(f"times of {times.n_stages} stages for '{schedule.name}' of {schedule.n_stages}")
    if times.static_bytes and len(times.static_bytes) != schedule.n_ranks:
        raise ValueError(f"static_bytes of {len(times.static_bytes)} ranks for '{schedule.name}' of {schedule.n_ranks}")
    rows = schedule.rows if times.overlap > 0 else schedule.flat_rows
    state = _State(schedule, times)
    stop = first_blocked_rank(schedule, ((edge.source, edge.target) for edge in times.edges))
    if stop is not None:
        rows = _up_to(rows, stop)
    work = deque(range(schedule.n_ranks))
    while work:
        state.run(work.popleft(), rows, work)
    starts, ends = state.starts, state.ends
    if times.overlap == 0 and rows is not schedule.rows:
        starts, ends = _rejoin(schedule, starts, ends)
    timeline = Timeline(
        schedule, times, tuple(tuple(row) for row in starts), tuple(tuple(row) for row in ends), tuple(state.transfers)
    )
    if stop is not None and len(state.starts[stop.rank]) == len(rows[stop.rank]):
        raise Deadlock(f"schedule '{schedule.name}' deadlocks: {stop.why}\nuntil then:\n{draw(timeline)}", timeline)
    if any(len(done) < len(row) for done, row in zip(state.starts, rows)):
        raise Deadlock(deadlock_message(timeline, [len(row) for row in state.starts]), timeline)
    return timeline


def _up_to(rows: tuple[tuple[Step, ...], ...], stop: Stop) -> tuple[tuple[Step, ...], ...]:
    """Return the rows without what the blocked rank does not reach."""
    flat, row = 0, []
    for step in rows[stop.rank]:
        flat += len(parts(step))
        if flat > stop.place:
            break
        row.append(step)
    return *rows[: stop.rank], tuple(row), *rows[stop.rank + 1 :]


class _State:
    """The state of the simulation, indexed by stage * microbatches + microbatch."""

    def __init__(self, schedule: Schedule, times: Times):
        n, m = schedule.n_stages, schedule.n_microbatches
        self.times, self.m = times, m
        ranks = schedule.rank_of_stage
        into, out_of = [0] * n, [0] * n
        # Per stage, (other stage, link or None on the same rank, seconds).
        self.forward_to: list[list[tuple[int, tuple[int, int] | None, float]]] = [[] for _ in range(n)]
        self.backward_to: list[list[tuple[int, tuple[int, int] | None, float]]] = [[] for _ in range(n)]
        for edge in times.edges:
            a, b = ranks[edge.source], ranks[edge.target]
            into[edge.target] += 1
            out_of[edge.source] += 1
            self.forward_to[edge.source].append((edge.target, (a, b) if a != b else None, edge.forward_seconds))
            self.backward_to[edge.target].append((edge.source, (b, a) if a != b else None, edge.backward_seconds))
        self.rank_of = [ranks[s] for s in range(n)]
        # Inputs still to come, and when the last of those that came did. A backward also needs its own forward,
        # a weight gradient its own input gradient.
        self.missing = {
            "F": [k for k in into for _ in range(m)],
            "B": [k + 1 for k in out_of for _ in range(m)],
            "W": [1] * (n * m),
        }
        self.missing["I"] = self.missing["B"]
        self.ready = {"F": [0.0] * (n * m), "B": [0.0] * (n * m), "W": [0.0] * (n * m)}
        self.ready["I"] = self.ready["B"]
        self.seconds = {
            "F": times.forward_seconds, "B": times.backward_seconds,
            "I": times.input_seconds, "W": times.weight_seconds,
        }  # fmt: skip
        self.starts: list[list[float]] = [[] for _ in range(schedule.n_ranks)]
        self.ends: list[list[float]] = [[] for _ in range(schedule.n_ranks)]
        self.free = [0.0] * schedule.n_ranks
        self.link_free: dict[tuple[int, int], float] = {}
        self.transfers: list[LinkUse] = []
        self.awaits: list[tuple[str, int] | None] = [None] * schedule.n_ranks

    def run(self, rank: int, rows: tuple[tuple[Step, ...], ...], work: deque[int]) -> None:
        """Run `rank` until it waits or is done; add to `work` the ranks that it wakes."""
        row, starts, ends, free, m = rows[rank], self.starts[rank], self.ends[rank], self.free[rank], self.m
        missing, ready, seconds = self.missing, self.ready, self.seconds
        for place in range(len(starts), len(row)):
            step = row[place]
            if isinstance(step, Overlap):
                f, b = step
                at_f, at_b = f.stage * m + f.microbatch, b.stage * m + b.microbatch
                if missing["F"][at_f] or missing[b.kind][at_b]:
                    self.awaits[rank] = ("F", at_f) if missing["F"][at_f] else (_phase(b.kind), at_b)
                    break
                start = max(free, ready["F"][at_f], ready[b.kind][at_b])
                long, short = seconds["F"][f.stage], seconds[b.kind][b.stage]
                free = start + long + short - self.times.overlap * min(long, short)
                starts.append(start)
                ends.append(free)
                self.deliver(f, at_f, free, work)
                self.deliver(b, at_b, free, work)
                continue
            stage, kind, microbatch = step
            at = stage * m + microbatch
            if missing[kind][at]:
                self.awaits[rank] = (_phase(kind), at)
                break
            start = ready[kind][at]
            if start < free:
                start = free
            free = start + seconds[kind][stage]
            starts.append(start)
            ends.append(free)
            if kind != "W":
                self.deliver(step, at, free, work)
        else:
            self.awaits[rank] = None
        self.free[rank] = free

    def deliver(self, action: Action, at: int, end: float, work: deque[int]) -> None:
        """Post the results of an action that ended."""
        stage, kind, microbatch = action
        if kind == "F":
            self.arrive("B", at, end, self.rank_of[stage], work)
            targets, phase = self.forward_to[stage], "F"
        elif kind == "W":
            return
        else:
            if kind == "I":
                self.arrive("W", at, end, self.rank_of[stage], work)
            targets, phase = self.backward_to[stage], "B"
        for target, link, seconds in targets:
            when = end
            if link is not None:
                start = max(end, self.link_free.get(link, 0.0))
                when = self.link_free[link] = start + seconds
                self.transfers.append(LinkUse(stage, target, phase, microbatch, start, when))
            self.arrive(phase, target * self.m + microbatch, when, self.rank_of[target], work)

    def arrive(self, phase: str, at: int, when: float, rank: int, work: deque[int]) -> None:
        ready = self.ready[phase]
        if ready[at] < when:
            ready[at] = when
        missing = self.missing[phase]
        missing[at] -= 1
        if not missing[at] and self.awaits[rank] == (phase, at):
            self.awaits[rank] = None
            work.append(rank)


def _phase(kind: str) -> str:
    return "B" if kind == "I" else kind


def _rejoin(
    schedule: Schedule, starts: list[list[float]], ends: list[list[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return times of flat rows as times of rows: a pair from the start of one half to the end of the other."""
    out_starts: list[list[float]] = []
    out_ends: list[list[float]] = []
    for row, flat_starts, flat_ends in zip(schedule.rows, starts, ends):
        place = 0
        row_starts, row_ends = [], []
        for step in row:
            size = len(parts(step))
            if place + size > len(flat_starts):
                break
            row_starts.append(flat_starts[place])
            row_ends.append(flat_ends[place + size - 1])
            place += size
        out_starts.append(row_starts)
        out_ends.append(row_ends)
    return out_starts, out_ends
