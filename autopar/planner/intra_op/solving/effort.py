"""When a run of the solver ends without a proof: after so much work, which is the same on every machine, however busy.

Seconds of the clock would give the same problem one plan on an idle machine and another on a loaded one. They count
only where a user asked for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Effort:
    """What one run of the solver may take.

    Attributes:
        iterations: of the simplex method, to solve a relaxation.
        work: of branch and bound: steps, each of which is a place where HiGHS asks whether to go on, times thousands of
            entries of the matrix. A larger program gets fewer steps, as each takes longer: between 2 and 10 ms for a
            thousand entries.
        cpu_seconds: for CBC, which counts neither.
        clock_seconds: those that a user asked for; nothing else counts then.
    """

    iterations: int
    work: float
    cpu_seconds: float
    clock_seconds: float = inf

    def steps_of(self, n_entries: int) -> int:
        """Steps of branch and bound for a program of so many entries."""
        return max(LEAST_STEPS, round(min(self.work * 1000 / max(n_entries, 1), MOST_STEPS)))


LEAST_STEPS, MOST_STEPS = 6, 1_000_000
"""However large or small a program is."""
PATIENT = Effort(iterations=3_000_000, work=20_000, cpu_seconds=120.0)
"""About two minutes, for runs without which nothing is known."""
BRIEF = Effort(iterations=3_000_000, work=800, cpu_seconds=5.0)
"""About five seconds of branch and bound, where memory binds: there are many runs, and the last percent takes most of
the time."""


def asked_seconds(seconds: float) -> Effort:
    """What a user asked for."""
    return Effort(2**31 - 1, inf, seconds, seconds)


__all__ = ["BRIEF", "PATIENT", "Effort", "asked_seconds"]
