"""Stages on groups of devices: for every group size, mesh shape and schedule, the cut with the best estimate.

Groups are equal, or, on large clusters of several device types, equal among those of a type. The estimate is that of
:mod:`cost_models.staging.estimate`. For a pace (seconds that no stage may exceed) blocks are filled in from the last
stage to the first, as many as fit the pace and the memory with the microbatches that the place in the schedule keeps
in flight; the least pace at which all blocks find room is found by bisection. Greedy filling is optimal here: a stage
that takes fewer blocks never helps those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from autopar.errors import InfeasibleError
from autopar.meshes import Mesh
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.menu import Filled, Filler, Menus, kinds_of, menus_of
from autopar.texts import show_bytes
from cost_models.costs import costs_of
from cost_models.pipeline import Fill, fill_of, parse_kind
from cost_models.staging.estimate import StageLoad, estimated_seconds
from hardware_profiles import Cluster

FAR = 1.3
"""A mesh is looked at further if its lower bound is within this factor of the best estimate."""
NEAR = 1.05
"""The same where numbers of microbatches compete, so that there are more ways to come close."""
MOST_PLACES = 64
"""Meshes, or pairs of them for two device types, that are filled at most."""
ALONE = Mesh.of(data=1)
"""The mesh of one device."""
PRECISE = 0.01
"""Relative precision of the pace."""
LOOSE = 0.97
"""Bounds are this much too high at most: blocks that stand alone pay for tensors at their ends which neighbours might
take as they are."""


@dataclass(frozen=True, order=True)
class Group:
    """Devices in row-major order of a mesh."""

    mesh: Mesh
    devices: tuple[int, ...]


@dataclass(frozen=True)
class EstimatedCut:
    """A cut with its estimate: the first block of every stage but the first, every stage's times, and the seconds of a
    transfer over every bound."""

    groups: tuple[Group, ...]
    schedule: Fill
    bounds: tuple[int, ...]
    stages: tuple[Filled, ...]
    crossing: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Need:
    """What the leanest cut needs of every device, its stages evenly filled and one microbatch in flight, and what of a
    device may be filled."""

    n_bytes: float
    limit_bytes: float
    groups: int
    mesh: Mesh
    microbatches: int


@dataclass
class Equal:
    """A search over groups that are equal, all or those of one device type.

    Attributes:
        pools: devices by type; several only where groups may differ by type.
        shapes: meshes of a group of so many devices.
        memory_bytes: of a device of each type, what may be filled.
        groups: how many; None for any number.
        floors: by number of the pool and mesh, seconds that the commonest block takes at least, where they are known:
            what is too slow at that is not planned at all.
        best_known: the estimated seconds of a step found elsewhere, with which cuts compete.
        far: a mesh is looked at further if its bound is within this factor of the best estimate.
        beaten: the seconds of a step that is planned exactly: what takes as long by its bound is not looked at.
        fewest_groups: one group may be planned elsewhere.
        thorough: all cuts of a mesh that is looked at are of interest; without it, a mesh is filled with the commonest
            blocks alone before the others are planned on it, and what is far from the best is dropped.
        fastest: like ``floors``, what was found.
    """

    cluster: Cluster
    pools: Sequence[Sequence[int]]
    blocks: Sequence[Block]
    menus: Menus
    shapes: Callable[[int], Sequence[Mesh]]
    schedules: Sequence[str]
    microbatches: int
    memory_bytes: Sequence[float]
    groups: int | None = None
    floors: Mapping[tuple[int, Mesh], float] = field(default_factory=dict)
    best_known: float = inf
    far: float = FAR
    thorough: bool = False
    beaten: float = inf
    fewest_groups: int = 1
    infeasible: InfeasibleError | None = field(default=None, init=False)
    leanest: Need | None = field(default=None, init=False)
    fastest: dict[tuple[int, Mesh], float] = field(default_factory=dict, init=False)
    _of_others: dict[tuple[int, Mesh, int], float] = field(default_factory=dict, init=False)
    _fillers: dict[tuple[int, Mesh, int | None], Filler | None] = field(default_factory=dict, init=False)
    _known_fills: dict[int, tuple[Fill, ...]] = field(default_factory=dict, init=False)

    def cuts(self) -> list[EstimatedCut]:
        """All that are worth a further look, best first."""
        places = [(self._bound(meshes), meshes) for meshes in self._places()]
        heapify(places)
        cuts: list[EstimatedCut] = []
        seen: list[tuple[Mesh, ...]] = []
        filled: set[tuple[Mesh, ...]] = set()  # with the commonest blocks alone
        looked = 0
        while places and looked < MOST_PLACES:
            least, meshes = heappop(places)
            near = self._near(cuts)
            if least == inf or least > near:
                break
            if self._solve_next(meshes):
                heappush(places, (self._bound(meshes), meshes))
                continue
            if not self.thorough and meshes not in filled:  # others are planned where the commonest alone come near
                filled.add(meshes)
                of_commonest = self._cuts_on(meshes, near, self._common)
                if of_commonest:
                    heappush(places, (max(least, (1 - PRECISE) * min(c.seconds for c in of_commonest)), meshes))
                else:
                    seen.append(meshes)
                continue
            seen.append(meshes)  # so some schedule allows so many groups
            looked += 1
            cuts += self._cuts_on(meshes, self.beaten / LOOSE if self.thorough else near)
        self.menus.forget()
        if not cuts and seen and self.infeasible is None:
            self.infeasible = self._too_small(seen)
        return sorted(cuts, key=lambda c: (c.seconds, len(c.groups), c.groups))

    def _near(self, cuts: Sequence[EstimatedCut]) -> float:
        """Bounds from which on nothing is of interest."""
        return min(self.beaten / LOOSE, self.far * min([self.best_known, *(c.seconds for c in cuts)]))

    def _cuts_on(self, meshes: tuple[Mesh, ...], near: float, only: int | None = None) -> list[EstimatedCut]:
        """The best cut of every schedule that may take less than ``near`` seconds; ``only`` as for :func:`menus_of`."""
        cuts = []
        for groups in self._orders(meshes):
            n = len(groups)
            for fill in self._fills(n):
                if self._least(meshes, fill.bubble) <= near:
                    one = self._cut(groups, fill, near, only)
                    cuts += [one] if one is not None else []
        return cuts

    def _places(self) -> list[tuple[Mesh, ...]]:
        """A mesh for the groups of every pool."""
        most = len(self.blocks)
        by_pool = [
            [m for k in range(1, len(p) + 1) if len(p) % k == 0 and len(p) // k <= most for m in self.shapes(k)]
            for p in self.pools
        ]
        counted = [(self._count(meshes), meshes) for meshes in product(*by_pool)]
        return [meshes for n, meshes in counted if self.fewest_groups <= n <= most and self.groups in (None, n)]

    def _bound(self, meshes: tuple[Mesh, ...]) -> float:
        """Less than any step takes: all blocks at the full pace, as far as it is known, and the bubble."""
        n = self._count(meshes)
        bubbles = [fill.bubble for fill in self._fills(n)]
        return self._least(meshes, min(bubbles)) if bubbles else inf

    def _count(self, meshes: tuple[Mesh, ...]) -> int:
        """Groups of all pools."""
        return sum(len(p) // m.n_devices for p, m in zip(self.pools, meshes, strict=True))

    def _least(self, meshes: tuple[Mesh, ...], bubble: float) -> float:
        """The same with the bubble of one schedule."""
        rate = 0.0
        for pool, mesh in enumerate(meshes):
            seconds = sum(n * self._pace(pool, mesh, kind) for kind, n in self._counts.items())
            if seconds == inf:
                return inf
            rate += len(self.pools[pool]) // mesh.n_devices / seconds if seconds else inf
        # with few microbatches no schedule hides that the first must go all the way and back (two thirds of its time)
        n = self._count(meshes)
        return max(self.microbatches + bubble * (n - 1), 1 + (n - 1) * 2 / 3) / rate

    def _pace(self, pool: int, mesh: Mesh, kind: int) -> float:
        """Seconds of a microbatch that a block of a kind takes at least: in its fastest plan, where that was found."""
        common = kind == self._common
        fastest = self.fastest.get((pool, mesh)) if common else self._of_others.get((pool, mesh, kind))
        if fastest is not None:
            return fastest
        floor = self.floors.get((pool, mesh), 0.0) if common else 0.0
        return max(floor, self._alone[pool][kind] / mesh.n_devices)

    @cached_property
    def _counts(self) -> dict[int, int]:
        """How many blocks there are of each kind, by its number."""
        return Counter(kinds_of(self.blocks))

    @cached_property
    def _common(self) -> int:
        """The number of the commonest kind."""
        return max(self._counts, key=lambda k: (self._counts[k], -k))

    @cached_property
    def _blocks_of_kinds(self) -> dict[int, Block]:
        """The first block of every kind."""
        return dict(reversed(list(zip(kinds_of(self.blocks), self.blocks, strict=True))))

    @cached_property
    def _alone(self) -> list[dict[int, float]]:
        """What blocks of every kind take on one device of each pool: a part of a cut operator never takes less than
        its share (see :mod:`cost_models.compute`); 0 where the cost source does not promise that."""
        if not costs_of(self.cluster).share_bounds:
            return [dict.fromkeys(self._counts, 0.0) for _ in self.pools]
        least = []
        for pool in range(len(self.pools)):
            seconds = {kind: self._fastest_of(pool, ALONE, kind) for kind in self._counts}
            self.fastest[pool, ALONE] = seconds[self._common]
            least.append({kind: s if s < inf else 0.0 for kind, s in seconds.items()})
        return least

    def _solve_next(self, meshes: tuple[Mesh, ...]) -> bool:
        """Find what blocks of one more kind take on meshes at least, those that take the most first; whether there is
        a kind of which it was not known. On many devices the commonest kind's is enough for a bound: some of the
        others are seldom, and take long to plan."""
        for pool, mesh in enumerate(meshes):
            if (pool, mesh) not in self.fastest:
                self.fastest[pool, mesh] = self._fastest_of(pool, mesh, self._common)
                return True
        others = sorted((k for k in self._counts if k != self._common), key=self._weight, reverse=True)
        for kind in others if self.thorough else ():
            for pool, mesh in enumerate(meshes):
                if (pool, mesh, kind) not in self._of_others:
                    self._of_others[pool, mesh, kind] = self._fastest_of(pool, mesh, kind)
                    return True
        return False

    def _weight(self, kind: int) -> float:
        """What all blocks of a kind take on one device."""
        return self._counts[kind] * self._alone[0][kind]

    def _fastest_of(self, pool: int, mesh: Mesh, kind: int) -> float:
        """What a block takes at least; for ever if it cannot be planned."""
        try:
            return self.menus.fastest(self._blocks_of_kinds[kind], mesh, self._first(pool, mesh))
        except InfeasibleError as error:
            self.infeasible = self.infeasible or error
            return inf

    def _first(self, pool: int, mesh: Mesh) -> Sequence[int]:
        """The first devices of a pool for a mesh."""
        return self.pools[pool][: mesh.n_devices]

    def _orders(self, meshes: tuple[Mesh, ...]) -> list[list[Group]]:
        """The groups, the pools in order and in reverse."""
        by_pool = []
        for pool, mesh in zip(self.pools, meshes, strict=True):
            size = mesh.n_devices
            by_pool.append([Group(mesh, tuple(pool[k : k + size])) for k in range(0, len(pool), size)])
        orders = [[g for of_pool in by_pool for g in of_pool]]
        if len(by_pool) > 1:
            orders.append([g for of_pool in reversed(by_pool) for g in of_pool])
        return orders

    def _filler(self, pool: int, mesh: Mesh, only: int | None) -> Filler | None:
        key = pool, mesh, only
        if key not in self._fillers:
            menus = menus_of(self.menus, self.blocks, mesh, self._first(pool, mesh), only)
            filler = Filler(kinds_of(self.blocks), menus, self.microbatches) if menus is not None else None
            self._fillers[key] = filler
        return self._fillers[key]

    def _too_small(self, places: Sequence[tuple[Mesh, ...]]) -> InfeasibleError | None:
        """What the leanest cut would need, spread evenly."""
        needs = []
        for mesh, *_ in places:
            menus = menus_of(self.menus, self.blocks, mesh, self._first(0, mesh))
            if menus is not None:
                least = {k: min(w.static_bytes + w.kept_bytes for w in ways) for k, ways in menus.items()}
                groups = sum(map(len, self.pools)) // mesh.n_devices
                needs.append((sum(least[k] for k in kinds_of(self.blocks)) / max(1, groups), groups, mesh))
        if not needs:
            return None
        n_bytes, groups, mesh = min(needs)
        memory = min(self.memory_bytes)
        self.leanest = Need(n_bytes, memory, groups, mesh, self.microbatches)
        if n_bytes <= memory:
            return InfeasibleError(
                f"no plan fits {show_bytes(memory)} per device with {self.microbatches} microbatches under "
                f"{', '.join(self.schedules)}: stages are too large, or too many microbatches are in flight; use more "
                "devices, smaller microbatches or other schedules"
            )
        shape = mesh.shown()
        return InfeasibleError(
            f"no plan fits {show_bytes(memory)} per device: the leanest, {groups} group(s) of {shape}, needs "
            f"about {show_bytes(n_bytes)} with one microbatch in flight; use more devices or smaller microbatches"
        )

    def _fills(self, groups: int) -> tuple[Fill, ...]:
        """The schedules for so many groups, at every degree of interleaving that is worth a look; one group runs its
        microbatches in turn, whatever the schedule."""
        if groups == 1:
            return (fill_of("1f1b"),)
        if groups not in self._known_fills:
            fills = []
            for text in self.schedules:
                kind, degree = parse_kind(text)
                degrees = kind.degrees(groups, len(self.blocks)) if degree is None else [degree]
                fills += [kind.at(d) for d in degrees if groups * d <= len(self.blocks)]
            self._known_fills[groups] = tuple(f for f in fills if f.allows(groups, self.microbatches))
        return self._known_fills[groups]

    def _cut(self, groups: Sequence[Group], fill: Fill, near: float, only: int | None) -> EstimatedCut | None:
        n = len(groups)
        pool_of = {d: k for k, pool in enumerate(self.pools) for d in pool}
        pools = [pool_of[g.devices[0]] for g in groups]
        fillers = [self._filler(k, g.mesh, only) for k, g in zip(pools, groups, strict=True)]
        usable = [f for f in fillers if f is not None]
        if len(usable) < n:
            return None
        memory = [self.memory_bytes[k] for k in pools]
        stages = Places(fill, self.microbatches, memory, usable, len(self.blocks)).best(near / self.microbatches)
        if stages is None:
            return None
        stages_of = fill.kind.placement(len(stages), n)
        owner = {s: g for g, of_group in enumerate(stages_of) for s in of_group}
        crossing = [
            self._transfer(first, groups) if owner[s] != owner[s + 1] else 0.0
            for s, (first, _) in enumerate(stages[1:])
        ]  # fmt: skip
        filled = tuple(s for _, s in stages)
        loads = [
            StageLoad(
                sum(filled[s].seconds for s in of_group), sum(filled[s].backward_seconds for s in of_group),
                sum(filled[s].step_seconds for s in of_group), sum(crossing[s] for s in of_group if s < len(crossing)),
            )
            for of_group in stages_of
        ]  # fmt: skip
        again = any(s.recomputed for s in filled)  # a backward that recomputes is not split
        bubble = fill.whole_bubble if again else fill.bubble
        seconds = estimated_seconds(bubble, 0.0, self.microbatches, loads)  # nothing hides in the simulated step either
        # However few microbatches there are, the first goes all the way and back; only weight gradients may wait.
        apart = not again and fill.kind.splits
        way = sum(s.seconds - (s.weight_seconds if apart else 0.0) for s in filled) + 2 * sum(crossing)
        seconds = max(seconds, way + max(load.once_seconds for load in loads))
        firsts = tuple(first for first, _ in stages[1:])
        return EstimatedCut(tuple(groups), fill, firsts, filled, tuple(crossing), seconds)

    def _transfer(self, block: int, groups: Sequence[Group]) -> float:
        """Of what crosses, between the first two groups: they are alike, or near enough for an estimate."""
        a, b = groups[0].devices[0], groups[1].devices[0]
        size = min(len(g.devices) for g in groups)
        return costs_of(self.cluster).transfer(a, b, self.blocks[block].crossing_bytes / size)


@dataclass
class Places:
    """The stages of one schedule, to be filled.

    Attributes:
        memory_bytes: of a device of each group; stages of a group share it equally.
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
        """``(first block, stage)`` of every stage, at the least pace; None if that is more than ``most``."""
        widest = self._filled(most)
        if widest is None:
            return None
        high = max(s.seconds for _, s in widest)
        low, stages_found = min(f.least_seconds for f in self.fillers) / self.n_stages, widest
        while high - low > PRECISE * high:
            middle = (low + high) / 2
            stages = self._filled(middle)
            if stages is None:
                low = middle
            else:
                stages_found, high = stages, max(s.seconds for _, s in stages)
        return stages_found

    def _filled(self, pace: float) -> list[tuple[int, Filled]] | None:
        """Stages that no one is slower than a pace."""
        end, guess, filled = self.n_blocks, 1, []
        for s in range(self.n_stages - 1, -1, -1):
            one = self._longest(s, end, pace, guess)
            if one is None:
                return None
            filled.append(one)
            guess, end = end - one[0], one[0]
        return filled[::-1] if end == 0 else None

    def _longest(self, s: int, end: int, pace: float, guess: int) -> tuple[int, Filled] | None:
        """Stage ``s`` that ends at ``end`` with as many blocks as may be, looked for around a guess of their number,
        and its first block. Earlier stages get one each."""
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


__all__ = ["Equal", "EstimatedCut", "Group", "Places"]
