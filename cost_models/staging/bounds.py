"""Lower bounds of the rest of a chain, so that the search can drop what cannot win.

For the blocks [0, k) on what is left of the devices, with b = bubble, m microbatches and a weight w per device of each
type (the faster, the heavier), whatever the stages are:

    pace * left >= sum over stages of w p t            (every stage is at most as slow as the pace)

so for any share f in [0, 1] of the pace, the step is at least

    b * (sum so far) + (1 - f) (m - b) * (pace so far) + min over partitions of sum (b + f (m - b) w p / left) t

and since the stages take no more devices than are left, for any g >= 0 and any seconds P

    g (m - b) P (sum of w p / left - 1)

may be added inside: a rent for devices, P about as long as the slowest stage will be. The minimum over partitions is a
shortest path over (blocks left, stages so far), because memory, and with it recomputing, depends on the stages behind.
f = 0 is the least sum alone; f = 1 spreads the work over the devices; the rent keeps from counting on more devices than
there are, busy for a part of the time each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .table import INF, Floats, Ints, StageTable, Timed

SHARES = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.8, 0.8), (0.8, 1.6))
"""Pairs (f, g)."""
LEVELS = 40
"""Amounts of devices for which the path is solved; others take the next larger one, which bounds them too."""
HAIR = 1e-9
"""Part of an amount that is left out, so that rounding never takes a larger level than needed."""


@dataclass(frozen=True)
class Bounds:
    """`rest[r, i, k]`: behind are r stages, i counts the levels of each share; `levels` of devices ascend."""

    weight: Floats
    levels: Floats
    rest: Floats

    def seconds(self, total: Floats, pace: Floats, left: Ints, k: Ints, r: Ints, bubble: float, m: int) -> Floats:
        """Return a lower bound of the step of any plan that ends in these r stages. `left` [.., types] devices."""
        amount = left @ self.weight
        level = np.minimum(np.searchsorted(self.levels, amount * (1 - HAIR)), len(self.levels) - 1)
        best = np.zeros_like(total)
        for i, (share, _) in enumerate(SHARES):
            best = np.maximum(best, (1 - share) * (m - bubble) * pace + self.rest[r, i * len(self.levels) + level, k])
        return bubble * total + best

    @property
    def least_seconds(self) -> float:
        """A lower bound of the whole chain."""
        return float(max(self.rest[0, (i + 1) * len(self.levels) - 1, -1] for i in range(len(SHARES))))

    @property
    def least_sum_seconds(self) -> float:
        """A lower bound of the weighted sum of the stages of the whole chain."""
        return float(self.rest[0, 0, -1])


def bounds(
    table: StageTable, times: Timed, bubble: float, m: int, n_stages: int | None, pace_limit: float,
    rent_seconds: float, n_levels: int = LEVELS,
) -> Bounds:  # fmt: skip
    """Return bounds for stages of at most `pace_limit` seconds, exactly `n_stages` unless None. `rent_seconds` is P."""
    problem = table.problem
    n, n_runs = problem.n_blocks, len(table.rows_of) - 1
    limit = times.seconds.shape[1] - 1
    starts, run_of_group = table.groups  # of the shapes of one size the fastest is enough
    least = np.minimum.reduceat(times.seconds, starts, axis=0) if len(starts) else np.full((0, limit + 1), INF)
    least = np.where(least <= pace_limit, least, INF)
    used = table.used[table.submesh[starts]]
    weight = _weights(least[:, 1], used, table.n_blocks[starts])
    whole = float(np.array(list(problem.devices.values())) @ weight)
    levels = whole * np.arange(1, n_levels + 1) / n_levels
    share, charge = np.repeat(np.array(SHARES).T, n_levels, axis=1)
    part = (used @ weight)[:, None] / np.tile(levels, len(SHARES))
    factor = bubble + (m - bubble) * share * part
    rent = (m - bubble) * charge * rent_seconds
    run_starts = np.searchsorted(run_of_group, np.arange(n_runs))
    filled = np.append(run_starts[1:], len(run_of_group)) > run_starts
    index = np.array([[table.run_of.get((a, b), 0) for b in range(n)] for a in range(n)])
    rest = np.full((limit + 1, n + 1, len(share)), INF)
    rest[limit if n_stages else slice(None), 0] = 0.0
    run = np.full((n_runs, len(share)), INF)
    for r in range(limit - 1, -1, -1):
        if filled.any() and (r == limit - 1 or not np.array_equal(least[:, r + 1], least[:, r + 2])):
            least_after = least[:, r + 1, None]
            price = np.where(
                np.isfinite(least_after), np.where(np.isfinite(least_after), least_after, 0.0) * factor + part * rent,
                INF,
            )  # fmt: skip
            run[filled] = np.minimum.reduceat(price, run_starts[filled], axis=0)
        for end in range(1, n + 1):
            rest[r, end] = (rest[r + 1, :end] + run[index[:end, end - 1]]).min(axis=0)
    return Bounds(weight, levels, np.ascontiguousarray(rest.transpose(0, 2, 1)) - rent[:, None])


def _weights(least: Floats, used: Ints, n_blocks: Ints) -> Floats:
    """Return the speed of a device of each type: the inverse of the mean device-seconds of a block on it."""
    types = used.shape[1]
    speeds = np.zeros(types)
    for t in range(types):
        of_type = (used[:, t] > 0) & np.isfinite(least)
        per_block = used[of_type, t] * least[of_type] / n_blocks[of_type]
        speeds[t] = 1 / per_block.mean() if len(per_block) and per_block.mean() > 0 else 0.0
    # A type that cannot run anything within the limit weighs nothing; all zero would divide by zero.
    return speeds / speeds.max() if speeds.max() > 0 else np.ones(types)
