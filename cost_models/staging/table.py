"""All stages that there can be, as arrays: one row for each run of block classes and submesh that can hold it.

Runs of equal classes share their rows, so 126 alike layers ask for 126 costs a submesh and not for 8,001.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules.schedule_kinds import Fill

from .words import StageCost, StagingProblem, Submesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
INF = float("inf")


@dataclass(frozen=True)
class StageTable:
    """Rows of possible stages.

    Attributes:
        run_of: {(first block, last block): run}.
        rows_of: first row of each run, and the end.
        submesh: index into the problem's submeshes, of each row.
        n_blocks, costs: the number of blocks and the costs of each row.
    """

    problem: StagingProblem
    run_of: dict[tuple[int, int], int]
    rows_of: Ints
    submesh: Ints
    n_blocks: Ints
    costs: tuple[StageCost, ...]

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """The numbers of the costs, and the memory of each row's device."""
        memory = self.problem.memory_bytes
        of_submesh = np.array([memory[s.device_type] for s in self.problem.submeshes])
        return {
            "forward": np.array([c.forward_seconds for c in self.costs]),
            "backward": np.array([c.backward_seconds for c in self.costs]),
            "step": np.array([c.step_seconds for c in self.costs]),
            "static": np.array([c.static_bytes for c in self.costs]),
            "kept": np.array([c.activation_bytes for c in self.costs]),
            "least": np.array([_least(c) for c in self.costs]),
            "extra": np.array([c.recompute_seconds for c in self.costs]),
            "memory": of_submesh[self.submesh],
        }

    @cached_property
    def places(self) -> tuple[Ints, list[Submesh]]:
        """Place of each submesh, and a submesh for each place."""
        number_of: dict[Hashable, int] = {}
        stand: list[Submesh] = []
        index = []
        for s in self.problem.submeshes:
            key = self.problem.place(s)
            if key not in number_of:
                number_of[key] = len(stand)
                stand.append(s)
            index.append(number_of[key])
        return np.array(index), stand

    @cached_property
    def used(self) -> Ints:
        """Devices of every type that each submesh takes: [submeshes, types]."""
        types = [p.device_type for p in self.problem.pools]
        return np.array([[s.n_devices if s.device_type == t else 0 for t in types] for s in self.problem.submeshes])

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """First row, and run, of each group of rows of one run, device type and size; they follow each other."""
        run = np.repeat(np.arange(len(self.rows_of) - 1), np.diff(self.rows_of))
        sizes = [(s.device_type, s.n_devices) for s in self.problem.submeshes]
        size = np.array([sizes.index(s) for s in sizes])[self.submesh]
        new = np.ones(len(run), dtype=bool)
        new[1:] = (run[1:] != run[:-1]) | (size[1:] != size[:-1])
        starts = np.flatnonzero(new)
        return starts, run[starts]

    @cached_property
    def stage_edges(self) -> list[Floats]:
        """Seconds one way [place before, place after] for every cut; the end of the chain passes nothing on."""
        problem, (_, stand) = self.problem, self.places
        names: Sequence[Hashable] = problem.classes or range(problem.n_blocks)
        nothing = np.zeros((len(stand), len(stand)))
        by_classes: dict[Hashable, Floats] = {}
        seconds = [nothing]
        for cut in range(1, problem.n_blocks):
            key = names[cut - 1], names[cut]
            if key not in by_classes:
                by_classes[key] = np.array([[problem.transfer(cut, a, b) for b in stand] for a in stand], dtype=float)
            seconds.append(by_classes[key])
        return [*seconds, nothing]

    def recomputed(self, in_flight: Floats, memory_factor: float = 1.0) -> Floats:
        """Return the fewest recomputed blocks with which each row fits [rows, in flight]; inf where none do.

        `in_flight` is a row of microbatch counts; `memory_factor` scales the devices' memory.
        """
        c = {name: column[:, None] for name, column in self.columns.items()}
        n = self.n_blocks[:, None].astype(float)
        f = np.asarray(in_flight, dtype=float)[None, :]
        memory = c["memory"] * memory_factor

        def fits(q: Floats) -> NDArray[np.bool_]:
            # The same operations in the same order as StageCost.needed_bytes: equal to the last bit.
            return c["static"] + f * (c["kept"] - q * (c["kept"] - c["least"]) / n) <= memory

        none = np.zeros((len(n), f.shape[1]))
        whole = none + n
        if self.problem.recompute == "never":
            count = none
        elif self.problem.recompute == "stage":
            count = np.where(fits(none), none, whole)
        else:
            saving = f * (c["kept"] - c["least"])
            with np.errstate(divide="ignore", invalid="ignore"):
                count = np.ceil((c["static"] + f * c["kept"] - memory) / saving * n)
            count = np.clip(np.where(np.isfinite(count), count, n), 0, n)
            count = np.where(fits(np.maximum(count - 1, 0)), np.maximum(count - 1, 0), count)  # rounding errors
            count = np.where(fits(count), count, np.minimum(count + 1, n))
            count = np.where(fits(none), none, count)
        allowed = fits(count) & ((count == 0) | (c["least"] < c["kept"]))
        return np.where(allowed, count, INF)


