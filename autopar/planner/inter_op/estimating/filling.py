"""Stages filled with options of blocks before any stage is planned: as many blocks as pace and memory allow.

A stage that has room takes the fast options of its blocks, one that keeps many microbatches in flight takes smaller
ones for as many blocks as it must (:class:`Filler`). For a pace (seconds that no stage may exceed) blocks are filled in
from the last stage to the first, as many as fit the pace and the memory with the microbatches that the place in the
schedule keeps in flight; the least pace at which all blocks find room is found by bisection (:class:`Places`). Greedy
filling is optimal here: a stage that takes fewer blocks never helps those before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.estimating.block_costs import BlockOption, Menus, kinds_of, menus_of
from autopar.planner.intra_op.building.parameter_load import together
from autopar.words.meshes import Mesh
from cost_models.schedules import Fill

LEAST_BYTES = 1e-9
"""Ways that need no more bytes are taken first, as if they needed this much."""


@dataclass(frozen=True)
class Filled:
    """A stage put together from options of blocks.

    Attributes:
        seconds: the seconds of a microbatch.
        gather_seconds, reduction_seconds, optimizer_seconds: once a step, of the simulation's phases.
        recomputed: number of blocks of which something is recomputed.
        forward_seconds: the part of a microbatch's seconds that is forward.
        weight_seconds: the part of its backward that may run later: none where a block is recomputed.
        kept_bytes: bytes saved for one microbatch in flight; the rest of ``n_bytes`` is there all the time.
        static_bytes: the rest of ``n_bytes``, with this stage's part of what its group needs once.
        once_bytes: what is there while one stage of a group works, once for all of them: of blocks that are recomputed,
            and of parameters that are gathered for a use.
    """

    seconds: float
    n_bytes: float
    recomputed: int
    forward_seconds: float = 0.0
    weight_seconds: float = 0.0
    kept_bytes: float = 0.0
    static_bytes: float = 0.0
    once_bytes: float = 0.0
    gather_seconds: float = 0.0
    reduction_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """All that happens once a step."""
        return self.gather_seconds + self.reduction_seconds + self.optimizer_seconds

    @property
    def backward_seconds(self) -> float:
        """The part of a microbatch's seconds that is backward."""
        return self.seconds - self.forward_seconds


