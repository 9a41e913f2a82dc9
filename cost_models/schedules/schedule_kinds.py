"""Schedules as records: all that a search must know of each, beside the function that builds its rows.

    schedule           stages   in flight on group i of S (whole groups)           bubble    drain   source
    gpipe              1        m                                                  1         1       arXiv:1811.06965
    1f1b               1        min(m, S - i)                                      1         1       arXiv:2006.09503
    interleaved-1f1b   v >= 2   (2 (S - i - 1) + (v - 1) g + 1) / v, at most m     1/v       1/v     arXiv:2104.04473
    zb-h1              v >= 1   (S + (v - 1) g) / v, at most m                     1/(3 v)   0       arXiv:2401.10241
    zb-v               2        min(m, S)                                          1/6       0       arXiv:2405.15362
    dualpipe-v         2        S + 1/2                                            1/6       0       arXiv:2412.19437
    pipedream          1        S - i                                              0         0       arXiv:1806.03377
    pipedream-2bw      1        S - i                                              0         0       arXiv:2006.09503

`stages` are those that a group of devices holds, its degree of interleaving v; g = m // max(1, m // S) microbatches go
through one of them before the next one's turn. The zero-bubble rows have their bubbles for equal forward,
input-gradient and weight-gradient times and m >= S; a backward that is not split leaves 1/v. All numbers are those of
the simulator, which tests compare.

The last two run 1F1B over a stream of steps that never drains, with weights that change meanwhile; rows that they build
are those of the first step. They change the training result, so nothing chooses them unless they are named.

A new schedule is one file with a builder and a record added to `SCHEDULES`, imported in ``__init__.py``
(docs/adding.md). The planner, the command line and the tests read everything else from the record.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from hardware_profiles.strict import parse_count, shortened

from . import builders
from .actions import Schedule
from .stage_placement import loop_placement, v_placement

Builder = Callable[[int, int, int], Schedule]
"""(stages, ranks, microbatches) -> the schedule; ValueError for counts that it does not allow."""
Check = Callable[[str, int, int, int], object]
"""(name, stages, ranks, microbatches): raises the same ValueError as the builder, without building."""
Placement = Callable[[int, int], tuple[tuple[int, ...], ...]]
"""(stages, ranks) -> the stages of every rank."""
InFlight = Callable[[int, int, int, int], float]
"""(group i, groups S, microbatches m, degree v) -> microbatches whose activations group i keeps at once."""


@dataclass(frozen=True)
class ScheduleKind:
    """One schedule by name.

    Attributes:
        build, check, placement, in_flight: see the types above. `in_flight` is never less for a smaller i, nor for a
            larger S with the same i.
        bubble: gives for a degree the share of the other groups' times that a step waits for, all of it in 1F1B.
        drain: gives for a degree the share of earlier groups' last backwards behind which a group's once-a-step work
            hides.
        fewest, most: stages that a group may hold; most is None if any number may be.
        splits: the backward is computed in halves, so where it cannot be split the bubble is larger.
        by_distance: `in_flight` depends on S - i and m only, so one search finds all numbers of groups.
        usual: searched unless schedules are named. The others cannot win by the price as it is: GPipe takes as long as
            1F1B and keeps more, and overlapped pairs are priced as one after the other.
        weight_versions: gives for group i of S the versions of its weights that exist at one time.
    """

    name: str
    build: Builder
    check: Check
    in_flight: InFlight
    placement: Placement = loop_placement
    bubble: Callable[[int], float] = lambda degree: 1 / degree
    drain: Callable[[int], float] = lambda degree: 1 / degree
    fewest: int = 1
    most: int | None = 1
    splits: bool = False
    by_distance: bool = False
    usual: bool = True
    weight_versions: Callable[[int, int], int] = lambda _group, _groups: 1

    def allows_degree(self, degree: int) -> bool:
        """Return True if a group may hold `degree` stages."""
        return self.fewest <= degree and (self.most is None or degree <= self.most)

    def degrees(self, groups: int, n_blocks: int) -> list[int]:
        """Return the degrees of interleaving worth a look for `n_blocks` blocks in the stages of `groups` groups.

        For every number of blocks that a stage may have, the most stages; the fewest first.
        """
        most = n_blocks // groups
        if self.most is not None:
            most = min(most, self.most)
        natural = {n_blocks // (groups * blocks) for blocks in range(1, n_blocks // groups + 1)}
        return [d for d in sorted({self.fewest, *natural}) if self.fewest <= d <= most]

    def at(self, degree: int | None = None) -> Fill:
        """Return the schedule with `degree` stages a group, by default the fewest; ValueError if not allowed."""
        return _fill(self.name, self.fewest if degree is None else degree)


@dataclass(frozen=True)
class Fill:
    """The way in which a schedule fills a pipeline: a kind at one degree of interleaving.

    Attributes:
        kind: the schedule.
        chunks: the degree: stages that one group of devices holds. They are counted together in `in_flight`, and a
            boundary between two groups is crossed once for each.
        bubble, drain: as in :class:`ScheduleKind`.
    """

    kind: ScheduleKind
    chunks: int
    bubble: float
    drain: float

    def __post_init__(self) -> None:
        if not 0 <= self.drain <= self.bubble <= 1:
            raise ValueError(f"{self.name}: 0 <= drain {self.drain:g} <= bubble {self.bubble:g} <= 1 does not hold")

    @property
    def name(self) -> str:
        """Name of the schedule."""
        return self.kind.name

    @property
    def label(self) -> str:
        """Name, with the degree where it is more than one and could be another: `interleaved-1f1b:4`."""
        return self.name if self.kind.most is not None or self.chunks == 1 else f"{self.name}:{self.chunks}"

    @property
    def whole_bubble(self) -> float:
        """Bubble where some backward cannot be split."""
        return 1 / self.chunks if self.kind.splits else self.bubble

    @property
    def by_distance(self) -> bool:
        """As in :class:`ScheduleKind`; with one stage a group."""
        return self.kind.by_distance

    def in_flight(self, group: int, groups: int, microbatches: int) -> float:
        """Return the microbatches, of all stages of a group together, whose activations it keeps at once."""
        return self.kind.in_flight(group, groups, microbatches, self.chunks)

    def allows(self, groups: int, microbatches: int) -> bool:
        """Return True if the schedule can be built for `groups` and `microbatches`."""
        return allows(self.name, groups * self.chunks, groups, microbatches)


def _interleaved(i: int, n: int, m: int, v: int) -> float:
    return min(v * m, 2 * (n - i - 1) + (v - 1) * _round(n, m) + 1) / v


def _zero_bubble(_i: int, n: int, m: int, v: int) -> float:
    return min(v * m, n + (v - 1) * _round(n, m)) / v


def _round(n: int, m: int) -> int:
    """Return the microbatches that go through a stage before the next one of its group has its turn."""
    return m // max(1, m // n)


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind(
            "gpipe", builders.gpipe, builders.one_a_rank, lambda _i, _n, m, _v: m, by_distance=True, usual=False
        ),
        ScheduleKind(
            "1f1b", builders.one_f_one_b, builders.one_a_rank, lambda i, n, m, _v: min(m, n - i), by_distance=True
        ),
        ScheduleKind(
            "interleaved-1f1b", builders.interleaved, builders.equal_rounds, _interleaved, fewest=2, most=None
        ),
        ScheduleKind(
            "zb-h1", builders.zero_bubble_h1, builders.equal_rounds, _zero_bubble, bubble=lambda v: 1 / (3 * v),
            drain=lambda _: 0.0, most=None, splits=True,
        ),
        ScheduleKind(
            "zb-v", builders.zero_bubble_v, builders.two_a_rank, lambda _i, n, m, _v: min(m, n), v_placement,
            bubble=lambda _: 1 / 6, drain=lambda _: 0.0, fewest=2, most=2, splits=True,
        ),
        ScheduleKind(
            "dualpipe-v", builders.dualpipe_v, builders.as_many_as_stages, lambda _i, n, _m, _v: n + 0.5, v_placement,
            bubble=lambda _: 1 / 6, drain=lambda _: 0.0, fewest=2, most=2, splits=True, usual=False,
        ),
    )
}  # fmt: skip
"""All schedules that train as one device does; a search looks at no others unless it is told to."""

ASYNCHRONOUS_KINDS = {
    kind.name: kind
    for kind in (
        ScheduleKind(
            "pipedream", builders.never_drained("pipedream"), builders.enough_for_all_stages,
            lambda i, n, _m, _v: n - i, bubble=lambda _: 0.0, drain=lambda _: 0.0, by_distance=True, usual=False,
            weight_versions=lambda i, n: n - i,
        ),
        ScheduleKind(
            "pipedream-2bw", builders.never_drained("pipedream-2bw"), builders.enough_for_all_stages,
            lambda i, n, _m, _v: n - i, bubble=lambda _: 0.0, drain=lambda _: 0.0, by_distance=True, usual=False,
            weight_versions=lambda _i, _n: 2,
        ),
    )
}  # fmt: skip
"""Schedules whose gradients are of older weights (:mod:`.asynchronous`): they are built only where they are named."""
KNOWN: Mapping[str, ScheduleKind] = ChainMap(ASYNCHRONOUS_KINDS, SCHEDULES)
"""All schedules that are built by name, also those that are added to :data:`SCHEDULES` later."""


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return for every stage the versions of its weights that exist at one time: one where training is as usual."""
    kind = ASYNCHRONOUS_KINDS.get(schedule.name)
    if kind is None:
        return (1,) * schedule.n_stages
    return tuple(kind.weight_versions(schedule.rank_of_stage[s], schedule.n_ranks) for s in range(schedule.n_stages))


