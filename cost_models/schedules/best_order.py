"""Searched schedules: the best order found for given times within given memory.

    candidates    the textbook schedules on this placement that fit, and every list-scheduling policy
    improvement   swaps of neighbours on the critical path of the best, kept while the makespan falls
    exact         branch and bound (`exact`), for small cases

So the result is never slower than 1F1B, ZB-H1 or ZB-V where they fit. Deterministic: same numbers, same schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .actions import Action, Schedule, parts
from .branch_and_bound import lower_bound_seconds, solve, work_seconds
from .listing import SLACK, OrderProblem, list_schedule, policies
from .schedule_kinds import SCHEDULES
from .simulate import simulate
from .stage_placement import loop_placement
from .timeline import Timeline, peak_bytes
from .times import Times

SWAPS = 60
"""Simulations that swapping neighbours may take, by default."""
ROUNDING = 1e-12
"""A swap must gain more than this part of the makespan, or it is rounding that changes."""


@dataclass(frozen=True)
class BestOrder:
    """The best schedule, timed; `proven` when no order is faster.

    `lower_bound_seconds` bounds the objective (makespan or longest span) of every order.
    """

    timeline: Timeline
    origin: str
    proven: bool
    lower_bound_seconds: float
    candidates: tuple[tuple[str, float], ...]  # those that fit, with the objective, quickest first

    @property
    def schedule(self) -> Schedule:
        """The schedule of the timeline."""
        return self.timeline.schedule


def search(
    times: Times,
    n_microbatches: int,
    stages_of_rank: tuple[tuple[int, ...], ...] | None = None,
    limit_bytes: float | Sequence[float] | None = None,
    limit_live: int | Sequence[int] | None = None,
    objective: Literal["makespan", "span"] = "makespan",
    swaps: int = SWAPS,
    exact_nodes: int = 0,
) -> BestOrder:
    """Return the fastest schedule found within memory limits.

    A rank holds at most `limit_bytes` (static bytes included) and `limit_live` (stage, microbatch) pairs until their
    weight gradient; one limit for all ranks or one each, no more than one of the two kinds. `stages_of_rank` defaults
    to one stage a rank. `objective` is the makespan, or the longest span of a rank, for training that does not stop
    between steps (`Timeline.span_seconds`; improvement and exact solve know only the makespan). `swaps` bounds the
    simulations of the improvement, `exact_nodes` the states of the exact solve (0: none). A rank that cannot hold one
    microbatch on each of its stages raises ValueError with the numbers.
    """
    problem = _problem(times, n_microbatches, stages_of_rank, limit_bytes, limit_live)
    candidates: list[tuple[float, float, int, Timeline]] = []

    def add(schedule: Schedule) -> None:
        if _fits(schedule, problem):
            timeline = simulate(schedule, times)
            bytes_held = sum(peak_bytes(schedule, problem.times))
            score = timeline.makespan_seconds if objective == "makespan" else timeline.span_seconds
            candidates.append((score, bytes_held, len(candidates), timeline))

    for schedule in _textbook(problem):
        add(schedule)
    if objective == "makespan":
        bound = lower_bound_seconds(problem)
    else:
        bound = max(sum(work_seconds(problem, s) for s in stages) for stages in problem.stages_of_rank)
    for policy in policies(several_stages=times.n_stages > len(problem.stages_of_rank)):
        if any(c[0] <= bound * SLACK for c in candidates):
            break  # none can be faster
        add(list_schedule(problem, policy))
    candidates.sort(key=lambda c: c[:3])
    best = candidates[0][3]
    origin = best.schedule.name
    if objective == "span":
        return _found(best, origin, candidates[0][0] <= bound * SLACK, bound, candidates)
    if swaps > 0 and best.makespan_seconds > bound * SLACK:
        better = improve(best, problem, swaps)
        if better.makespan_seconds < best.makespan_seconds:
            best, origin = better, f"{origin}, swapped"
    proven = best.makespan_seconds <= bound * SLACK
    if exact_nodes > 0 and not proven:
        solution = solve(problem, best.makespan_seconds, exact_nodes)
        proven = solution.proven
        if solution.schedule is not None:
            timeline = simulate(solution.schedule, times)
            if timeline.makespan_seconds < best.makespan_seconds:
                best, origin = timeline, "exact"
    if proven:
        bound = best.makespan_seconds
    return _found(best, origin, proven, bound, candidates)


def _textbook(problem: OrderProblem) -> Iterator[Schedule]:
    """Yield the textbook schedules with the problem's placement of stages."""
    for kind in SCHEDULES.values():
        with contextlib.suppress(ValueError):  # it does not exist for these counts
            schedule = kind.build(problem.n_stages, len(problem.stages_of_rank), problem.n_microbatches)
            if schedule.stages_of_rank == problem.stages_of_rank:
                yield schedule


