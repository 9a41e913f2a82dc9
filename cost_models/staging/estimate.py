"""The objective, written once for whoever chooses stages: seconds of a step, from the stages.

With stage times t_i, one-way transfers x_i behind stage i, m microbatches, and a schedule's `bubble` b and `drain` d:

    t_i    = forward_i + backward_i + recomputing_i            (+ 2 c x_i when transfers do not overlap)
    pace   = max over i of t_i                                 (and of c x_i when they do)
    step   = b * sum(t_i + 2 c x_i) + (m - b) * pace + tail    (the sum has each 2 c x_i once)
    tail_i = max(step_i, tail_{i+1} - d * (backward_i + recomputing_i + c x_i)),    tail = tail_0

where c is the number of chunks a group holds (a boundary is crossed once for each). With b = 1 and no transfers this
is Alpa's recurrence (Zheng et al., OSDI 2022, eq. 2), plus the once-a-step work: stage i's last backward ends before
those of the stages ahead of it, so its reductions hide behind them. In schedules that put weight gradients last
(d = 0) nothing hides: tail = max of step_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .fill import Fill
from .words import Candidate, Choice, Problem, Stage


def evaluate(problem: Problem, fill: Fill, n_microbatches: int, choices: Sequence[Choice]) -> Candidate:
    """The estimate of chosen stages, memory counted but not judged. Raises ValueError where a cost is None."""
    n, chunks = len(choices), fill.chunks
    stages = []
    for i, c in enumerate(choices):
        cost = problem.cost(c.first, c.last, c.submesh)
        if cost is None:
            raise ValueError(f"blocks {c.first}-{c.last} cannot run on {c.submesh}")
        blocks = c.last - c.first + 1
        behind = problem.transfer(c.last + 1, c.submesh, choices[i + 1].submesh) if i + 1 < n else 0.0
        in_flight = fill.in_flight(i, n, n_microbatches)
        backward = cost.backward_seconds + cost.extra_seconds(c.n_recomputed, blocks)
        seconds = cost.forward_seconds + backward + (0.0 if problem.overlap else 2 * chunks * behind)
        stages.append(
            Stage(
                c, seconds, cost.forward_seconds, backward, behind, cost.step_seconds, in_flight,
                cost.needed_bytes(c.n_recomputed, blocks, in_flight), problem.memory_bytes[c.submesh.device_type],
            )
        )  # fmt: skip
    return Candidate(fill.name, n_microbatches, tuple(stages), step_seconds(problem, fill, n_microbatches, stages))


def step_seconds(problem: Problem, fill: Fill, n_microbatches: int, stages: Sequence[Stage]) -> float:
    """The formula above."""
    total, pace, tail = 0.0, 0.0, 0.0
    for s in reversed(stages):
        crossing = fill.chunks * s.transfer_seconds
        total += s.seconds + (2 * crossing if problem.overlap else 0.0)
        pace = max(pace, s.seconds, crossing if problem.overlap else 0.0)
        tail = max(s.step_seconds, tail - fill.drain * (s.backward_seconds + crossing))
    return fill.bubble * total + (n_microbatches - fill.bubble) * pace + tail


def bounded(candidate: Candidate, lower_bound_seconds: float) -> Candidate:
    return replace(candidate, lower_bound_seconds=lower_bound_seconds)
