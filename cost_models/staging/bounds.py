"""What the rest of a chain costs at least, so that the search can drop what cannot win.

For the blocks [0, k) on what is left of the devices, with b = bubble, m microbatches and a weight w per device of each
type (the faster, the heavier), whatever the stages are:

    pace * left >= sum over stages of w p t            (every stage is at most as slow as the pace)

so for any share f in [0, 1] of the pace, the step is at least

    b * (sum so far) + (1 - f) (m - b) * (pace so far) + min over partitions of sum (b + f (m - b) w p / left) t

The minimum over partitions is a shortest path. f = 0 is the least sum alone; f = 1 spreads the work over the devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .table import INF, Floats, Ints, Table, Timed

SHARES = (0.0, 0.5, 0.8, 1.0)
LEVELS = 512
"""Amounts of devices for which the path is solved; others take the next larger one, which bounds them too."""


@dataclass(frozen=True)
class Bounds:
    """`rest[f][level, k]` for the shares of SHARES; `weight` of a device of each type; `levels` ascending."""

    weight: Floats
    levels: Floats
    rest: tuple[Floats, ...]

    def seconds(self, total: Floats, pace: Floats, left: Ints, k: Ints, bubble: float, m: int) -> Floats:
        """At least so long is the step of any plan that ends in these stages. `left` [..., types] devices."""
        amount = left @ self.weight
        # A hair more, so that rounding never takes the level below.
        level = np.minimum(np.searchsorted(self.levels, amount * (1 - 1e-9)), len(self.levels) - 1)
        best = np.zeros_like(total)
        for share, rest in zip(SHARES, self.rest):
            best = np.maximum(best, (1 - share) * (m - bubble) * pace + rest[level, k])
        return bubble * total + best


def bounds(table: Table, times: Timed, bubble: float, m: int, pace_limit: float) -> Bounds:
    """For stages of at most `pace_limit` seconds."""
    problem = table.problem
    n, n_runs = problem.n_blocks, len(table.rows_of) - 1
    least = times.seconds[:, 1:].min(axis=1, initial=INF)
    least = np.where(least <= pace_limit, least, INF)
    used = table.used[table.submesh]
    weight = _weights(table, least, used)
    per_row = used @ weight
    whole = float(np.array(list(problem.devices.values())) @ weight)
    unit = float(per_row[np.isfinite(least)].min(initial=whole)) if len(per_row) else whole
    count = int(min(LEVELS, max(1, np.ceil(whole / unit)))) if unit else 1
    levels = whole * np.arange(1, count + 1) / count
    starts = table.rows_of[:-1]
    filled = table.rows_of[1:] > starts
    index = np.array([[table.run_of.get((a, b), 0) for b in range(n)] for a in range(n)])
    found = []
    for share in SHARES:
        own = levels if share else levels[:1]
        run = np.full((n_runs, len(own)), INF)
        if filled.any():
            with np.errstate(invalid="ignore"):
                price = least[:, None] * (bubble + share * (m - bubble) * per_row[:, None] / own[None, :])
            run[filled] = np.minimum.reduceat(price, starts[filled], axis=0)
        path = np.full((len(own), n + 1), INF)
        path[:, 0] = 0.0
        for end in range(1, n + 1):
            path[:, end] = (path[:, :end] + run[index[:end, end - 1]].T).min(axis=1)
        found.append(path if share else np.repeat(path, len(levels), axis=0))
    return Bounds(weight, levels, tuple(found))


def _weights(table: Table, least: Floats, used: Ints) -> Floats:
    """Speed of a device of each type: the inverse of the device-seconds of the whole chain on that type alone."""
    types = used.shape[1]
    found = np.zeros(types)
    for t in range(types):
        own = (used[:, t] > 0) & np.isfinite(least)
        per_block = used[own, t] * least[own] / table.n_blocks[own]
        found[t] = 1 / per_block.mean() if len(per_block) and per_block.mean() > 0 else 0.0
    # A type that cannot run anything within the limit weighs nothing; all zero would divide by zero.
    return found / found.max() if found.max() > 0 else np.ones(types)
