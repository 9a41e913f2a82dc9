"""The schedule over time, as SVG: a lane for each group of devices.

Up to :data:`MOST_ACTIONS` every action is a rectangle, with transfers to other groups below it. Lanes of longer
schedules are histograms: the use of each of :data:`BINS` intervals. So a page stays small for any number of
microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from autopar.plans.plan import Plan
from autopar.report.page.markup import filled, joined, percent
from autopar.report.page.seconds_spent import StageTally
from autopar.words.texts import show_seconds
from cost_models.schedules import Timeline
from cost_models.schedules.actions import KINDS, Step, parts

MOST_ACTIONS = 6000
MOST_STRIPS = 3000
"""Actions up to which each has a strip for the collectives inside it."""
MOST_NUMBERS = 900
"""Actions up to which those that are wide enough have their microbatch written in them."""
BINS = 480
LANE = 30
"""Pixels of a lane: 18 of actions, 4 of collectives inside them, 3 of transfers to other groups."""


def gantt(plan: Plan, timeline: Timeline, of_stages: Sequence[StageTally]) -> Markup:
    """Return the lanes and their axis."""
    whole = plan.seconds or 1.0
    n_actions = sum(map(len, timeline.schedule.flat_rows))
    drawn = _Lanes(plan, timeline, of_stages, whole, n_actions)
    lanes = joined(drawn.lane(group) for group in range(timeline.schedule.n_ranks))
    return filled(
        '<div class="gantt" tabindex="0" role="region" aria-label="The schedule, which scrolls sideways when zoomed">'
        '<div class="gantt-inner">{}{}</div></div>',
        lanes, _axis(whole),
    )  # fmt: skip


def is_aggregated(timeline: Timeline) -> bool:
    """Return True if lanes are histograms."""
    return sum(map(len, timeline.schedule.flat_rows)) > MOST_ACTIONS


class _Lanes:
    """Lanes drawn on one scale of ``whole`` seconds."""

    def __init__(
        self, plan: Plan, timeline: Timeline, of_stages: Sequence[StageTally], whole: float, n_actions: int
    ) -> None:
        self.plan, self.timeline, self.whole, self.n_actions = plan, timeline, whole, n_actions
        self.inside = [_shares(tally, timeline, number) for number, tally in enumerate(of_stages)]
        self.once = [sum(sum(of_stages[s].once.values()) for s in stages) for stages in plan.schedule.stages_of_rank]

    def lane(self, group: int) -> Markup:
        """Return the lane of a group."""
        timeline = self.timeline
        stages = timeline.schedule.stages_of_rank[group]
        busy, makespan = timeline.busy_seconds[group], timeline.makespan_seconds
        which = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        words = (
            f"group {group}, {which}: computes {show_seconds(busy)} of {show_seconds(makespan)}, "
            f"idle {1 - busy / makespan if makespan else 0.0:.1%}"
        )
        drawn = self._binned(group) if self.n_actions > MOST_ACTIONS else self._actions(group)
        once = filled(
            '<rect class="O" x="{}" y="2" width="{}" height="18" data-a="once a step: gradients and gathers of '
            'parameters"/>', percent(makespan / self.whole), percent(self.once[group] / self.whole),
        ) if self.once[group] else Markup("")  # fmt: skip
        return filled(
            '<div class="lane"><span class="lane-name">{}</span><svg height="{}" width="100%" tabindex="0" role="img" '
            'data-lane="{}" aria-label="{}">{}{}</svg></div>',
            group, LANE, words, words, drawn, once,
        )  # fmt: skip

    def _actions(self, group: int) -> Markup:
        timeline, pieces = self.timeline, []
        row = timeline.schedule.rows[group]
        for step, start, end in zip(row, timeline.starts[group], timeline.ends[group], strict=True):
            kind, share = parts(step)[0].kind, (end - start) / self.whole
            x, width = percent(start / self.whole), percent(share)
            pieces.append(filled(
                '<rect class="{}" x="{}" y="2" width="{}" height="18" data-a="{}" data-t="{}"/>',
                _colour(step, timeline), x, width, step, _span(start, end),
            ))  # fmt: skip
            inside = self.inside[parts(step)[0].stage][kind] if self.n_actions <= MOST_STRIPS else 0.0
            if inside > 0.01:
                pieces.append(
                    filled('<rect class="X" x="{}" y="20" width="{}" height="4"/>', x, percent(share * inside))
                )
            if self.n_actions <= MOST_NUMBERS and share > 0.016:
                middle = percent((start + end) / 2 / self.whole)
                pieces.append(filled('<text x="{}" y="15">{}</text>', middle, parts(step)[0].microbatch))
        rank_of = timeline.schedule.rank_of_stage
        for use in timeline.transfers if self.n_actions <= MOST_STRIPS else ():
            if rank_of[use.source] == group and use.end_seconds > use.start_seconds:
                pieces.append(filled(
                    '<rect class="X" x="{}" y="26" width="{}" height="3"/>', percent(use.start_seconds / self.whole),
                    percent((use.end_seconds - use.start_seconds) / self.whole),
                ))  # fmt: skip
        return joined(pieces)

    def _binned(self, group: int) -> Markup:
        """Return the part of each interval that a group spends on each kind of action."""
        timeline = self.timeline
        width = self.whole / BINS
        spent = {kind: [0.0] * BINS for kind in KINDS}
        row = timeline.schedule.rows[group]
        for step, start, end in zip(row, timeline.starts[group], timeline.ends[group], strict=True):
            actions = parts(step)
            seconds = [timeline.times.seconds(a.stage, a.kind) for a in actions]
            whole = sum(seconds) or 1.0
            first, last = int(start / width), min(BINS - 1, int(end / width))
            for at in range(first, last + 1):
                covered = min(end, (at + 1) * width) - max(start, at * width)
                for action, own_seconds in zip(actions, seconds, strict=True):
                    spent[action.kind][at] += max(0.0, covered) / width * own_seconds / whole
        base, paths = [0] * BINS, []
        for kind, shares in spent.items():
            text, at = "", 0
            while at < BINS:
                height, until = round(100 * shares[at]), at + 1
                while until < BINS and round(100 * shares[until]) == height and base[until] == base[at]:
                    until += 1
                if height:
                    text += f"M{at} {100 - base[at]}h{until - at}v{-height}h{at - until}z"
                for k in range(at, until):
                    base[k] += height
                at = until
            if text:
                paths.append(filled('<path class="{}" d="{}"/>', kind, text))
        busy = ",".join(map(str, base))
        return filled(
            '<svg y="2" height="22" width="100%" viewBox="0 0 {} 100" preserveAspectRatio="none" '
            'data-busy="{}">{}</svg>',
            BINS, busy, joined(paths),
        )  # fmt: skip


def _shares(tally: StageTally, timeline: Timeline, number: int) -> dict[str, float]:
    """Return the share of collectives in each kind of action of a stage; a split backward has them in one half."""
    times = timeline.times
    moves = {"F": tally.forward_moves, "B": tally.backward_moves, "I": tally.backward_moves, "W": 0.0}
    return {
        kind: min(1.0, seconds / whole) if (whole := times.seconds(number, kind)) > 0 else 0.0
        for kind, seconds in moves.items()
    }


def _colour(step: Step, timeline: Timeline) -> str:
    """Return the CSS class of a rectangle: its kind, with a shade for the stage where a group has several."""
    actions = parts(step)
    if len(actions) > 1:
        return "FB"
    action = actions[0]
    stages = timeline.schedule.stages_of_rank[timeline.schedule.rank_of_stage[action.stage]]
    return action.kind if len(stages) == 1 else f"{action.kind} s{stages.index(action.stage) % 4}"


def _span(start: float, end: float) -> str:
    return f"{show_seconds(start)} to {show_seconds(end)}: {show_seconds(end - start)}"


def _axis(whole: float) -> Markup:
    """Return five times below the lanes."""
    ticks = joined(
        filled(
            '<text x="{}" y="13" class="{}">{}</text>', percent(k / 4), ("first", "", "", "", "last")[k],
            show_seconds(whole * k / 4),
        )
        for k in range(5)
    )  # fmt: skip
    return filled(
        '<div class="lane axis" aria-hidden="true"><span class="lane-name"></span>'
        '<svg height="18" width="100%">{}</svg></div>', ticks,
    )  # fmt: skip
