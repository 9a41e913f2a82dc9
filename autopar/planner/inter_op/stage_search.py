"""Where to cut the pipeline, and which schedule to run: stages of blocks on groups of devices.

1. Blocks are found in the graph; every kind of block is planned alone on every mesh shape of every group size: a menu
   from the fastest way to a small one, with and without recomputing (:mod:`autopar.planner.inter_op.menu`).
2. For every number of microbatches, number of groups, mesh shape and schedule, stages are filled with blocks within
   the memory that the microbatches in flight leave (:mod:`.equal`). Where devices differ, or their
   number divides badly, a dynamic program cuts over unequal groups (:mod:`.unequal`). Both have an
   estimate of the step.
3. The best few are planned exactly, stage by stage, and simulated. The simulated best is the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod

from autopar.collection import uncollected
from autopar.errors import InfeasibleError, PlanError
from autopar.graph import Graph
from autopar.pipeline import PipelinePlan
from autopar.placements import Mesh, mesh_shapes
from autopar.plan import StagePlan
from autopar.planner.inter_op import trial
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.equal import FAR, NEAR, Equal
from autopar.planner.inter_op.exact import SMALL, Candidate, Exact, ExactPlans, PipelineOptions
from autopar.planner.inter_op.menu import Menus
from autopar.planner.inter_op.order import SEARCHED, START, check_name
from autopar.planner.inter_op.stage_pins import allows
from autopar.planner.inter_op.unequal import Unequal
from autopar.planner.intra_op.fold import fold
from autopar.planner.intra_op.problem import Beaten
from autopar.planner.intra_op.recompute import is_asked, segments_of
from autopar.rules.registry import rules_of
from autopar.staging import cut
from cost_models.pipeline import Fill, Timeline, fill_of, parse_kind
from hardware_profiles import Cluster

CANDIDATES = 3
"""Ways to cut that are planned exactly and simulated, at most."""
TRIALS = 16
"""Cuts for every number of microbatches that are simulated with the times of their estimates."""
RARE = 32
"""A kind of block of which there is at most one among so many is rare, on more than :data:`SMALL` devices."""
CLOSE = 0.005
"""On more than :data:`SMALL` devices, the next is planned exactly if it looks at most this much worse than the best."""
NUMBERS = 4
"""Numbers of microbatches of which the best few ways are planned exactly; of the best two, all that are near."""
WORTH_A_LOOK = 2.0
"""The best way of every number of groups is planned exactly too, on few devices, if its estimate is within this factor
of the best; and so is every schedule of the best cuts."""


def _equal(groups: int, mesh: Mesh, schedule: str, bounds: tuple[int, ...]) -> Candidate:
    size = prod(k for _, k in mesh)
    devices = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
    return Candidate((mesh,) * groups, devices, schedule, bounds, 0.0)


@dataclass(frozen=True)
class Planned:
    """A pipelined plan with its simulation and what else was tried: ``(what, seconds)``, best first."""

    plan: PipelinePlan
    timeline: Timeline
    tried: tuple[tuple[str, float], ...]


@uncollected()  # a search plans thousands of blocks
def plan_pipeline(
    graph: Graph | Mapping[int, Graph], cluster: Cluster, n_devices: int, asked: PipelineOptions, *,
    cluster_name: str = "",
) -> Planned:  # fmt: skip
    """The best pipelined plan on the first ``n_devices`` of a cluster; one group of all of them is among the choices.

    Args:
        graph: of a microbatch; or graphs by number of microbatches, all of the same batch, to choose the number too
            (that of ``asked`` does not matter then).

    Raises:
        PlanError: a schedule, a number of groups or cuts that cannot be.
        InfeasibleError: nothing fits the devices' memory.
    """
    graphs = dict(sorted(graph.items())) if isinstance(graph, Mapping) else {asked.microbatches: graph}
    for name in asked.schedules:
        check_name(name)
    if asked.groups is not None and not 1 <= asked.groups <= n_devices:
        raise PlanError(f"{n_devices} devices cannot be cut into {asked.groups} groups; use 1 to {n_devices}")
    searches = [
        _Search(own, cluster, n_devices, replace(asked, microbatches=m), cluster_name) for m, own in graphs.items()
    ]
    if asked.options.recompute:  # the patterns are those of the whole model
        first = searches[0].graph
        segments_of(first, rules_of(first, fold(first).representative), asked.options.recompute)
    found: list[Exact] = []
    infeasible: InfeasibleError | None = None
    for search, candidate in _promising(searches):
        least = min((f.seconds for f in found), default=inf)
        if n_devices > SMALL and least * (1 + CLOSE) < candidate.seconds:
            break  # simulated with the times of the estimate, which are seldom much too long
        try:
            one = search.exact(candidate, least)
        except Beaten:
            continue
        except InfeasibleError as error:
            infeasible = error
            continue
        found += [one] if one is not None else []
    if not found:
        counts = " or ".join(map(str, graphs))
        raise infeasible or next((s.infeasible for s in searches if s.infeasible), None) or PlanError(
            f"no schedule of {', '.join(asked.schedules)} allows {counts} microbatches on "
            f"{asked.groups or 'any number of'} groups of {n_devices} devices; change the microbatches or the schedules"
        )
    if n_devices <= SMALL:
        best = min(found, key=lambda f: f.seconds)
        found += best.search.improved(best)
    found.sort(key=lambda f: f.seconds)
    tried: dict[str, float] = {}
    for f in found:
        tried.setdefault(f.what, f.seconds)
    return Planned(found[0].plan, found[0].timeline, tuple(tried.items()))


def _promising(searches: Sequence[_Search]) -> list[tuple[_Search, Candidate]]:
    """What is planned exactly, of searches from the fewest microbatches to the most.

    A smaller microbatch never takes less time a row, so what was too slow with a larger one is not planned again.
    """
    if len(searches) == 1 or searches[0].asked.starts is not None:
        return [(s, c) for s in searches for c in s.candidates()]
    if searches[0].n_devices > SMALL:
        decided: dict[tuple[object, ...], list[StagePlan]] = {}
        for search in searches:
            search.decided = decided
    found: list[tuple[float, int, _Search, Candidate]] = []
    whole: dict[tuple[int, int, Mesh], float] = {}  # what the commonest block takes for the whole batch, by search

    def look(number: int) -> bool:
        """Whether going on in this direction is worth while."""
        search, m = searches[number], searches[number].asked.microbatches
        best = min((f[0] for f in found), default=inf)
        known: dict[tuple[int, Mesh], float] = {}
        for (n, pool, mesh), seconds in whole.items():
            if n <= number and search.cluster.measured is None:  # what was measured may do otherwise
                known[pool, mesh] = max(known.get((pool, mesh), 0.0), seconds / m)
        own = search.candidates(known, best, NEAR)
        found.extend((c.seconds, k, search, c) for k, c in enumerate(own))
        whole.update({(number, pool, mesh): s * m for (pool, mesh), s in search.fastest.items() if s < inf})
        return few or not own or own[0].seconds <= NEAR * best

    # From the middle, where a good plan is expected, so that others can be left alone. On few devices all numbers are
    # looked at. On many, the best step is taken to fall and then rise with the number: every second one is looked at,
    # on as long as it gets no worse, and then those on both sides of a best one in between.
    few = searches[0].n_devices <= SMALL
    middle, step = len(searches) // 2, 1 if few else 2
    looked: list[int] = []

    def best_number() -> int:
        return searches.index(min(found, key=lambda f: f[:2])[2])

    for order in (range(middle, len(searches), step), range(middle - step, -1, -step)):
        if not few and found and order.step < 0 and best_number() > middle:
            break
        for number in order:
            looked.append(number)
            if not look(number):
                break
    if found and min(looked) < best_number() < max(looked):
        for number in sorted({best_number() - 1, best_number() + 1} - set(looked)):
            look(number)
    found.sort(key=lambda f: f[:2])
    if not found or searches[0].n_devices > SMALL:
        return [(s, c) for _, _, s, c in found[:CANDIDATES]]
    near = [f for f in found if f[0] <= WORTH_A_LOOK * found[0][0]]
    counts = list(dict.fromkeys(id(f[2]) for f in near))  # by the best estimate of each number of microbatches
    return [
        (s, c) for _, k, s, c in near
        if id(s) in counts[:2] or (id(s) in counts[:NUMBERS] and k < CANDIDATES)
    ]  # fmt: skip


@dataclass(eq=False)
class _Search(ExactPlans):
    """Looks for ways to cut for one number of microbatches."""

    infeasible: InfeasibleError | None = None
    fastest: Mapping[tuple[int, Mesh], float] = field(default_factory=dict)
    decided: dict[tuple[object, ...], list[StagePlan]] = field(default_factory=dict)

    def candidates(
        self, floors: Mapping[tuple[int, Mesh], float] | None = None, best_known: float = inf, far: float = FAR
    ) -> list[Candidate]:
        """The most promising ways to cut, by estimate.

        Args:
            floors, best_known, far: as for :class:`Equal`.
        """
        if self.asked.starts is not None:
            return self._pinned(self.asked.starts)
        asked = self.asked
        schedules = tuple(dict.fromkeys(START if name == SEARCHED else name for name in asked.schedules))
        pools = self._pools
        search = Equal(
            self.cluster, pools, self.blocks, self.menus, self._shapes, schedules, asked.microbatches,
            [self.limit(pool) for pool in pools], asked.groups, floors or {}, best_known, far,
            self.n_devices <= SMALL,
        )  # fmt: skip
        found = search.cuts()
        self.fastest = search.fastest
        self.infeasible = self.infeasible or search.infeasible
        if self.n_devices > SMALL:
            found = [replace(c, seconds=s) for s, c in trial.best(found, asked.microbatches, TRIALS)]
        best = found[:CANDIDATES]
        if self.n_devices <= SMALL and found:  # the estimate knows neither the order of actions nor the exact plans
            near = [c for c in found if c.seconds <= WORTH_A_LOOK * found[0].seconds]
            for groups in sorted({len(c.groups) for c in near}):
                best += [c for c in near if len(c.groups) == groups][:1]
            best += [c for c in near if any(c.groups == d.groups for d in found[:CANDIDATES])]
        cuts = [
            Candidate(
                tuple(g.mesh for g in c.groups), tuple(g.devices for g in c.groups), self._named(c.schedule),
                tuple(self.blocks[b].first for b in c.bounds), c.seconds, c.recomputed,
                tuple((s.static_bytes, s.kept_bytes) for s in c.stages),
            )
            for c in dict.fromkeys(best)
        ]  # fmt: skip
        return [*cuts, *self._unequal()]

    def _pinned(self, starts: Sequence[str]) -> list[Candidate]:
        """All groups, shapes and schedules for which the user's cuts are right."""
        positions = {self.name(p): p for p in range(len(self.ops))}
        bounds = tuple(positions.get(s, 0) for s in starts)
        found = []
        n_stages = len(starts) + 1
        for text in self.asked.schedules:
            kind, degree = parse_kind(START if text == SEARCHED else text)
            name = SEARCHED if text == SEARCHED else kind.name
            for each in range(1, n_stages + 1) if degree is None else [degree]:
                groups, rest = divmod(n_stages, each)
                if rest or not kind.allows_degree(each) or self.n_devices % groups:
                    continue
                if self.asked.groups not in (None, groups) or (groups == 1 and n_stages > 1):
                    continue
                found += [_equal(groups, mesh, name, bounds) for mesh in self._shapes(self.n_devices // groups)]
        return found

    def _named(self, fill: Fill) -> str:
        """The schedule's name; that of the one that is searched for, where its stages are planned for this one."""
        return SEARCHED if fill.name == START and SEARCHED in self.asked.schedules else fill.name

    @cached_property
    def menus(self) -> Menus:
        """What blocks can cost."""
        options = replace(self.asked.options, microbatches=self.asked.microbatches)
        may = self.asked.may_recompute and not is_asked(self.graph, options.recompute)
        counts = Counter(b.kind for b in self.blocks)
        rare = [k for k, n in counts.items() if RARE * n <= len(self.blocks) and self.n_devices > SMALL]
        return Menus(
            self.cluster, self._graph_of, options, may, frozenset(rare), self.decided, self.n_devices > SMALL
        )

    def _unequal(self) -> list[Candidate]:
        """Ways to cut over unequal groups, where these are worth a search: devices that differ, or divide badly."""
        asked, n = self.asked, self.n_devices
        names = [name for name in asked.schedules if name != SEARCHED and fill_of(name).chunks == 1]
        divides = sum(n % g == 0 for g in range(1, n + 1)) > 2
        if asked.mesh or not names or n != self.cluster.n_devices or n < 3 or len(self._pools) > 1:
            return []
        if divides and not self._uneven and not (asked.groups and n % asked.groups):
            return []
        search = Unequal(self.cluster, n, self.blocks, self.menus, asked.options, asked.microbatches)
        try:
            ways = search.candidates(names[0], CANDIDATES, asked.groups)
        except InfeasibleError as error:
            self.infeasible = self.infeasible or error
            return []
        return [
            Candidate(
                w.meshes, w.devices, name, tuple(self.blocks[b].first for b in w.bounds), w.seconds, w.recomputed
            )
            for w in ways if len(w.meshes) > 1 for name in names
        ]  # fmt: skip

    def _graph_of(self, block: Block) -> Graph:
        """The block alone."""
        starts = [self.name(block.first)] if block.first else []
        starts += [self.name(block.end)] if block.end < len(self.ops) else []
        return cut(self.graph, starts)[1 if block.first else 0].graph

    def _shapes(self, size: int) -> list[Mesh]:
        """Mesh shapes of a group. The last axis joins neighbours; one larger than a node is better split in two."""
        if self.asked.mesh:
            return [self.asked.mesh] if prod(k for _, k in self.asked.mesh) == size else []
        near = max(1, self.cluster.n_devices // self.cluster.n_nodes)
        shapes = [m for m in mesh_shapes(size) if len(m) == 1 or m[-1][1] <= near]
        return [m for m in shapes if allows(m, self.asked.options)]

    @cached_property
    def _pools(self) -> list[list[int]]:
        """Devices whose groups are alike: those of each type on many devices; on few, unequal groups are searched."""
        by_type: dict[str, list[int]] = {}
        for d in range(self.n_devices):
            by_type.setdefault(self.cluster.device(d).name, []).append(d)
        return list(by_type.values()) if self.n_devices > SMALL else [list(range(self.n_devices))]

    @cached_property
    def _uneven(self) -> bool:
        """Whether groups of equal size can differ: devices of several types."""
        return len({self.cluster.device(d).name for d in range(self.n_devices)}) > 1


__all__ = ["PipelineOptions", "Planned", "plan_pipeline"]
