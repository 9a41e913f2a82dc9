"""The dynamic program: from the last stage to the first, all cuts at once, dropping what cannot win.

A *label* is a way to stage the blocks [k, L): number of stages r, devices used of each type, place of its first stage,
and three times of `estimate`: the weighted sum (b * sum), the pace, and the tail. Labels with the same blocks are
extended by every possible stage that ends at block k - 1; memory depends on r alone, because a stage's microbatches in
flight are counted from the end of the pipeline. A label is dropped

- when another with the same r and place has used no more devices and is no worse in sum, pace and sum + tail. Then no
  future is better: sum and pace grow alike, and the tail becomes max(own, tail - c), so that the end is
  max(sum + own, sum + tail - c), and so on;
- when its bound (see `bounds`) is above the limit of what is looked for.

What is left is exact. With a `width`, only the best so many labels (by bound) of each k go on: the least bound that was
dropped so bounds what could have been missed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules.schedule_kinds import Fill

from .bounds import Bounds, bounds
from .table import INF, Floats, Ints, StageTable, Timed
from .words import StageChoice

CELLS = 1 << 20
"""Pairs of label and stage that are looked at together: bounds the memory of one step."""
ROUND = 1 + 1e-12
"""Limits are widened by this, so that rounding never drops an equal."""
RENT = 1.25
"""The pace that the rent of devices assumes, in multiples of the least possible, while no plan is known."""
SHIFTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Labels before a label, in the order that puts good ones first, with which it is compared."""
TIGHTENED = 0.98
"""Bounds are recomputed only if the limit of the pace has fallen below this share of what they were made with."""


@dataclass
class _Labels:
    """Columns of equal length; `used` [labels, types]; `parent` is the number of the label that was extended."""

    total: Floats
    pace: Floats
    tail: Floats
    used: Ints
    r: Ints
    place: Ints
    parent: Ints
    row: Ints
    bound: Floats

    def take(self, which: NDArray) -> _Labels:
        """Return some of the labels."""
        return _Labels(*(getattr(self, f.name)[which] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.total)


def _joined(parts: list[_Labels]) -> _Labels:
    return _Labels(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(_Labels)))


@dataclass(frozen=True)
class BestByStages:
    """The best of each number of stages within the limit: {stages: (seconds, choices)}.

    `bound_seconds` is a lower bound of every plan, within the limit, that was not found. `labels` counts the work.
    """

    best: dict[int, tuple[float, tuple[StageChoice, ...]]]
    bound_seconds: float
    labels: int


def solve(
    table: StageTable, times: Timed, fill: Fill, m: int, n_stages: int | None, limit_seconds: float, width: int,
    only: NDArray[np.bool_] | None = None,
) -> BestByStages:  # fmt: skip
    """Return plans of at most `limit_seconds`, of `n_stages` stages where `times` are for that number alone.

    `only` marks the rows of the table that may be used.
    """
    if only is not None:
        times = Timed(np.where(only[:, None], times.seconds, INF), times.backward, times.recomputed)
    return _Search(table, times, fill, m, n_stages, limit_seconds, width).run()


