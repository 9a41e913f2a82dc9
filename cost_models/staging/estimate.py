"""The objective, written once for whoever chooses stages: seconds of a step, from what every group has to do.

With times t_i of a microbatch on group i, one-way transfers x_i behind it (of all its stages together), m
microbatches, and a schedule's `bubble` b and `drain` d:

    t_i    = forward_i + backward_i + recomputing_i            (+ 2 x_i when transfers do not overlap)
    pace   = max over i of t_i                                 (and of x_i when they do)
    step   = b * sum(t_i + 2 x_i) + (m - b) * pace + tail      (the sum has each 2 x_i once)
    tail_i = max(step_i, tail_{i+1} - d * (backward_i + recomputing_i + x_i)),    tail = tail_0

With b = 1 and no transfers this is Alpa's recurrence (Zheng et al., OSDI 2022, eq. 2), plus the once-a-step work:
group i's last backward ends before those of the groups ahead of it, so its reductions hide behind them. In schedules
that put weight gradients last (d = 0) nothing hides: tail = max of step_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cost_models.schedules.schedule_kinds import Fill

from .words import StageChoice, StageEstimate, StagingEstimate, StagingProblem


class StageLoad(NamedTuple):
    """Seconds of one group of devices.

    They are those of a microbatch (t_i and its backward), once a step (`once_seconds`), and of a microbatch's transfers
    one way to the groups that follow its stages.
    """

    seconds: float
    backward_seconds: float
    once_seconds: float
    stage_edge_seconds: float


def estimated_seconds(
    bubble: float, drain: float, n_microbatches: int, loads: Sequence[StageLoad], overlap: bool = True
) -> float:
    """Return the formula above, for groups from the first to the last, with the schedule's `bubble` and `drain`.

    With `overlap`, transfers overlap with computation; otherwise a group's seconds include them.
    """
    total, pace, tail = 0.0, 0.0, 0.0
    for load in reversed(loads):
        total += load.seconds + (2 * load.stage_edge_seconds if overlap else 0.0)
        pace = max(pace, load.seconds, load.stage_edge_seconds if overlap else 0.0)
        tail = max(load.once_seconds, tail - drain * (load.backward_seconds + load.stage_edge_seconds))
    return bubble * total + (n_microbatches - bubble) * pace + tail


def evaluate(
    problem: StagingProblem, fill: Fill, n_microbatches: int, choices: Sequence[StageChoice]
) -> StagingEstimate:
    """Return the estimate of chosen stages, memory counted but not judged."""
    n, chunks = len(choices), fill.chunks
    stages, loads = [], []
    for i, c in enumerate(choices):
        cost = problem.cost(c.first, c.last, c.submesh)
        if cost is None:
            raise ValueError(f"blocks {c.first}-{c.last} cannot run on {c.submesh}")
        blocks = c.last - c.first + 1
        behind = problem.transfer(c.last + 1, c.submesh, choices[i + 1].submesh) if i + 1 < n else 0.0
        in_flight = fill.in_flight(i, n, n_microbatches)
        backward = cost.backward_seconds + cost.extra_seconds(c.n_recomputed, blocks)
        seconds = cost.forward_seconds + backward + (0.0 if problem.overlap else 2 * chunks * behind)
        loads.append(StageLoad(seconds, backward, cost.step_seconds, chunks * behind))
        stages.append(
            StageEstimate(
                c, seconds, cost.forward_seconds, backward, cost.step_seconds, in_flight,
                cost.needed_bytes(c.n_recomputed, blocks, in_flight), problem.memory_bytes[c.submesh.device_type],
            )
        )  # fmt: skip
    estimate = estimated_seconds(fill.bubble, fill.drain, n_microbatches, loads, problem.overlap)
    return StagingEstimate(fill.name, n_microbatches, tuple(stages), estimate)


def bounded(candidate: StagingEstimate, lower_bound_seconds: float) -> StagingEstimate:
    """Return a candidate with its lower bound."""
    return replace(candidate, lower_bound_seconds=lower_bound_seconds)
