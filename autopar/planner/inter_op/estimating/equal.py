"""Stages on groups of devices: for every group size, mesh shape and schedule, the cut with the best estimate.

Groups are equal, or, on large clusters of several device types, equal among those of a type. So they are given before
blocks are dealt out (:mod:`.filling`), and there are few choices to shape them, which are tried by their bounds, the
least first. Unequal groups are shaped and filled together (:mod:`.unequal`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.estimating.block_costs import ALONE, kinds_of
from autopar.planner.inter_op.estimating.estimates import EstimatedCut, Group, estimated, stage_edge_seconds
from autopar.planner.inter_op.estimating.filling import Fillers, Places
from autopar.planner.intra_op.within_memory import UNLIMITED
from autopar.progress import tell
from autopar.words.meshes import Mesh
from autopar.words.texts import show_bytes
from cost_models.costs import costs_of
from cost_models.schedules import Fill, fill_of, parse_kind
from hardware_profiles import Cluster


@dataclass(frozen=True)
class Need:
    """Bytes that the leanest cut needs of every device, evenly filled with one microbatch in flight, and the limit."""

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
        shapes: meshes of a group, by its number of devices.
        memory_bytes: what may be filled of a device of each type.
        groups: how many; None for any number.
        floors: by number of the pool and mesh, seconds that the commonest block takes at least, if they are known:
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
    fillers: Fillers
    shapes: Callable[[int], Sequence[Mesh]]
    schedules: Sequence[str]
    microbatches: int
    memory_bytes: Sequence[float]
    groups: int | None = None
    floors: Mapping[tuple[int, Mesh], float] = field(default_factory=dict)
    best_known: float = inf
    far: float = EFFORT.far_mesh
    thorough: bool = False
    beaten: float = inf
    fewest_groups: int = 1
    infeasible: InfeasibleError | None = field(default=None, init=False)
    leanest: Need | None = field(default=None, init=False)
    fastest: dict[tuple[int, Mesh], float] = field(default_factory=dict, init=False)
    _of_others: dict[tuple[int, Mesh, int], float] = field(default_factory=dict, init=False)
    _known_fills: dict[int, tuple[Fill, ...]] = field(default_factory=dict, init=False)
    _tight: set[tuple[tuple[Mesh, ...], Fill]] = field(default_factory=set, init=False)
    """Meshes and fills whose fastest options need more memory than there is."""

    def cuts(self) -> list[EstimatedCut]:
        """Return all cuts that are worth a further look, best first."""
        places = [(self._bound(meshes), meshes) for meshes in self._places()]
        heapify(places)
        cuts: list[EstimatedCut] = []
        seen: list[tuple[Mesh, ...]] = []
        filled: set[tuple[Mesh, ...]] = set()  # with the commonest blocks alone
        looked = 0
        while places and looked < EFFORT.filled_meshes:
            least, meshes = heappop(places)
            shown = " and ".join(mesh.shown() for mesh in meshes)
            tell(lambda shown=shown: f"estimates for {self.microbatches} microbatches, {shown}")  # type: ignore[misc]
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
                    fastest = min(c.seconds for c in of_commonest)
                    heappush(places, (max(least, (1 - EFFORT.pace_precision) * fastest), meshes))
                else:
                    seen.append(meshes)
                continue
            seen.append(meshes)  # so some schedule allows so many groups
            looked += 1
            cuts += self._cuts_on(meshes, self.beaten / EFFORT.loose_bound if self.thorough else near)
        self.fillers.menus.forget()
        if not cuts and seen and self.infeasible is None:
            self.infeasible = self._too_small(seen)
        return sorted(cuts, key=lambda c: (c.seconds, len(c.groups), c.groups))

    def _near(self, cuts: Sequence[EstimatedCut]) -> float:
        """Return the bound from which on nothing is of interest."""
        return min(self.beaten / EFFORT.loose_bound, self.far * min([self.best_known, *(c.seconds for c in cuts)]))

    def _cuts_on(self, meshes: tuple[Mesh, ...], near: float, only: int | None = None) -> list[EstimatedCut]:
        """Return the best cut of every schedule that may take less than ``near`` seconds."""
        cuts = []
        for groups in self._orders(meshes):
            n = len(groups)
            for fill in self._fills(n):
                if self._least(meshes, fill.bubble) <= near:
                    one = self._cut(groups, fill, near, only)
                    cuts += [one] if one is not None else []
        return cuts

    def _places(self) -> list[tuple[Mesh, ...]]:
        """Return a mesh for the groups of every pool."""
        most = len(self.blocks)
        by_pool = [
            [m for k in range(1, len(p) + 1) if len(p) % k == 0 and len(p) // k <= most for m in self.shapes(k)]
            for p in self.pools
        ]
        counted = [(self._count(meshes), meshes) for meshes in product(*by_pool)]
        return [meshes for n, meshes in counted if self.fewest_groups <= n <= most and self.groups in (None, n)]

    def _bound(self, meshes: tuple[Mesh, ...]) -> float:
        """Return a lower bound of any step: all blocks at the full pace, as far as it is known, and the bubble."""
        n = self._count(meshes)
        bubbles = [fill.bubble for fill in self._fills(n)]
        return self._least(meshes, min(bubbles)) if bubbles else inf

    def _count(self, meshes: tuple[Mesh, ...]) -> int:
        """Return the number of groups of all pools."""
        return sum(len(p) // m.n_devices for p, m in zip(self.pools, meshes, strict=True))

    def _least(self, meshes: tuple[Mesh, ...], bubble: float) -> float:
        """Return the same bound with the bubble of one schedule."""
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
        """Return the least seconds of a microbatch of a kind of block: in its fastest plan, where that was found."""
        common = kind == self._common
        fastest = self.fastest.get((pool, mesh)) if common else self._of_others.get((pool, mesh, kind))
        if fastest is not None:
            return fastest
        floor = self.floors.get((pool, mesh), 0.0) if common else 0.0
        alone = self._alone[pool][kind]
        launches = min(alone, self._launches[pool][kind])  # every rank launches all of them, however small its part is
        return max(floor, launches + (alone - launches) / mesh.n_devices)

    @cached_property
    def _counts(self) -> dict[int, int]:
        """Number of blocks of each kind."""
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
        """Seconds of every kind of block on one device of each pool, 0 if the cost source gives no bound.

        A part of a cut operator never takes less than its share (:mod:`cost_models.operator_cost`).
        """
        if not costs_of(self.cluster).share_bounds:
            return [dict.fromkeys(self._counts, 0.0) for _ in self.pools]
        least = []
        for pool in range(len(self.pools)):
            seconds = {kind: self._fastest_of(pool, ALONE, kind) for kind in self._counts}
            self.fastest[pool, ALONE] = seconds[self._common]
            least.append({kind: s if s < inf else 0.0 for kind, s in seconds.items()})
        return least

    @cached_property
    def _launches(self) -> list[dict[int, float]]:
        """The part of a block's least seconds that launches take, which is no shorter where operators are cut."""
        return [
            {kind: self.fillers.menus.launches(block, pool[0]) for kind, block in self._blocks_of_kinds.items()}
            for pool in self.pools
        ]

    def _solve_next(self, meshes: tuple[Mesh, ...]) -> bool:
        """Bound one more kind of block on meshes, the slowest first, and return whether there was one.

        On many devices the most frequent kind is enough for a bound: some of the others are rare, and take long to
        plan.
        """
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
        """Return the seconds of all blocks of a kind on one device."""
        return self._counts[kind] * self._alone[0][kind]

    def _fastest_of(self, pool: int, mesh: Mesh, kind: int) -> float:
        """Return the least seconds of a block; infinite if it cannot be planned."""
        try:
            return self.fillers.menus.fastest(self._blocks_of_kinds[kind], mesh, self._first(pool, mesh))
        except InfeasibleError as error:
            self.infeasible = self.infeasible or error
            return inf

    def _first(self, pool: int, mesh: Mesh) -> Sequence[int]:
        """Return the first devices of a pool for a mesh."""
        return self.pools[pool][: mesh.n_devices]

    def _orders(self, meshes: tuple[Mesh, ...]) -> list[list[Group]]:
        """Return the groups, the pools in order and in reverse."""
        by_pool = []
        for pool, mesh in zip(self.pools, meshes, strict=True):
            size = mesh.n_devices
            by_pool.append([Group(mesh, tuple(pool[k : k + size])) for k in range(0, len(pool), size)])
        orders = [[g for of_pool in by_pool for g in of_pool]]
        if len(by_pool) > 1:
            orders.append([g for of_pool in reversed(by_pool) for g in of_pool])
        return orders

    def _too_small(self, places: Sequence[tuple[Mesh, ...]]) -> InfeasibleError | None:
        """Return the error with what the leanest cut would need, spread evenly."""
        needs = []
        for mesh, *_ in places:
            filler = self.fillers.of(mesh, self._first(0, mesh))
            if filler is not None:
                least = {k: min(w.static_bytes + w.kept_bytes for w in choices) for k, choices in filler.menus.items()}
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
        """Return the schedules for `groups` groups, at every degree of interleaving that is worth a look.

        One group runs its microbatches in turn, whatever the schedule.
        """
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
        """Return the best cut of a schedule.

        It is looked for with the fastest option of every block first, whatever memory that needs. Where there is as
        much, no other options are of interest; nor where even that takes too long. All others, which take ten times as
        long to find, are for what is left.
        """
        meshes = tuple(g.mesh for g in groups)
        if (meshes, fill) not in self._tight:
            cut = self._filled(groups, fill, near, only, fastest=True)
            if cut is None or cut[1] or cut[0].seconds > near:
                return cut[0] if cut is not None and cut[1] else None
            self._tight.add((meshes, fill))  # with more blocks, too
        cut = self._filled(groups, fill, near, only, fastest=False)
        return cut[0] if cut is not None else None

    def _filled(
        self, groups: Sequence[Group], fill: Fill, near: float, only: int | None, fastest: bool
    ) -> tuple[EstimatedCut, bool] | None:  # fmt: skip
        """Return a cut and whether it fits; with ``fastest``, of the fastest options, whatever memory they need."""
        n = len(groups)
        pool_of = {d: k for k, pool in enumerate(self.pools) for d in pool}
        pools = [pool_of[g.devices[0]] for g in groups]
        fillers = [
            self.fillers.of(g.mesh, self._first(k, g.mesh), only, fill.chunks, fastest)
            for k, g in zip(pools, groups, strict=True)
        ]
        usable = [f for f in fillers if f is not None]
        if len(usable) < n:
            return None
        memory = [self.memory_bytes[k] for k in pools]
        places = Places(fill, self.microbatches, memory, usable, len(self.blocks))
        room = places if not fastest else replace(places, memory_bytes=[UNLIMITED] * n)
        stages = room.best(near / self.microbatches)
        if stages is None:
            return None
        fits = not fastest or places.fit(stages)
        cut = estimated(groups, fill, stages, self.microbatches, lambda block, *_: self._transfer(block, groups))
        return cut, fits

    def _transfer(self, block: int, groups: Sequence[Group]) -> float:
        """Return the seconds of a transfer between the first two groups, an estimate for all."""
        size = min(len(g.devices) for g in groups)
        return stage_edge_seconds(self.cluster, self.blocks[block], groups[0], groups[1], size)
