"""A cut that is only estimated so far, run in the simulator: what its schedule really makes of the stages' times.

The estimate of :mod:`.equal` is a formula for stages that are much alike. The simulation knows the order
of actions, and that a backward which recomputes is not split; it costs a hundredth of planning the stages exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.estimating.estimates import EstimatedCut
from autopar.planner.inter_op.simulating.timing import OnceAStep
from cost_models.schedules import Edge, build, simulate, times


def simulated(cut: EstimatedCut, microbatches: int) -> float:
    """Return the seconds of a step of the cut.

    Many microbatches are extrapolated from two smaller numbers: beyond the ramps, the time grows by the same with each
    microbatch, at least by that of the slowest group.
    """
    n = len(cut.groups)
    if n == 1:
        return microbatches * cut.stages[0].seconds + cut.stages[0].step_seconds
    stages = cut.stages
    timing = times(
        len(stages), [s.forward_seconds for s in stages],
        [max(0.0, s.seconds - s.forward_seconds - s.weight_seconds) for s in stages],  # all may be the weights'
        [s.weight_seconds for s in stages],
        edges=[Edge(s, s + 1, wire, wire) for s, wire in enumerate(cut.stage_edge)],
    )  # fmt: skip
    few, more = EFFORT.steady_microbatches * n, (EFFORT.steady_microbatches + 1) * n
    schedule = build(cut.schedule.name, len(stages), n, min(microbatches, more))
    timeline = simulate(schedule, timing)
    last, step = timeline.makespan_seconds, OnceAStep.of(stages, schedule.stages_of_rank).more(timeline)
    if microbatches <= more:
        return last + step
    first = simulate(build(cut.schedule.name, len(stages), n, few), timing).makespan_seconds
    slowest = max(sum(stages[s].seconds for s in of_group) for of_group in schedule.stages_of_rank)
    return last + max((last - first) / n, slowest) * (microbatches - more) + step


def best(cuts: Sequence[EstimatedCut], microbatches: int, most: int) -> list[tuple[float, EstimatedCut]]:
    """Return up to ``most`` of the cuts with the best estimates, with their simulated seconds, the best first.

    Those whose estimates are beyond what was simulated already are left out: estimates are seldom too long.
    """
    timed: list[tuple[float, EstimatedCut]] = []
    for cut in cuts[:most]:
        if cut.seconds > EFFORT.estimate_too_long * min((s for s, _ in timed), default=inf):
            break
        timed.append((simulated(cut, microbatches), cut))
    return sorted(timed, key=lambda f: f[0])
