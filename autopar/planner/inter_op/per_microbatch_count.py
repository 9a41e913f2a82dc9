"""Layouts for one number of microbatches, with estimates: equal groups of devices, unequal ones, and pinned cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.candidates import Candidate
from autopar.planner.inter_op.estimating import simulated_estimate
from autopar.planner.inter_op.estimating.block_costs import ALONE, BlockPlans, Menus
from autopar.planner.inter_op.estimating.equal import Equal, Need
from autopar.planner.inter_op.estimating.estimates import EstimatedCut
from autopar.planner.inter_op.estimating.filling import Fillers
from autopar.planner.inter_op.estimating.unequal import Unequal
from autopar.planner.inter_op.exact.exact_stages import ExactPlans
from autopar.planner.inter_op.simulating.order import SEARCHED, START
from autopar.planner.inter_op.stage_pins import allows
from autopar.planner.intra_op.memory.recompute import is_asked
from autopar.plans.stage_graphs import cut
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh, mesh_shapes
from cost_models.costs import costs_of
from cost_models.schedules import Fill, fill_of, parse_kind


@dataclass(eq=False)
class OneNumber(ExactPlans):
    """Ways to cut for one number of microbatches: bounds, estimates and exact plans of them.

    Attributes:
        unfit: what was planned exactly and did not fit.
        infeasible: an error of what did not fit.
        leanest: what the leanest cut needs, where no estimate fits.
        fastest: seconds of the commonest block on every mesh that was looked at, by pool and mesh.
        decided: plans of blocks, which may be shared with other numbers.
    """

    unfit: Candidate | None = None
    infeasible: InfeasibleError | None = None
    leanest: Need | None = None
    fastest: Mapping[tuple[int, Mesh], float] = field(default_factory=dict)
    decided: BlockPlans = field(default_factory=BlockPlans)

    def candidates(
        self, floors: Mapping[tuple[int, Mesh], float] | None = None, best_known: float = inf,
        far: float = EFFORT.far_mesh, share: float = 1.0, groups: int | None = None, beaten: float = inf,
        fewest: int = 1, shapes: Sequence[Mesh] = (),
    ) -> list[Candidate]:  # fmt: skip
        """Return the most promising layouts, by estimate.

        ``floors``, ``best_known``, ``far``, ``beaten`` and ``fewest`` are those of :class:`Equal`; estimates may fill
        ``share`` of the memory; ``groups`` and ``shapes`` restrict what the user leaves open.
        """
        if self.request.starts is not None:
            return self._pinned(self.request.starts)
        request = self.request
        schedules = tuple(dict.fromkeys(START if name == SEARCHED else name for name in request.schedules))
        pools = self._pools
        shapes_of = (lambda size: [m for m in shapes if m.n_devices == size]) if shapes else self.shapes
        fillers = Fillers(self.menus, self.blocks, request.microbatches)
        search = Equal(
            self.cluster, pools, self.blocks, fillers, shapes_of, schedules, request.microbatches,
            [share * self.limit(pool) for pool in pools], request.groups or groups, floors or {}, best_known, far,
            self.few and not shapes, beaten, fewest,
        )  # fmt: skip
        cuts = search.cuts()
        self.fastest = search.fastest
        self.infeasible = self.infeasible or search.infeasible
        self.leanest = self.leanest or search.leanest
        if not self.few:
            timed = simulated_estimate.best(cuts, request.microbatches, EFFORT.simulated_cuts)
            cuts = [replace(c, seconds=s) for s, c in timed]
        best = cuts[: EFFORT.candidates] if self.few else cuts
        if self.few and cuts:  # the estimate knows neither the order of actions nor the exact plans
            near = [c for c in cuts if c.seconds <= EFFORT.worth_a_look * cuts[0].seconds]
            for groups in sorted({len(c.groups) for c in near}):
                best += [c for c in near if len(c.groups) == groups][:1]
            best += [c for c in near if any(c.groups == d.groups for d in cuts[:EFFORT.candidates])]
        unequal = [] if shapes else self._unequal(fillers)
        return [self._candidate(cut) for cut in (*dict.fromkeys(best), *unequal)]

    def _candidate(self, cut: EstimatedCut) -> Candidate:
        """Return an estimated cut as a candidate for an exact plan."""
        return Candidate(
            tuple(g.mesh for g in cut.groups), tuple(g.devices for g in cut.groups), self._named(cut.schedule),
            tuple(self.blocks[b].first for b in cut.bounds), cut.seconds,
            tuple((s.static_bytes, s.kept_bytes) for s in cut.stages), cut if cut.stages else None,
            tuple(s.once_bytes for s in cut.stages),
        )  # fmt: skip

    def launches_most(self) -> bool:
        """Return whether launches, which every device does, take longer than a device's share of the work."""
        if not costs_of(self.cluster).share_bounds:
            return False
        counts = Counter(block.kind for block in self.blocks)
        alone = launches = 0.0
        for block in {block.kind: block for block in reversed(self.blocks)}.values():
            n = counts[block.kind]
            try:
                alone += n * self.menus.fastest(block, ALONE, (0,))
            except InfeasibleError:
                return False
            launches += n * self.menus.launches(block, 0)
        return launches > (alone - launches) / self.n_devices

    def _pinned(self, starts: Sequence[str]) -> list[Candidate]:
        """Return all groups, shapes and schedules for which the user's cuts are right."""
        positions = {self.name(p): p for p in range(len(self.ops))}
        bounds = tuple(positions.get(s, 0) for s in starts)
        candidates = []
        n_stages = len(starts) + 1
        for text in self.request.schedules:
            kind, degree = parse_kind(START if text == SEARCHED else text)
            name = SEARCHED if text == SEARCHED else kind.name
            for each in range(1, n_stages + 1) if degree is None else [degree]:
                groups, rest = divmod(n_stages, each)
                if rest or not kind.allows_degree(each) or self.n_devices % groups:
                    continue
                if self.request.groups not in (None, groups) or (groups == 1 and n_stages > 1):
                    continue
                candidates += [_equal(groups, mesh, name, bounds) for mesh in self.shapes(self.n_devices // groups)]
        return candidates

    def _named(self, fill: Fill) -> str:
        """Return the schedule's name; that of the searched one, where its stages are planned for this one."""
        return SEARCHED if fill.name == START and SEARCHED in self.request.schedules else fill.name

    @cached_property
    def menus(self) -> Menus:
        """Options of blocks with their costs."""
        options = replace(self.request.options, microbatches=self.request.microbatches)
        may = self.request.may_recompute and not is_asked(self.graph, options.recompute)
        counts = Counter(b.kind for b in self.blocks)
        rare = [k for k, n in counts.items() if EFFORT.rare_block * n <= len(self.blocks) and not self.few]
        common = None if self.few else counts.most_common(1)[0][0]
        return Menus(self.cluster, self._graph_of, options, may, frozenset(rare), self.decided, not self.few, common)

    def _unequal(self, fillers: Fillers) -> list[EstimatedCut]:
        """Return cuts over unequal groups, where they are worth a search: devices that differ, or divide badly."""
        request, n = self.request, self.n_devices
        names = [name for name in request.schedules if name != SEARCHED and fill_of(name).chunks == 1]
        divides = sum(n % g == 0 for g in range(1, n + 1)) > 2
        if request.mesh or not names or n != self.cluster.n_devices or n < 3 or len(self._pools) > 1:
            return []
        if divides and not self._uneven and not (request.groups and n % request.groups):
            return []
        search = Unequal(self.cluster, self.blocks, fillers, self.shapes, request.microbatches, self.limit)
        try:
            return search.cuts(names, EFFORT.candidates, request.groups)
        except InfeasibleError as error:
            self.infeasible = self.infeasible or error
            return []

    def _graph_of(self, block: Block) -> Graph:
        """Return the graph of a block alone."""
        starts = [self.name(block.first)] if block.first else []
        starts += [self.name(block.end)] if block.end < len(self.ops) else []
        return cut(self.graph, starts)[1 if block.first else 0].graph

    def shapes(self, size: int, most_axes: int = EFFORT.first_axes) -> list[Mesh]:
        """Return the mesh shapes of a group; one axis larger than a node is better split in two.

        The last axis joins neighbours. If more than ``EFFORT.first_axes`` axes are wanted, only those that have more
        are returned.
        """
        if self.request.mesh:
            return [self.request.mesh] if self.request.mesh.n_devices == size else []
        near = max(1, self.cluster.n_devices // self.cluster.n_nodes)
        every = mesh_shapes(size, min(most_axes, self.request.max_axes), self.request.options.named_axes)
        shapes = [m for m in every if len(m) == 1 or m.inner(1).n_devices <= near]
        if most_axes > EFFORT.first_axes:  # those with fewer were looked at before
            shapes = [m for m in shapes if len(m) > EFFORT.first_axes]
        return [m for m in shapes if allows(m, self.request.options)]

    def deeper_shapes(self, fewer: Mesh, devices: Sequence[int]) -> list[Mesh]:
        """Return meshes of more axes that refine one of fewer, and on which the most frequent block is faster.

        Where it is not, the stages' programs would take long for the same result.
        """
        if self.request.mesh or self.request.max_axes <= EFFORT.first_axes:
            return []
        common, _ = Counter(b.kind for b in self.blocks).most_common(1)[0]
        block = next(b for b in self.blocks if b.kind == common)
        faster = []
        for mesh in self.shapes(len(devices), self.request.max_axes):
            if not mesh.refines(fewer):
                continue
            try:
                before = self.menus.fastest(block, fewer, devices)
                faster += [mesh] if self.menus.fastest(block, mesh, devices) <= EFFORT.deeper_gain * before else []
            except InfeasibleError:
                continue
        return faster

    @cached_property
    def _pools(self) -> list[list[int]]:
        """Devices whose groups are alike: those of each type on many devices; on few, unequal groups are searched."""
        by_type: dict[str, list[int]] = {}
        for d in range(self.n_devices):
            by_type.setdefault(self.cluster.device(d).name, []).append(d)
        return list(by_type.values()) if not self.few else [list(range(self.n_devices))]

    @cached_property
    def _uneven(self) -> bool:
        """Devices of several types, so that groups of equal size can differ."""
        return len({self.cluster.device(d).name for d in range(self.n_devices)}) > 1


def _equal(groups: int, mesh: Mesh, schedule: str, bounds: tuple[int, ...]) -> Candidate:
    size = mesh.n_devices
    devices = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
    return Candidate((mesh,) * groups, devices, schedule, bounds, 0.0)
