"""The message about a schedule that deadlocks."""

from __future__ import annotations

from .actions import Action, Schedule, parts
from .drawing import draw
from .timeline import Timeline


def deadlock_message(timeline: Timeline, lengths: list[int]) -> str:
    """Return who waits for what, the cycle if there is one, and the grid of what ran.

    `lengths[r]` is how many actions of rank r's flat row ran.
    """
    schedule = timeline.schedule
    rows = schedule.flat_rows if timeline.times.overlap == 0 else _first_parts(schedule)
    where = {a: (r, i) for r, row in enumerate(rows) for i, a in enumerate(row)}
    if timeline.times.overlap > 0:
        where |= {a: (r, i) for r, row in enumerate(schedule.rows) for i, s in enumerate(row) for a in parts(s)}
    waits: dict[int, tuple[int | None, str]] = {}
    for rank, done in enumerate(lengths):
        if done >= len(schedule.rows[rank] if timeline.times.overlap > 0 else rows[rank]):
            continue
        heads = parts(schedule.rows[rank][done]) if timeline.times.overlap > 0 else (rows[rank][done],)
        needed = [a for head in heads for a in _needs(head, timeline) if not _ran(a, where, lengths)]
        wanted = [a for a in needed if isinstance(where.get(a), tuple)]
        text = f"rank {rank} waits at action {done}, {'+'.join(str(h) for h in heads)}, for "
        if len(wanted) < len(needed):
            lost = next(a for a in needed if a not in where)
            waits[rank] = (None, text + f"{lost}, which no rank computes")
        else:
            owner, place = where[wanted[0]]
            turn = f"action {place} of rank {owner}" + (", itself, later in its row" if owner == rank else "")
            waits[rank] = (owner, text + f"{wanted[0]} ({turn})")
    culprits = _cycle(waits)
    if len(culprits) == 1:
        what = "itself" if waits[culprits[0]][0] is not None else "what no rank computes"
        head = f"schedule '{schedule.name}' cannot run: rank {culprits[0]} waits for {what}"
    else:
        ring = " -> ".join(str(r) for r in [*culprits, culprits[0]])
        head = f"schedule '{schedule.name}' deadlocks: ranks {ring} wait for each other"
    others = [r for r in waits if r not in culprits]
    lines = [head, *(f"  {waits[r][1]}" for r in culprits)]
    if others:
        lines.append(
            f"  so {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} cannot go on either"
        )
    return "\n".join(lines) + "\nuntil then:\n" + draw(timeline)


def _first_parts(schedule: Schedule) -> list[list[Action]]:
    return [[parts(step)[0] for step in row] for row in schedule.rows]


def _needs(action: Action, timeline: Timeline) -> list[Action]:
    """Return the actions that must precede `action`, in the form (whole or split) that the schedule has."""
    stage, kind, microbatch = action
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    if kind == "F":
        return [Action(e.source, "F", microbatch) for e in timeline.times.edges if e.target == stage]
    present = {a for _, a in timeline.schedule.actions()}
    out = [Action(stage, "F", microbatch)]
    for edge in timeline.times.edges:
        if edge.source == stage:
            half = Action(edge.target, "I", microbatch)
            out.append(half if half in present else Action(edge.target, "B", microbatch))
    return out


def _ran(action: Action, where: dict[Action, tuple[int, int]], lengths: list[int]) -> bool:
    return action in where and where[action][1] < lengths[where[action][0]]


def _cycle(waits: dict[int, tuple[int | None, str]]) -> list[int]:
    """Return the ranks that wait for each other in a ring, or the one that waits for nothing that exists."""
    for rank, (owner, _) in waits.items():
        if owner is None:
            return [rank]
    rank, path = min(waits), []
    while rank not in path:
        path.append(rank)
        owner = waits[rank][0]
        assert owner is not None and owner in waits  # a rank that is done has computed everything in its row
        rank = owner
    return path[path.index(rank) :]
