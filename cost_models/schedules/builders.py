"""The textbook schedules' rows; :mod:`.schedule_kinds` has the records by which they are chosen and built.

    gpipe             all forwards, then all backwards                       Huang et al. 2018, arXiv:1811.06965
    1f1b              backward as soon as possible, S - s kept on stage s    Narayanan et al. 2020, arXiv:2006.09503
    interleaved-1f1b  several stages a rank, 0 1 .. P-1 0 1 ..               Narayanan et al. 2021, arXiv:2104.04473
    zb-h1             split backward; the weights' half fills bubbles        Qi et al. 2023, arXiv:2401.10241
    zb-v              two stages a rank in a V: 0 1 .. P-1 P-1 .. 1 0        Qi et al. 2024, arXiv:2405.15362
    dualpipe-v        V, with forwards and backwards overlapped              DeepSeek-V3, arXiv:2412.19437

The orders are those of `torch.distributed.pipelining.schedules` (2.13; tests compare them), with these differences:

- 1f1b: this is what torch's `Schedule1F1B.step` does. Its list for display, `_get_pipeline_order`, differs:
  the last rank begins with microbatch 1, and a rank has too many forwards if microbatches are fewer than stages.
- zb-h1: torch has no class of this name. Its `ScheduleInterleavedZeroBubble` (ZB1P) with one stage a rank is it: rank r
  warms up with P - 1 - r forwards and runs weight gradients r microbatches late, so that every rank keeps at most P
  microbatches until their weight gradient (figure 2 of the paper). With several stages a rank, torch's order.
  torch refuses microbatch counts that do not divide into rounds even with one stage a rank, where rounds do not matter.
- torch's lists have idle slots (None), which only show how the drawing lines up; here waiting follows from the times.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from .actions import Action, Overlap, Schedule, Step, check_size
from .stage_placement import loop_placement, v_placement


def gpipe(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Run all forwards, then all backwards."""
    one_a_rank("gpipe", n_stages, n_ranks, n_microbatches)
    m = range(n_microbatches)
    rows = [[Action(s, kind, k) for kind in "FB" for k in m] for s in range(n_stages)]
    return _schedule("gpipe", n_stages, n_microbatches, loop_placement(n_stages, n_ranks), rows)


