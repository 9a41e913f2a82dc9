"""Actions of a pipeline schedule, overlapped pairs, rows of them per rank, and their text form.

    2F0                     stage 2, forward, microbatch 0
    2B0                     full backward: gradients of input and weights
    2I0  2W0                the same in two halves: of the input (sent on at once), of the weights (any time later)
    (0F4;7B1)OVERLAP_F_B    a forward and a backward that share the device, as DualPipeV wants them

The names are those that `torch.distributed.pipelining` prints (`_Action.__repr__` in its `schedules.py`, torch 2.13).
A schedule is data: which rank holds which stages, and what each rank does in which order. Times are not part of it,
and transfers follow from the edges between stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from hardware_profiles.strict import parse_count

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MAX_LISTED = 12  # failures named in one error; the rest is counted
MOST_FORWARDS = 1 << 18
"""Most forwards of a step, over all stages: these are built and simulated in seconds, and take 1 GB."""


class Action(NamedTuple):
    """One computation: a NamedTuple, because a planner makes and hashes millions of them."""

    stage: int
    kind: str  # one of KINDS
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward issued together."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap


def parts(step: Step) -> tuple[Action, ...]:
    """Return the actions of one step, in the order in which they count for memory."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


@dataclass(frozen=True)
class Schedule:
    """The steps of every rank, in order.

    `stages_of_rank[r]` are the stages that rank r holds, `rows[r]` its steps. `forward_only` schedules have no
    backward. Built by `builders`, `search` or `parse`; `validate` checks it.
    """

    name: str
    n_stages: int
    n_microbatches: int
    stages_of_rank: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[Step, ...], ...]
    forward_only: bool = False

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """The rank of each stage."""
        return {stage: rank for rank, stages in enumerate(self.stages_of_rank) for stage in stages}

    @cached_property
    def flat_rows(self) -> tuple[tuple[Action, ...], ...]:
        """The rows with overlapped pairs split into their actions."""
        return tuple(tuple(a for step in row for a in parts(step)) for row in self.rows)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) of all actions, rank by rank."""
        for rank, row in enumerate(self.flat_rows):
            for action in row:
                yield rank, action

    def text(self) -> str:
        """Return one line for the schedule and one for each rank; `parse` reads it back."""
        tail = " forward-only" if self.forward_only else ""
        lines = [f"schedule {self.name} stages {self.n_stages} microbatches {self.n_microbatches}{tail}"]
        for rank, (stages, row) in enumerate(zip(self.stages_of_rank, self.rows, strict=True)):
            numbers = " ".join(str(s) for s in stages)
            lines.append(f"rank {rank} holds {numbers}: " + " ".join(str(step) for step in row))
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def validate(self) -> Schedule:
        """Return itself if it is complete and ordered; raise ValueError with everything that is wrong.

        Every microbatch is computed on every stage exactly once, on the stage's rank, and backward after forward.
        """
        if wrong := _wrong(self):
            more = f"\n  and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
            listed = "\n  ".join(wrong[:MAX_LISTED])
            raise ValueError(f"schedule '{self.name}' is not valid:\n  {listed}{more}")
        return self


def check_size(n_stages: int, n_microbatches: int) -> None:
    """Refuse a schedule with too many actions to build and simulate within seconds, by a ValueError."""
    if n_stages * n_microbatches > MOST_FORWARDS:
        stages = "1 stage" if n_stages == 1 else f"{n_stages:,} stages"
        raise ValueError(
            f"{n_microbatches:,} microbatches of {stages} are {n_stages * n_microbatches:,} forwards a step, at most "
            f"{MOST_FORWARDS:,} are planned: use fewer"
        )


def _wrong(schedule: Schedule) -> list[str]:
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    if n_stages < 1 or n_microbatches < 1:
        return [f"{n_stages} stages and {n_microbatches} microbatches: both must be at least 1"]
    if len(schedule.stages_of_rank) != len(schedule.rows):
        return [f"{len(schedule.stages_of_rank)} ranks hold stages, {len(schedule.rows)} ranks have a row"]
    holders: dict[int, list[int]] = {}
    for rank, stages in enumerate(schedule.stages_of_rank):
        for stage in stages:
            holders.setdefault(stage, []).append(rank)
    wrong: list[str] = []
    for stage in sorted(set(holders) | set(range(n_stages))):
        ranks = holders.get(stage, [])
        if not 0 <= stage < n_stages:
            wrong.append(f"stage {stage} on rank {ranks[0]} does not exist: there are {n_stages}, from 0")
        elif len(ranks) != 1:
            wrong.append(f"stage {stage} is on {f'ranks {ranks}' if ranks else 'no rank'}, not on one")
    seen: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(schedule.rows):
        place = 0
        for step in row:
            wrong += [f"rank {rank}, action {place}: {step} {problem}" for problem in _wrong_pair(step)]
            for action in parts(step):
                if problem := _wrong_action(action, rank in holders.get(action.stage, ()), n_microbatches):
                    wrong.append(f"rank {rank}, action {place}: {action} {problem}")
                else:
                    key = (action.stage, action.microbatch)
                    seen[key] = seen.get(key, "") + action.kind
                place += 1
    allowed = ("F",) if schedule.forward_only else ("FB", "FIW")
    for stage, microbatch in product(range(n_stages), range(n_microbatches)):
        kinds_run = seen.get((stage, microbatch), "")
        if kinds_run not in allowed:
            ran = " ".join(f"{stage}{kind}{microbatch}" for kind in kinds_run) or "nothing"
            wanted = " or ".join(" ".join(f"{stage}{k}{microbatch}" for k in kinds) for kinds in allowed)
            wrong.append(f"stage {stage}, microbatch {microbatch}: {ran}, but needs {wanted}, in this order")
    return wrong


def _wrong_pair(step: Step) -> Iterator[str]:
    if isinstance(step, Overlap):
        f, b = step
        if f.kind != "F" or b.kind not in "BI":
            yield "must pair a forward with a backward"
        elif f.stage == b.stage and f.microbatch == b.microbatch:
            yield "overlaps a backward with its own forward"


def _wrong_action(action: Action, is_held: bool, n_microbatches: int) -> str:
    if action.kind not in KINDS:
        return f"is of no known kind ({', '.join(KINDS)})"
    if not is_held:
        return "is of a stage that this rank does not hold"
    exists = 0 <= action.microbatch < n_microbatches
    return "" if exists else f"is of a microbatch that does not exist: there are {n_microbatches}, from 0"


_HEAD = re.compile(r"schedule (\S+) stages (\d+) microbatches (\d+)( forward-only)?")
_ROW = re.compile(r"rank (\d+) holds((?: \d+)*):(.*)")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B")


def parse_step(text: str) -> Step:
    """Parse `2F0` or `(0F4;7B1)OVERLAP_F_B`; anything else raises ValueError."""
    if match := _ACTION.fullmatch(text):
        return Action(parse_count(match[1]), match[2], parse_count(match[3]))
    if match := _OVERLAP.fullmatch(text):
        forward, backward = parse_step(match[1]), parse_step(match[2])
        assert isinstance(forward, Action) and isinstance(backward, Action)
        return Overlap(forward, backward)
    raise ValueError(f"'{text}' is no action: write 2F0 (stage, one of {', '.join(KINDS)}, microbatch)")


def parse(text: str) -> Schedule:
    """Parse the text of `Schedule.text()`, and validate it. Blank lines and comments (#) are skipped.

    A ValueError names the line, its text and what was expected.
    """
    lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1)]
    lines = [(i, line) for i, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ValueError("no schedule: the text is empty")
    number, first = lines[0]
    head = _HEAD.fullmatch(first)
    if head is None:
        raise ValueError(f"line {number}: '{first}' should read 'schedule NAME stages N microbatches N [forward-only]'")
    n_stages, n_microbatches = parse_count(head[2]), parse_count(head[3])
    check_size(n_stages, n_microbatches)
    stages_of_rank: list[tuple[int, ...]] = []
    rows: list[tuple[Step, ...]] = []
    for number, line in lines[1:]:
        match = _ROW.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number}: '{line[:40]}' should read 'rank R holds STAGE ...: ACTION ...'")
        if parse_count(match[1]) != len(rows):
            raise ValueError(f"line {number}: rank {match[1]} where rank {len(rows)} is expected")
        row = []
        for place, word in enumerate(match[3].split()):
            try:
                row.append(parse_step(word))
            except ValueError as error:
                raise ValueError(f"line {number}, rank {len(rows)}, action {place}: {error}") from None
        stages_of_rank.append(tuple(map(parse_count, match[2].split())))
        rows.append(tuple(row))
    if not rows:
        raise ValueError(f"line {number}: schedule '{head[1]}' has no rows of ranks")
    forward_only = head[4] is not None
    schedule = Schedule(head[1], n_stages, n_microbatches, tuple(stages_of_rank), tuple(rows), forward_only)
    return schedule.validate()