@dataclass
class Filler:
    """Stages of a chain of blocks on one kind of mesh: the least time for which a stage fits its memory.

    Between the leanest options and the fastest ones, blocks go step by step along the convex hull of seconds over
    bytes, the best ratio first: optimal but for what is left over by the last step.

    Attributes:
        kinds: number of the kind of every block.
        menus: options of each kind.
        chunks: stages of a group, of which one works at a time.
    """

    kinds: Sequence[int]
    menus: Mapping[int, tuple[BlockOption, ...]]
    microbatches: int
    chunks: int = 1
    _count: list[list[int]] = field(init=False)
    _hulls: dict[tuple[int, float], list[BlockOption]] = field(default_factory=dict)
    _known: dict[tuple[tuple[int, ...], float, float], Filled | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = sorted(self.menus)
        self._count = [[0] for _ in self._names]
        for kind in self.kinds:
            for counts, name in zip(self._count, self._names, strict=True):
                counts.append(counts[-1] + (kind == name))

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of all blocks, each in its fastest option."""
        counts = {name: of_kind[-1] for name, of_kind in zip(self._names, self._count, strict=True)}
        return sum(n * min(w.seconds for w in self.menus[name]) for name, n in counts.items())

    def stage(self, first: int, end: int, in_flight: float, memory_bytes: float) -> Filled | None:
        """Return blocks ``first`` to ``end`` in this stage's part of memory; None if not even the leanest fit."""
        counts = tuple(of_kind[end] - of_kind[first] for of_kind in self._count)
        key = counts, in_flight, memory_bytes
        if key not in self._known:
            reserved = 0.0
            filled = self._fill(counts, in_flight, memory_bytes)
            while filled is not None and filled.once_bytes / self.chunks > reserved:
                reserved = filled.once_bytes / self.chunks
                filled = self._fill(counts, in_flight, memory_bytes - reserved)
            if filled is not None:
                needed = filled.n_bytes + filled.once_bytes / self.chunks
                filled = replace(filled, n_bytes=needed, static_bytes=needed - in_flight * filled.kept_bytes)
            self._known[key] = filled
        return self._known[key]

    def _fill(self, counts: tuple[int, ...], in_flight: float, memory_bytes: float) -> Filled | None:
        """Return the stage, its ``n_bytes`` without what it needs once."""
        hulls = [self._hull(name, in_flight) for name in self._names]
        used = [(n, hull) for n, hull in zip(counts, hulls, strict=True) if n]
        taken = [[0] * (len(hull) - 1) + [n] for n, hull in used]  # all start with the leanest
        left = memory_bytes - sum(n * self._bytes(hull[-1], in_flight) for n, hull in used)
        if left < 0:
            return None
        steps = []
        for k, (_, hull) in enumerate(used):
            for w in range(len(hull) - 1, 0, -1):
                more = self._bytes(hull[w - 1], in_flight) - self._bytes(hull[w], in_flight)
                steps.append((-(self._total(hull[w]) - self._total(hull[w - 1])) / max(more, LEAST_BYTES), k, w, more))
        for _, k, w, more in sorted(steps):
            n = taken[k][w] if more <= 0 else min(taken[k][w], int(left / more))
            taken[k][w] -= n
            taken[k][w - 1] += n
            left -= n * more
        picked = [(n, w) for ns, (_, hull) in zip(taken, used, strict=True) for n, w in zip(ns, hull, strict=True)]
        picked = [(n, w) for n, w in picked if n]
        again = sum(n for n, w in picked if w.recomputed)
        choices = [w for _, w in picked]
        once = max((w.recompute_peak_bytes for w in choices), default=0.0)
        once += max((w.peak_bytes for w in choices), default=0.0)
        waits = together([(n, w.load) for n, w in picked]).exposed()
        forward = sum(n * w.forward_seconds for n, w in picked) + waits.forward_each
        return Filled(
            forward + sum(n * w.backward_seconds for n, w in picked) + waits.backward_each,
            memory_bytes - left, again, forward,
            0.0 if again else sum(n * w.weight_seconds for n, w in picked), sum(n * w.kept_bytes for n, w in picked),
            once_bytes=once, gather_seconds=waits.gathers, reduction_seconds=waits.reductions,
            optimizer_seconds=sum(n * w.optimizer_seconds for n, w in picked),
        )  # fmt: skip

    def _total(self, option: BlockOption) -> float:
        return self.microbatches * option.seconds + option.step_seconds

    @staticmethod
    def _bytes(option: BlockOption, in_flight: float) -> float:
        return option.static_bytes + in_flight * option.kept_bytes

    def _hull(self, kind: int, in_flight: float) -> list[BlockOption]:
        """Return the options on the lower convex hull of total seconds over bytes, the fastest first."""
        if (kind, in_flight) not in self._hulls:
            points = sorted(self.menus[kind], key=lambda w: (self._bytes(w, in_flight), self._total(w)))
            hull: list[BlockOption] = []
            for option in points:
                if hull and self._total(option) >= self._total(hull[-1]):
                    continue
                while len(hull) > 1 and self._slope(hull[-2], hull[-1], in_flight) >= self._slope(
                    hull[-2], option, in_flight
                ):
                    hull.pop()
                hull.append(option)
            self._hulls[kind, in_flight] = hull[::-1]
        return self._hulls[kind, in_flight]

    def _slope(self, a: BlockOption, b: BlockOption, in_flight: float) -> float:
        return (self._total(b) - self._total(a)) / (self._bytes(b, in_flight) - self._bytes(a, in_flight))


@dataclass
class Fillers:
    """The fillers of a chain of blocks, for any mesh."""

    menus: Menus
    blocks: Sequence[Block]
    microbatches: int
    _fillers: dict[tuple[Mesh, tuple[int, ...], int | None, int, bool], Filler | None] = field(
        default_factory=dict, init=False
    )

    def of(
        self, mesh: Mesh, devices: Sequence[int], only: int | None = None, chunks: int = 1, fastest: bool = False
    ) -> Filler | None:  # fmt: skip
        """Return the filler of a mesh with ``chunks`` stages a group; None if a block cannot be planned on it."""
        key = mesh, tuple(devices), only, chunks, fastest
        if key not in self._fillers:
            menus = menus_of(self.menus, self.blocks, mesh, devices, only, fastest)
            filler = Filler(kinds_of(self.blocks), menus, self.microbatches, chunks) if menus is not None else None
            self._fillers[key] = filler
        return self._fillers[key]


@dataclass
class Places:
    """The stages of one schedule, to be filled.

    Attributes:
        memory_bytes: the bytes of a device of each group; stages of a group share it equally.
        fillers: what stages of each group cost.
        in_flight: microbatches, by stage, counted for all that a group holds.
    """

    fill: Fill
    microbatches: int
    memory_bytes: Sequence[float]
    fillers: Sequence[Filler]
    n_blocks: int

    def __post_init__(self) -> None:
        self.groups = len(self.fillers)
        chunks = self.fill.chunks
        self.n_stages = self.groups * chunks
        self.memory = [n / chunks for n in self.memory_bytes]
        stages_of = self.fill.kind.placement(self.n_stages, self.groups)
        self.group_of = {s: g for g, of_group in enumerate(stages_of) for s in of_group}
        self.in_flight = [
            self.fill.in_flight(self.group_of[s], self.groups, self.microbatches) for s in range(self.n_stages)
        ]

    def best(self, most: float = inf) -> list[tuple[int, Filled]] | None:
        """Return the first block and the stage of every place at the least pace; None if that is more than ``most``."""
        widest = self._filled(most)
        if widest is None:
            return None
        high = max(s.seconds for _, s in widest)
        low, stages_found = min(f.least_seconds for f in self.fillers) / self.n_stages, widest
        while high - low > EFFORT.pace_precision * high:
            middle = (low + high) / 2
            stages = self._filled(middle)
            if stages is None:
                low = middle
            else:
                stages_found, high = stages, max(s.seconds for _, s in stages)
        return stages_found

    def fit(self, stages: Sequence[tuple[int, Filled]]) -> bool:
        """Return whether stages that were filled whatever memory they need are within their shares of it."""
        return all(stage.n_bytes <= self.memory[self.group_of[s]] for s, (_, stage) in enumerate(stages))

    def _filled(self, pace: float) -> list[tuple[int, Filled]] | None:
        """Return stages none of which is slower than a pace."""
        end, guess, filled = self.n_blocks, 1, []
        for s in range(self.n_stages - 1, -1, -1):
            one = self._longest(s, end, pace, guess)
            if one is None:
                return None
            filled.append(one)
            guess, end = end - one[0], one[0]
        return filled[::-1] if end == 0 else None

    def _longest(self, s: int, end: int, pace: float, guess: int) -> tuple[int, Filled] | None:
        """Return stage ``s`` ending at ``end`` with the most blocks, ``guess`` or so, and its first block."""
        group, most = self.group_of[s], end - s
        filler, in_flight, memory = self.fillers[group], self.in_flight[s], self.memory[group]
        best: Filled | None = None

        def fits(n: int) -> bool:
            nonlocal best
            stage = filler.stage(end - n, end, in_flight, memory)
            if stage is None or stage.seconds > pace:
                return False
            best = stage
            return True

        low, high, step, n = 0, most + 1, 1, max(1, min(guess, most))  # low fits, high does not
        while high - low > 1:
            if fits(n):
                low, n = n, min(n + step, high - 1)
            else:
                high, n = n, max(n - step, low + 1)
            step *= 2
            if low and high <= most:
                n = (low + high) // 2
        if best is None or not low:
            return None
        return end - low, best