def one_f_one_b(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Run S - 1 - s forwards ahead on stage s, then one forward, one backward in turn."""
    one_a_rank("1f1b", n_stages, n_ranks, n_microbatches)
    rows = []
    for s in range(n_stages):
        ahead = min(n_microbatches, n_stages - 1 - s)
        row = [Action(s, "F", k) for k in range(ahead)]
        for k in range(n_microbatches):
            if ahead + k < n_microbatches:
                row.append(Action(s, "F", ahead + k))
            row.append(Action(s, "B", k))
        rows.append(row)
    return _schedule("1f1b", n_stages, n_microbatches, loop_placement(n_stages, n_ranks), rows)


def never_drained(name: str) -> Callable[[int, int, int], Schedule]:
    """Return the builder of a schedule that runs the rows of 1F1B over a stream of steps, of which this is the first.

    :mod:`.asynchronous` says what it does with weights.
    """

    def build(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
        enough_for_all_stages(name, n_stages, n_ranks, n_microbatches)
        return dataclasses.replace(one_f_one_b(n_stages, n_ranks, n_microbatches), name=name)

    return build


def interleaved(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Run 1F1B over several stages a rank, in rounds of about n_ranks microbatches, depth first.

    The microbatches must divide into max(1, microbatches // ranks) rounds (torch's rule; the paper's is that they be a
    multiple of the ranks).
    """
    return _rounds("interleaved-1f1b", n_stages, n_ranks, n_microbatches, hop=2, split=False)


def zero_bubble_h1(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Run 1F1B with a split backward: the memory of 1F1B, about a third of its bubble with equal halves."""
    return _rounds("zb-h1", n_stages, n_ranks, n_microbatches, hop=1, split=True)


def _rounds(name: str, n_stages: int, n_ranks: int, n_microbatches: int, hop: int, split: bool) -> Schedule:
    """Run `hop` forwards ahead for each rank behind, and a full round for each further stage of the rank."""
    a_round = n_microbatches // equal_rounds(name, n_stages, n_ranks, n_microbatches)
    placement = loop_placement(n_stages, n_ranks)
    n_local = n_stages // n_ranks
    total = n_local * n_microbatches

    def order(stages: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return (stage, microbatch): a round on one stage, then on the next."""
        used = dict.fromkeys(stages, 0)
        out = []
        for i in range(total):
            stage = stages[(i // a_round) % n_local]
            out.append((stage, used[stage]))
            used[stage] += 1
        return out

    rows = []
    for rank, stages in enumerate(placement):
        forwards, backwards = order(stages), order(stages[::-1])
        ahead = min((n_local - 1) * a_round + hop * (n_ranks - 1 - rank), total)
        row = [Action(s, "F", k) for s, k in forwards[:ahead]]
        late = 0
        for i, (s, k) in enumerate(backwards):
            if ahead + i < total:
                stage, microbatch = forwards[ahead + i]
                row.append(Action(stage, "F", microbatch))
            row.append(Action(s, "I" if split else "B", k))
            if split and i >= rank:  # the first `rank` weight gradients wait for the end, where ranks would be idle
                row.append(Action(backwards[late][0], "W", backwards[late][1]))
                late += 1
        if split:
            row += [Action(s, "W", k) for s, k in backwards[late:]]
        rows.append(row)
    return _schedule(name, n_stages, n_microbatches, placement, rows)


def zero_bubble_v(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Run ZB-V: the memory of 1F1B and no bubble but the first forwards, when F, I and W take equally long.

    The order is laid out for at least 2P - 1 microbatches; with fewer, those that do not exist are left out.
    """
    two_a_rank("zb-v", n_stages, n_ranks, n_microbatches)
    placement = v_placement(n_stages, n_ranks)
    n = max(2 * n_ranks - 1, n_microbatches)
    rows = []
    for rank, (down, up) in enumerate(placement):
        row = _Row()
        row.add(down, "F", 2 * (n_ranks - rank) - 1)
        for _ in range(rank):
            row.add(up, "F").add(down, "F")
        for _ in range(n_ranks - rank):
            row.add(up, "F").add(up, "I").add(up, "W")
        while row.count[up, "F"] < row.count[down, "F"] or row.count[down, "F"] < n:
            if row.count[down, "F"] < n:
                row.add(down, "F")
            row.add(down, "I").add(down, "W").add(up, "F").add(up, "I").add(up, "W")
        for _ in range(rank):
            row.add(down, "I").add(up, "I")
        for _ in range(n_ranks - rank):
            row.add(down, "I").add(down, "W")
        row.add(up, "W", row.count[up, "I"] - row.count[up, "W"])
        row.add(down, "W", row.count[down, "I"] - row.count[down, "W"])
        rows.append([a for a in row.actions if a.microbatch < n_microbatches])
    return _schedule("zb-v", n_stages, n_microbatches, placement, rows)


class _Row:
    """A row that counts: the next forward of a stage is of its next microbatch, and so on."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: dict[tuple[int, str], int] = {}

    def next(self, stage: int, kind: str) -> Action:
        """Return the next action of a kind on a stage."""
        microbatch = self.count.get((stage, kind), 0)
        self.count[stage, kind] = microbatch + 1
        return Action(stage, kind, microbatch)

    def add(self, stage: int, kind: str, times: int = 1) -> _Row:
        """Append actions of a kind."""
        self.count.setdefault((stage, kind), 0)
        self.actions += [self.next(stage, kind) for _ in range(times)]
        return self


def dualpipe_v(n_stages: int, n_ranks: int, n_microbatches: int) -> Schedule:
    """Run the V half of DualPipe (github.com/deepseek-ai/DualPipe, dualpipev.py), in its eight steps."""
    as_many_as_stages("dualpipe-v", n_stages, n_ranks, n_microbatches)
    placement = v_placement(n_stages, n_ranks)
    rows = []
    for rank, (down, up) in enumerate(placement):
        rows.append(_dualpipe_row(rank, down, up, n_ranks, n_microbatches))
    return _schedule("dualpipe-v", n_stages, n_microbatches, placement, rows)


def _dualpipe_row(rank: int, down: int, up: int, n_ranks: int, n_microbatches: int) -> list[Step]:
    row: list[Step] = []
    count = {(stage, phase): 0 for stage in (down, up) for phase in "FB"}
    owed: deque[Action] = deque()  # weight gradients whose first half has run

    def forward(stage: int) -> Action:
        count[stage, "F"] += 1
        return Action(stage, "F", count[stage, "F"] - 1)

    def backward(stage: int, kind: str = "B") -> Action:
        count[stage, "B"] += 1
        microbatch = count[stage, "B"] - 1
        if kind == "I":
            owed.append(Action(stage, "W", microbatch))
        return Action(stage, kind, microbatch)

    def weights() -> None:
        if owed:
            row.append(owed.popleft())

    behind = n_ranks - 1 - rank
    row += [forward(down) for _ in range(2 * behind)]  # step 1
    for _ in range(rank + 1):  # 2
        row += [forward(down), forward(up)]
    for _ in range(behind):  # 3
        row.append(backward(up, "I"))
        weights()
        row.append(forward(up))
    for i in range(n_microbatches - 2 * n_ranks + rank + 1):  # 4, the steady state
        if i == 0 and behind == 0:  # the first pair of the last rank is not overlapped: a smaller bubble
            row += [forward(down), backward(up)]
        else:
            row.append(Overlap(forward(down), backward(up)))
        row.append(Overlap(forward(up), backward(down)))
    for _ in range(behind):  # 5
        row.append(backward(up))
        row.append(Overlap(forward(up), backward(down)))
    kind = "B"
    for i in range(rank + 1):  # 6, its second half with split backwards
        turn = i == (rank + 1) // 2
        kind = "I" if turn and rank % 2 == 1 else kind
        row.append(backward(up, kind))
        kind = "I" if turn else kind
        row.append(backward(down, kind))
    for _ in range(behind):  # 7
        weights()
        row.append(backward(down, kind))
    for _ in range(rank + 1):  # 8
        weights()
    return row


def forward_only(
    n_stages: int, n_microbatches: int, stages_of_rank: tuple[tuple[int, ...], ...] | None = None
) -> Schedule:
    """Run `eval`: forwards, no backward, for any placement (default: one stage a rank).

    Ordered by stage + microbatch, the later stage first: what stage s needs comes earlier in that order everywhere, so
    no placement can deadlock it.
    """
    placement = stages_of_rank if stages_of_rank is not None else loop_placement(n_stages, n_stages)
    rows = []
    for stages in placement:
        row = [Action(s, "F", k) for s in stages for k in range(n_microbatches)]
        rows.append(tuple(sorted(row, key=lambda a: (a.stage + a.microbatch, -a.stage))))
    return Schedule("eval", n_stages, n_microbatches, placement, tuple(rows), forward_only=True).validate()


def _schedule(
    name: str, n_stages: int, n_microbatches: int, placement: tuple[tuple[int, ...], ...], rows: list
) -> Schedule:
    return Schedule(name, n_stages, n_microbatches, placement, tuple(tuple(row) for row in rows))


def _counts(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> None:
    if min(n_stages, n_ranks, n_microbatches) < 1:
        raise ValueError(
            f"{name} of {n_stages} stages on {n_ranks} ranks with {n_microbatches} microbatches: all must be at least 1"
        )
    check_size(n_stages, n_microbatches)


def one_a_rank(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> None:
    """Refuse several stages a rank."""
    _counts(name, n_stages, n_ranks, n_microbatches)
    if n_stages != n_ranks:
        raise ValueError(
            f"{name} holds one stage a rank, not {n_stages} stages on {n_ranks} ranks: use as many stages as ranks, or "
            "interleaved-1f1b, zb-h1, zb-v, dualpipe-v for several a rank"
        )


def two_a_rank(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> None:
    """Refuse other than two stages a rank."""
    _counts(name, n_stages, n_ranks, n_microbatches)
    if n_stages != 2 * n_ranks:
        raise ValueError(
            f"{name} holds two stages a rank, not {n_stages} stages on {n_ranks} ranks: use {2 * n_ranks} stages"
        )


def equal_rounds(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> int:
    """Return the number of rounds of the microbatches."""
    _counts(name, n_stages, n_ranks, n_microbatches)
    loop_placement(n_stages, n_ranks)
    n_rounds = max(1, n_microbatches // n_ranks) if n_stages > n_ranks or name != "zb-h1" else 1
    if n_microbatches % n_rounds:
        raise ValueError(
            f"{name} runs {n_microbatches} microbatches on {n_ranks} ranks in {n_rounds} rounds, which must be equal: "
            f"use {n_microbatches - n_microbatches % n_ranks} or {-(-n_microbatches // n_ranks) * n_ranks} microbatches"
        )
    return n_rounds


def enough_for_all_stages(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> None:
    """Refuse several stages a rank, and fewer microbatches than stages, of which two weight versions are not enough."""
    one_a_rank(name, n_stages, n_ranks, n_microbatches)
    if n_microbatches < n_stages:
        raise ValueError(
            f"{name} needs at least as many microbatches a step as stages, not {n_microbatches} for {n_stages} stages: "
            f"use {n_stages} microbatches"
        )


def as_many_as_stages(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> None:
    """Refuse fewer microbatches than stages."""
    two_a_rank(name, n_stages, n_ranks, n_microbatches)
    if n_microbatches < n_stages:
        raise ValueError(
            f"{name} needs at least as many microbatches as stages, not {n_microbatches} for {n_stages} stages: "
            f"use {n_stages} microbatches, or zb-v"
        )