def _least(cost: StageCost) -> float:
    return cost.activation_bytes if cost.recomputed_bytes is None else cost.recomputed_bytes


def table(problem: StagingProblem) -> StageTable:
    """Compute the cost of every distinct run on every submesh."""
    names: Sequence[Hashable] = problem.classes or range(problem.n_blocks)
    # A run's identity is built from the run that is one block shorter, so that no tuple of labels is hashed whole.
    run_number: dict[tuple[int, Hashable], int] = {}
    run_of: dict[tuple[int, int], int] = {}
    starts: list[tuple[int, int]] = []
    for first in range(problem.n_blocks):
        before = -1
        for last in range(first, problem.n_blocks):
            run = run_number.setdefault((before, names[last]), len(run_number))
            if run == len(starts):
                starts.append((first, last))
            run_of[first, last] = before = run
    rows_of, submesh, n_blocks, costs = [0], [], [], []
    sizes = [(s.device_type, s.n_devices) for s in problem.submeshes]
    by_size = sorted(range(len(sizes)), key=lambda i: (sizes.index(sizes[i]), i))
    for first, last in starts:
        for i in by_size:
            s = problem.submeshes[i]
            cost = problem.cost(first, last, s)
            if cost is not None:
                submesh.append(i)
                n_blocks.append(last - first + 1)
                costs.append(cost)
        rows_of.append(len(costs))
    return StageTable(
        problem, run_of, np.array(rows_of), np.array(submesh, dtype=np.int64), np.array(n_blocks, dtype=np.int64),
        tuple(costs),
    )  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """The rows' seconds under one schedule, by place in the pipeline: column r is the r-th stage from the end.

    All are [rows, r]; column 0 is unused. inf where memory does not allow it, or another row is better in everything.
    """

    seconds: Floats
    backward: Floats
    recomputed: Floats


def timed(
    table: StageTable, fill: Fill, n_microbatches: int, n_stages: int | None, memory_factor: float = 1.0
) -> Timed:
    """Return the times of a schedule; with `n_stages` None it must depend on the distance from the end alone."""
    limit = table.problem.stage_limit if n_stages is None else n_stages
    counts = [fill.in_flight(limit - r, limit, n_microbatches) for r in range(1, limit + 1)]
    distinct, back = np.unique(np.array(counts, dtype=float), return_inverse=True)
    few = table.recomputed(distinct, memory_factor)
    c = table.columns
    share = few / table.n_blocks[:, None].astype(float)
    with np.errstate(invalid="ignore"):
        extra = np.where(few > 0, np.where(np.isfinite(few), few, 0) * c["extra"][:, None], 0.0)
    backward = c["backward"][:, None] + extra / table.n_blocks[:, None].astype(float)
    seconds = np.where(np.isfinite(share), c["forward"][:, None] + backward, INF)
    seconds = np.where(_useless(table, fill, seconds, backward), INF, seconds)
    pick = np.concatenate([[0], back.ravel()])
    return Timed(seconds[:, pick], backward[:, pick], few[:, pick])


def _useless(table: StageTable, fill: Fill, seconds: Floats, backward: Floats) -> NDArray[np.bool_]:
    """Return the rows that another one of the same run, size and place beats in every time."""
    starts, _ = table.groups
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(seconds))))
    place = table.places[0][table.submesh]
    step = table.columns["step"]
    with np.errstate(invalid="ignore"):
        end = fill.bubble * seconds - fill.drain * backward
    useless = np.zeros(seconds.shape, dtype=bool)
    widest = int(np.diff(np.append(starts, len(seconds))).max(initial=1))
    for s in range(1, widest):
        alike = ((group[s:] == group[:-s]) & (place[s:] == place[:-s]))[:, None]
        if not alike.any():
            continue
        a = seconds[:-s], step[:-s, None], end[:-s]
        b = seconds[s:], step[s:, None], end[s:]
        # Of two equal rows the first stays.
        useless[s:] |= alike & (a[0] <= b[0]) & (a[1] <= b[1]) & (a[2] <= b[2])
        useless[:-s] |= alike & (b[0] <= a[0]) & (b[1] <= a[1]) & (b[2] <= a[2]) & (
            (b[0] < a[0]) | (b[1] < a[1]) | (b[2] < a[2])
        )  # fmt: skip
    return useless