def _found(
    best: Timeline, origin: str, proven: bool, bound: float, candidates: list[tuple[float, float, int, Timeline]]
) -> BestOrder:
    best = dataclasses.replace(best, schedule=dataclasses.replace(best.schedule, name="searched"))
    return BestOrder(best, origin, proven, bound, tuple((c[3].schedule.name, c[0]) for c in candidates))


def _problem(
    times: Times,
    n_microbatches: int,
    stages_of_rank: tuple[tuple[int, ...], ...] | None,
    limit_bytes: float | Sequence[float] | None,
    limit_live: int | Sequence[int] | None,
) -> OrderProblem:
    placement = stages_of_rank if stages_of_rank is not None else loop_placement(times.n_stages, times.n_stages)
    placed = sorted(s for stages in placement for s in stages)
    if n_microbatches < 1 or placed != list(range(times.n_stages)):
        raise ValueError(
            f"search of {n_microbatches} microbatches on stages {placed}: needs at least 1, and stages 0 to "
            f"{times.n_stages - 1} once each"
        )
    if limit_bytes is not None and limit_live is not None:
        raise ValueError(f"limits of {limit_bytes} bytes and of {limit_live} live microbatches: give one of them")
    n_ranks = len(placement)
    limit: float | Sequence[float] | Sequence[int]
    limit = limit_bytes if limit_bytes is not None else limit_live if limit_live is not None else float("inf")
    limits = [float(limit)] * n_ranks if isinstance(limit, int | float) else [float(x) for x in limit]
    if len(limits) != n_ranks:
        raise ValueError(f"{len(limits)} limits for {n_ranks} ranks")
    if limit_live is not None:
        ones = (1.0,) * times.n_stages
        times = dataclasses.replace(times, activation_bytes=ones, weight_grad_bytes=ones, static_bytes=())
    room = tuple(limits[r] - times.static_of(r) for r in range(n_ranks))
    problem = OrderProblem(times, n_microbatches, placement, room)
    short = []
    for rank, stages in enumerate(placement):
        needed = sum(times.activation_bytes[s] for s in stages)
        if needed > room[rank] * SLACK or room[rank] < 0:
            short.append(
                f"rank {rank}: one microbatch on stages {list(stages)} needs {needed + times.static_of(rank):g}, "
                f"{times.static_of(rank):g} of it static, and the limit is {limits[rank]:g}"
            )
    if short:
        raise ValueError("no schedule fits; use smaller microbatches or more ranks:\n  " + "\n  ".join(short))
    return problem


def _fits(schedule: Schedule, problem: OrderProblem) -> bool:
    peaks = peak_bytes(schedule, dataclasses.replace(problem.times, static_bytes=()))
    return all(peak <= room * SLACK for peak, room in zip(peaks, problem.room_bytes))


def improve(timeline: Timeline, problem: OrderProblem, simulations: int) -> Timeline:
    """Swap neighbours on a rank along the critical path while it helps, within `simulations` simulations."""
    if any(len(parts(step)) > 1 for row in timeline.schedule.rows for step in row):
        return timeline  # overlapped pairs stay together: no single swap is meant for them
    spent = 0
    improved = True
    while improved and spent < simulations:
        improved = False
        for rank, place in critical_pairs(timeline):
            rows = [list(row) for row in timeline.schedule.flat_rows]
            row = rows[rank]
            if row[place].stage == row[place + 1].stage and row[place].microbatch == row[place + 1].microbatch:
                continue  # the second needs the first
            row[place], row[place + 1] = row[place + 1], row[place]
            swapped = problem.schedule(timeline.schedule.name, rows)
            if not _fits(swapped, problem):
                continue
            if spent >= simulations:
                break
            spent += 1
            try:
                trial = simulate(swapped, timeline.times)
            except ValueError:
                continue  # it deadlocks
            if trial.makespan_seconds < timeline.makespan_seconds * (1 - ROUNDING):
                timeline, improved = trial, True
                break
    return timeline


def critical_pairs(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (rank, i) of steps i and i + 1 without a gap between them on a longest path, last first."""
    schedule = timeline.schedule
    rows = schedule.flat_rows
    where = {a: (r, i) for r, row in enumerate(rows) for i, a in enumerate(row)}
    sent = {(t.target, t.kind, t.microbatch, t.end_seconds): t for t in timeline.transfers}
    rank = max(range(schedule.n_ranks), key=lambda r: (timeline.ends[r][-1] if timeline.ends[r] else 0.0, -r))
    place = len(rows[rank]) - 1
    out = []
    while place >= 0:
        start = timeline.starts[rank][place]
        stage, kind, microbatch = rows[rank][place]
        if place and timeline.ends[rank][place - 1] == start:
            out.append((rank, place - 1))
            place -= 1
            continue
        transfer = sent.get((stage, "F" if kind == "F" else "B", microbatch, start))
        if transfer is None:
            break  # started at 0, or waited for a link: good enough
        kinds = "F" if transfer.kind == "F" else "IB"
        sender = next(a for a in (Action(transfer.source, k, microbatch) for k in kinds) if a in where)
        rank, place = where[sender]
    return out
