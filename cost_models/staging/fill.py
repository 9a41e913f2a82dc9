"""What a schedule costs before it is simulated: microbatches in flight, and the share of the bubble it leaves.

    schedule           in flight on stage i of S (whole stages)        bubble   drain   source
    gpipe              m                                               1        1       Huang et al., arXiv:1811.06965
    1f1b               min(m, S - i)                                   1        1       PipeDream; Megatron-LM
    interleaved-1f1b   (2 (S - i - 1) + (v - 1) g + 1) / v, at most m  1/v      1/v     Megatron, arXiv:2104.04473
    zb-h1              min(m, S)                                       1/3      0       Qi et al., arXiv:2401.10241
    zb-v               min(m, S)                                       1/6      0       Qi et al., arXiv:2405.15362
    dualpipe-v         S + 1/2                                         1/6      0       DeepSeek-V3, arXiv:2412.19437

`v` = 2 stages a rank in interleaved-1f1b; g = m // max(1, m // S) microbatches go through a chunk before the next
chunk's turn. The zero-bubble rows have their bubbles for equal forward, input-gradient and weight-gradient times and
m >= S, and in-flight counts that are reached by the worst rank. A stage here is all that one group of devices holds:
where a schedule cuts it into chunks (`chunks`), they are counted together, and a boundary is crossed once a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fill:
    """How a schedule fills a pipeline.

    Attributes:
        name: of the schedule in `cost_models.pipeline.SCHEDULES`.
        in_flight: (stage i, stages S, microbatches m) -> microbatches whose activations stage i keeps at once. Never
            less for a smaller i, nor for a larger S with the same i.
        bubble: the share of the other stages' times that the step waits for: all of it in 1F1B.
        drain: the share of earlier stages' last backwards behind which a stage's once-a-step work hides.
        by_distance: `in_flight` depends on S - i and m only: one search finds all numbers of stages.
        chunks: stages of the schedule that one group of devices holds.
        least: (S) -> the fewest microbatches that it allows.
    """

    name: str
    in_flight: Callable[[int, int, int], float]
    bubble: float = 1.0
    drain: float = 1.0
    by_distance: bool = False
    chunks: int = 1
    least: Callable[[int], int] = lambda n_stages: 1

    def __post_init__(self) -> None:
        if not 0 <= self.drain <= self.bubble <= 1:
            raise ValueError(f"{self.name}: 0 <= drain {self.drain:g} <= bubble {self.bubble:g} <= 1 does not hold")


def _interleaved(i: int, n: int, m: int) -> float:
    a_round = m // max(1, m // n)
    return min(2 * m, 2 * (n - i - 1) + a_round + 1) / 2


FILLS = {
    fill.name: fill
    for fill in (
        Fill("gpipe", lambda i, n, m: m, by_distance=True),
        Fill("1f1b", lambda i, n, m: min(m, n - i), by_distance=True),
        Fill("interleaved-1f1b", _interleaved, bubble=1 / 2, drain=1 / 2, chunks=2),
        Fill("zb-h1", lambda i, n, m: min(m, n), bubble=1 / 3, drain=0.0),
        Fill("zb-v", lambda i, n, m: min(m, n), bubble=1 / 6, drain=0.0, chunks=2),
        Fill("dualpipe-v", lambda i, n, m: n + 0.5, bubble=1 / 6, drain=0.0, chunks=2, least=lambda n: 2 * n),
    )
}


def fill_of(schedule: str | Fill) -> Fill:
    """The rule of that name. Raises ValueError for an unknown one."""
    if isinstance(schedule, Fill):
        return schedule
    if schedule not in FILLS:
        raise ValueError(f"unknown schedule '{schedule}', known: {', '.join(FILLS)}")
    return FILLS[schedule]