@dataclass
class _Search:
    table: StageTable
    times: Timed
    fill: Fill
    m: int
    n_stages: int | None
    limit_seconds: float
    width: int

    def run(self) -> BestByStages:
        """Return the best plans by number of stages."""
        problem = self.table.problem
        n = problem.n_blocks
        self.most = problem.stage_limit if self.n_stages is None else self.n_stages
        self.devices = np.array([problem.devices[p.device_type] for p in problem.pools])
        bound = self._bounds()
        if bound is None:
            return BestByStages({}, INF, 0)
        self.bound: Bounds = bound
        self.dropped, self.count = INF, 0
        types = self.table.used.shape[1]
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        root = _Labels(zero, zero, zero, np.zeros((1, types), dtype=np.int64), none, none, none - 1, none - 1, zero)
        waiting: dict[int, list[_Labels]] = {n: [root]}
        kept: list[_Labels] = []
        begin = 0  # number of the first label of the present k
        self.ends: list[tuple[int, int]] = []  # (k, number of its first label)
        for k in range(n, 0, -1):
            if not waiting.get(k):
                continue
            labels = self._reduced(_joined(waiting.pop(k)))
            kept.append(labels)
            self.ends.append((k, begin))
            self._extend(k, labels, begin, waiting)
            begin += len(labels)
        return self._finish(waiting.pop(0, []), kept)

    def _bounds(self) -> Bounds | None:
        """Return bounds with the slowest stage that the limit allows; the stages within it are the ones to try."""
        b, limit = self.fill.bubble, self.limit_seconds * ROUND
        paced = self.m > b  # otherwise the slowest stage costs nothing more
        self.pace_limit = limit / (self.m - b) if paced else INF
        rent = self.pace_limit if np.isfinite(self.pace_limit) else 0.0
        result = None
        if np.isfinite(limit):  # a cheap look, before the whole table: one level is enough for the whole chain
            glance = bounds(self.table, self.times, b, self.m, self.n_stages, self.pace_limit, rent, 1)
            if not glance.least_seconds <= limit:
                return None
        for _ in range(2):  # a smaller limit makes better bounds, which make a smaller limit
            result = bounds(self.table, self.times, b, self.m, self.n_stages, self.pace_limit, rent)
            if not result.least_seconds <= limit or result.least_seconds == INF:
                return None
            if not paced:
                break
            rent = min(self.pace_limit, RENT * result.least_seconds / (self.m - b))
            lower = (limit - result.least_sum_seconds) / (self.m - b)
            if np.isfinite(self.pace_limit) and lower >= self.pace_limit * TIGHTENED:
                break
            self.pace_limit = min(lower, self.pace_limit)
        self.possible = np.isfinite(self.times.seconds) & (self.times.seconds <= self.pace_limit * ROUND)
        self.some: NDArray[np.bool_] = np.asarray(self.possible[:, 1:].any(axis=1))
        return result

    def _stages(self, k: int) -> tuple[Ints, Ints]:
        """Return (first block, row) of every stage that ends at block k - 1."""
        t = self.table
        first, rows = [], []
        for a in range(k):
            run = t.run_of[a, k - 1]
            of_run = np.arange(t.rows_of[run], t.rows_of[run + 1])
            of_run = of_run[self.some[of_run]]
            rows.append(of_run)
            first.append(np.full(len(of_run), a))
        return np.concatenate(first), np.concatenate(rows)

    def _extend(self, k: int, labels: _Labels, begin: int, waiting: dict[int, list[_Labels]]) -> None:
        first, rows = self._stages(k)
        if not len(rows):
            return
        step = max(1, CELLS // max(1, len(labels)))
        for low in range(0, len(rows), step):
            self._pairs(k, labels, begin, first[low : low + step], rows[low : low + step], waiting)

    def _pairs(
        self, k: int, labels: _Labels, begin: int, first: Ints, rows: Ints, waiting: dict[int, list[_Labels]]
    ) -> None:
        """Extend every label by every stage: [stages, labels], thinned out test by test."""
        table, fill, problem = self.table, self.fill, self.table.problem
        submesh = table.submesh[rows]
        r = labels.r + 1
        ok = r <= self.most
        stages_fit = np.ones((len(rows), len(labels)), dtype=bool) & ok[None, :]
        inside = np.minimum(r, self.most)
        stages_fit &= self.possible[rows[:, None], inside[None, :]]
        if self.n_stages is not None:  # the first stage is the last to come, and every other one needs a block
            rest = self.n_stages - r
            stages_fit &= np.where(first[:, None] == 0, rest[None, :] == 0, rest[None, :] >= 1)
            stages_fit &= first[:, None] >= rest[None, :]
        for t, size in enumerate(self.devices):
            stages_fit &= table.used[submesh, t][:, None] + labels.used[None, :, t] <= size
        i, j = np.nonzero(stages_fit)
        if not len(i):
            return
        rows, first, submesh, r = rows[i], first[i], submesh[i], r[j]
        used = table.used[submesh] + labels.used[j]
        place = table.places[0][submesh]
        edges = table.stage_edges[k][place, labels.place[j]] if k < problem.n_blocks else np.zeros(len(i))
        cross = fill.chunks * edges
        seconds = self.times.seconds[rows, r] + (0.0 if problem.overlap else 2 * cross)
        total = labels.total[j] + (seconds + (2 * cross if problem.overlap else 0.0))
        pace = np.maximum(labels.pace[j], seconds)
        if problem.overlap:
            pace = np.maximum(pace, cross)
        tail = np.maximum(
            table.columns["step"][rows], labels.tail[j] - fill.drain * (self.times.backward[rows, r] + cross)
        )
        left = self.devices - used
        bound = self.bound.seconds(total, pace, left, first, r, fill.bubble, self.m) + np.where(first == 0, tail, 0.0)
        good = (bound <= self.limit_seconds * ROUND) & np.isfinite(bound) & ((first == 0) | left.any(axis=1))
        if problem.all_devices:
            good &= (first > 0) | (used == self.devices).all(axis=1)
        if not good.any():
            return
        new = _Labels(total, pace, tail, used, r, place, begin + j, rows, bound).take(good)
        first = first[good]
        self.count += len(new)
        order = np.argsort(first, kind="stable")
        new, first = new.take(order), first[order]
        values, starts = np.unique(first, return_index=True)
        for value, low, high in zip(values, starts, [*starts[1:], len(first)]):
            waiting.setdefault(int(value), []).append(new.take(np.arange(low, high)))

    def _reduced(self, labels: _Labels) -> _Labels:
        """Return the labels without those that others make useless, and at most `width`."""
        labels = self._undominated(labels, same_devices=True)
        if not self.table.problem.all_devices:
            labels = self._undominated(labels, same_devices=False)
        if len(labels) > self.width:
            order = np.lexsort((labels.total, labels.bound))
            self.dropped = min(self.dropped, float(labels.bound[order[self.width]]))
            labels = labels.take(np.sort(order[: self.width]))
        return labels

    def _undominated(self, labels: _Labels, same_devices: bool) -> _Labels:
        """Drop useless labels by comparing each with some shortly before it; what stays may be useless too."""
        n_places = len(self.table.places[1])
        for _ in range(2):
            group = labels.r * n_places + labels.place
            if same_devices:
                for t, size in enumerate(self.devices):
                    group = group * (int(size) + 1) + labels.used[:, t]
            sums = labels.total * self.fill.bubble
            order = np.lexsort((*labels.used.T, labels.pace, sums + labels.tail, sums, group))
            labels, group, sums = labels.take(order), group[order], sums[order]
            ends = sums + labels.tail
            useless = np.zeros(len(labels), dtype=bool)
            for s in SHIFTS:
                if s >= len(labels):
                    break
                worse = (group[s:] == group[:-s]) & (labels.pace[s:] >= labels.pace[:-s]) & (ends[s:] >= ends[:-s])
                if not same_devices:
                    worse &= (labels.used[s:] >= labels.used[:-s]).all(axis=1)
                useless[s:] |= worse
            if not useless.any():
                break
            labels = labels.take(~useless)
        return labels

    def _finish(self, waiting: list[_Labels], kept: list[_Labels]) -> BestByStages:
        if not waiting:
            return BestByStages({}, self.dropped, self.count)
        last = _joined(waiting)
        b = self.fill.bubble
        seconds = b * last.total + (self.m - b) * last.pace + last.tail
        order = np.lexsort((last.row, last.parent, seconds))
        everything = _joined(kept)
        best: dict[int, tuple[float, tuple[StageChoice, ...]]] = {}
        for i in order:
            r = int(last.r[i])
            if r not in best and seconds[i] <= self.limit_seconds * ROUND:
                best[r] = float(seconds[i]), self._choices(last, int(i), everything)
        return BestByStages(best, self.dropped, self.count)

    def _choices(self, last: _Labels, i: int, everything: _Labels) -> tuple[StageChoice, ...]:
        chosen, first, labels = [], 0, last
        while labels.parent[i] >= 0:
            row, r = int(labels.row[i]), int(labels.r[i])
            end = first + int(self.table.n_blocks[row])
            submesh = self.table.problem.submeshes[self.table.submesh[row]]
            chosen.append(StageChoice(first, end - 1, submesh, int(self.times.recomputed[row, r])))
            first, i, labels = end, int(labels.parent[i]), everything
        return tuple(chosen)