def usual() -> tuple[str, ...]:
    """Return the names of the schedules that are searched by default."""
    return tuple(name for name, kind in SCHEDULES.items() if kind.usual)


@lru_cache(maxsize=1024)
def _fill(name: str, degree: int) -> Fill:
    kind = KNOWN[name]
    if not kind.allows_degree(degree):
        most = f"{kind.fewest} or more" if kind.most is None else f"{kind.fewest}"
        raise ValueError(f"{name} holds {most} stages a rank, not {degree}")
    return Fill(kind, degree, kind.bubble(degree), kind.drain(degree))


def parse_kind(text: str) -> tuple[ScheduleKind, int | None]:
    """Parse `zb-h1`, or `interleaved-1f1b:4` with the degree of interleaving (None if it is left open).

    An unknown name or a degree that it does not allow raises ValueError.
    """
    name, colon, degree = text.partition(":")
    if name not in KNOWN:
        raise ValueError(f"unknown schedule '{shortened(name)}', known: {', '.join(KNOWN)}")
    if not colon:
        return KNOWN[name], None
    try:
        number = parse_count(degree)
    except ValueError as error:
        raise ValueError(f"schedule '{shortened(text)}': {error} of stages a group; write {name}:4") from None
    return KNOWN[name].at(number).kind, number


def fill_of(schedule: str | Fill) -> Fill:
    """Return the schedule of a name (`zb-h1`, `interleaved-1f1b:4`), by default with the fewest stages a group."""
    if isinstance(schedule, Fill):
        return schedule
    kind, degree = parse_kind(schedule)
    return kind.at(degree)


def label_of(schedule: Schedule) -> str:
    """Return the name of a built schedule, with its degree of interleaving as in :attr:`Fill.label`."""
    if schedule.name not in KNOWN:
        return schedule.name
    return KNOWN[schedule.name].at(schedule.n_stages // schedule.n_ranks).label


def build(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Build the schedule of a name (`zb-h1`, `interleaved-1f1b:4`).

    An unknown name, or counts that it does not allow, raise ValueError.
    """
    kind, degree = parse_kind(name)
    if degree is not None and n_stages != degree * n_ranks:
        raise ValueError(f"{name} of {n_stages} stages on {n_ranks} ranks: use {degree * n_ranks} stages")
    return kind.build(n_stages, n_ranks, n_microbatches)


def allows(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> bool:
    """Return True if `build` would succeed for the given counts, without building the schedule."""
    try:
        KNOWN[name].check(name, n_stages, n_ranks, n_microbatches)
    except ValueError:
        return False
    return True
