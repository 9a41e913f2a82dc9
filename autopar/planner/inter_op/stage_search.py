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
from math import ceil, inf

from autopar.collection import uncollected
from autopar.errors import InfeasibleError, PlanError
from autopar.graph import Graph
from autopar.placements import Mesh, mesh_shapes, mesh_text, n_devices
from autopar.plan import Plan, StagePlan
from autopar.planner.inter_op import trial
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.equal import FAR, NEAR, Equal, Need
from autopar.planner.inter_op.exact_stages import SMALL, Candidate, Exact, ExactPlans, PipelineOptions
from autopar.planner.inter_op.menu import Menus
from autopar.planner.inter_op.one_group import least_seconds, one_group
from autopar.planner.inter_op.order import SEARCHED, START, check_name
from autopar.planner.inter_op.stage_pins import allows
from autopar.planner.inter_op.unequal import Unequal
from autopar.planner.intra_op.fold import fold
from autopar.planner.intra_op.problem import Beaten
from autopar.planner.intra_op.recompute import is_asked, segments_of
from autopar.rules.registry import rules_of
from autopar.staging import cut
from autopar.texts import show_bytes
from cost_models.costs import costs_of
from cost_models.pipeline import Fill, Timeline, fill_of, parse_kind
from hardware_profiles import Cluster

CANDIDATES = 3
"""Ways to cut that are planned exactly and simulated, at most."""
TRIALS = 16
"""Cuts for every number of microbatches that are simulated with the times of their estimates."""
RARE = 32
"""A kind of block of which there is at most one among so many is rare, on more than :data:`SMALL` devices."""
FAILED = 12
"""Of what looked promising on more than :data:`SMALL` devices, and does not fit when planned exactly, at most."""
ROOM = (1.0, 0.85, 0.7)
"""Shares of the devices' memory that estimates may fill: the next one where nothing of what was estimated fits."""
WORSE = 2
"""Numbers of microbatches in a row that are far from the best, after which no more are looked at."""
AXES = 2
"""Axes of a group's mesh, at most, in the first look. Those of more are looked at for groups of the number that is best
so far, once that is known: they are many, take several times as long to plan, and win by little where they win."""
DEEPER = 0.99
"""On more than :data:`SMALL` devices, meshes of more axes are planned exactly only where they seem to take less than
this factor of the best: the programs of their stages, where memory binds, take minutes."""
INTERRUPTED = "the search was interrupted: this is the best plan so far"
CLOSE = 0.005
"""On more than :data:`SMALL` devices, the next is planned exactly if it looks at most this much worse than the best."""
MARGIN, CLOSER, KNOWN = 0.9, 0.98, 8
"""On few devices, a way is not planned exactly if it takes longer than the best even where its estimate is as much too
long as the worst so far, and a tenth more; a fiftieth, once so many errors are known."""
BESIDE = 1.1
"""On more than :data:`SMALL` devices, one group is planned exactly where its estimate is within this factor of the
best: that is done in a second or two."""
NUMBERS = 4
"""Numbers of microbatches of which the best few ways are planned exactly; of the best two, all that are near."""
WORTH_A_LOOK = 2.0
"""The best way of every number of groups is planned exactly too, on few devices, if its estimate is within this factor
of the best; and so is every schedule of the best cuts."""


def _equal(groups: int, mesh: Mesh, schedule: str, bounds: tuple[int, ...]) -> Candidate:
    size = n_devices(mesh)
    devices = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
    return Candidate((mesh,) * groups, devices, schedule, bounds, 0.0)


@dataclass(frozen=True)
class Planned:
    """A pipelined plan with its simulation and what else was tried: ``(what, seconds)``, best first; ``others`` has the
    plans of all that were planned exactly, this one first."""

    plan: Plan
    timeline: Timeline
    tried: tuple[tuple[str, float], ...]
    others: tuple[Exact, ...] = ()


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
        _Search(one, cluster, n_devices, replace(asked, microbatches=m), cluster_name) for m, one in graphs.items()
    ]
    if asked.options.recompute:  # the patterns are those of the whole model
        first = searches[0].graph
        segments_of(first, rules_of(first, fold(first).representative), asked.options.recompute)
    exact_plans: list[Exact] = []
    bounds = [0.0] * len(searches)
    stopped = alone = False
    if n_devices <= SMALL and asked.starts is None and asked.groups in (None, 1):
        alone = True
        stopped = _in_one_group(searches, bounds, exact_plans, asked.top)
    for share in ROOM:
        if stopped or (exact_plans and asked.groups == 1):
            break
        fewest = 2 if alone and asked.groups is None else 1  # where one group is asked for, estimates say what it needs
        numbers = _Numbers(searches, share, bounds, _to_beat(exact_plans, asked.top), fewest)
        try:
            numbers.look()
        except KeyboardInterrupt:
            if not numbers.found and not exact_plans:
                raise
            stopped = True
        stopped |= _planned_exactly(numbers.promising(), n_devices, exact_plans, asked.top, stopped)
        if exact_plans or stopped or asked.starts is not None:
            break
    if not exact_plans:
        raise _nothing_fits(searches, asked, n_devices)
    if n_devices <= SMALL and not stopped:
        best = min(exact_plans, key=lambda f: f.seconds)
        try:
            exact_plans += best.search.improved(best)
        except KeyboardInterrupt:
            stopped = True
    exact_plans.sort(key=lambda f: f.seconds)
    tried: dict[str, Exact] = {}
    for f in exact_plans:
        tried.setdefault(f.what, f)
    best = exact_plans[0]
    notes = (*best.plan.notes, INTERRUPTED) if stopped else best.plan.notes
    seconds = tuple((what, f.seconds) for what, f in tried.items())
    return Planned(replace(best.plan, notes=notes), best.timeline, seconds, tuple(tried.values()))


def _to_beat(exact_plans: Sequence[Exact], top: int) -> float:
    """Seconds of the last of the best plans of so many different layouts: what takes longer is of no interest."""
    best_of: dict[str, float] = {}
    for plan in exact_plans:
        best_of[plan.what] = min(best_of.get(plan.what, inf), plan.seconds)
    return sorted(best_of.values())[top - 1] if len(best_of) >= top else inf


def _in_one_group(
    searches: Sequence[_Search], bounds: list[float], exact_plans: list[Exact], top: int
) -> bool:
    """Add exact plans in one group of all devices; whether Ctrl-C ended it. ``bounds`` are filled in, as far as needed.

    Every number of microbatches whose bound is below the best plan so far is planned on every mesh; on meshes of more
    axes, the best number alone, and where its commonest block is faster there.
    """

    def plan(search: _Search, mesh: Mesh) -> float:
        try:
            one = search.exact(one_group(mesh), _to_beat(exact_plans, top))
        except Beaten:
            return inf
        except InfeasibleError as error:
            search.infeasible = search.infeasible or error
            return inf
        if one is not None:
            exact_plans.append(one)
        return one.seconds if one is not None else inf

    n, seconds = searches[0].n_devices, [inf] * len(searches)
    try:
        order = list(range(len(searches)))
        for n_axes in range(1, AXES + 1):  # those of one axis are planned in no time, and tell which numbers are good
            for k in order:
                bounds[k] = bounds[k] or max(least_seconds(searches[k]), *bounds[:k], 0.0)
                if bounds[k] >= _to_beat(exact_plans, top):  # so are those of smaller microbatches
                    bounds[k:] = [max(bounds[k], bound) for bound in bounds[k:]]
                    continue
                for mesh in searches[k].shapes(n):
                    if len(mesh) == n_axes:
                        seconds[k] = min(seconds[k], plan(searches[k], mesh))
            order.sort(key=lambda k: seconds[k])
        if exact_plans:
            best = min(exact_plans, key=lambda p: p.seconds)
            number = [search is best.search for search in searches].index(True)
            if bounds[number] < DEEPER * best.seconds:
                for mesh in searches[number].deeper_shapes(best.candidate.meshes[0], range(n)):
                    plan(searches[number], mesh)
    except KeyboardInterrupt:
        if not exact_plans:
            raise
        return True
    return False


def _planned_exactly(
    promising: Sequence[tuple[_Search, Candidate]], n_devices: int, exact_plans: list[Exact], top: int, stopped: bool
) -> bool:
    """Add exact plans of what is promising, the best first, to what was found: at least ``top`` different ones, if
    there are; where Ctrl-C ended the search, only the first that fits. Whether Ctrl-C ended it early here."""
    failed, errors = 0, list[float]()
    for search, candidate in promising:
        if stopped and exact_plans:
            break
        least = min((f.seconds for f in exact_plans), default=inf)
        different = {f.what for f in exact_plans}
        stages = sum(f.candidate.groups > 1 for f in exact_plans)
        if n_devices > SMALL and candidate.groups > 1 and len(different) >= top and (
            stages >= CANDIDATES or failed == FAILED or least * (1 + CLOSE) < candidate.seconds
        ):
            break  # simulated with the times of the estimate, which are seldom much too long
        if n_devices > SMALL and top > 1 and search.what(candidate) in different:
            continue
        if n_devices <= SMALL and len(different) >= top and errors and candidate.seconds * _trust(errors) > least:
            continue
        try:
            one = search.exact(candidate, least if top == 1 else inf)
        except Beaten:
            continue
        except InfeasibleError as error:
            search.infeasible = search.infeasible or error
            failed += 1
            continue
        except KeyboardInterrupt:
            if not exact_plans:
                raise
            return True
        if one is not None:
            exact_plans.append(one)
            if candidate.seconds:
                errors.append(one.seconds / candidate.seconds)
    return False


def _trust(errors: Sequence[float]) -> float:
    """What part of an estimate a step takes at least, by the exact steps over their estimates so far."""
    return 0.0 if len(errors) < CANDIDATES else (MARGIN if len(errors) < KNOWN else CLOSER) * min(1.0, *errors)


def _nothing_fits(searches: Sequence[_Search], asked: PipelineOptions, n_devices: int) -> PlanError | InfeasibleError:
    """The error where no way to cut was planned: what was tried, and the least change that would do."""
    counts = ", ".join(str(s.asked.microbatches) for s in searches)
    groups = f"{asked.groups} group{'s' * (asked.groups > 1)}" if asked.groups else "any number of groups"
    devices = f"{n_devices} device{'s' * (n_devices > 1)}"
    tried = f"{groups} of {devices}, {counts} microbatches, schedules {', '.join(asked.schedules)}"
    leanest = min((s.leanest for s in searches if s.leanest is not None), default=None, key=lambda need: need.n_bytes)
    if leanest is not None and len(searches) > 1:
        again = ", operators that run again where that helps" if asked.may_recompute else ""
        factor = leanest.n_bytes / leanest.limit_bytes
        least = (
            f"devices of which {show_bytes(leanest.n_bytes)} may be filled, or about {ceil(factor * n_devices)} of "
            "these"
            if factor > 1
            else "more devices, or a smaller batch: what fits on average does not fit in every stage"
        )
        return InfeasibleError(
            f"no plan fits {show_bytes(leanest.limit_bytes)} per device; tried: {tried}{again}\n"
            f"  the leanest, {leanest.groups} group(s) of {mesh_text(leanest.mesh)} with {leanest.microbatches} "
            f"microbatches, needs about {show_bytes(leanest.n_bytes)} with one of them in flight; the least that would "
            f"do: {least}"
        )
    return next((s.infeasible for s in searches if s.infeasible), None) or PlanError(
        f"no schedule of {', '.join(asked.schedules)} allows {' or '.join(counts.split(', '))} microbatches on "
        f"{asked.groups or 'any number of'} groups of {n_devices} devices; change the microbatches or the schedules"
    )


@dataclass
class _Numbers:
    """The first three steps of the search, over numbers of microbatches: bound, estimate, simulate.

    A smaller microbatch never takes less time a row, so what was too slow with a larger one is not planned again.

    Attributes:
        searches: from the fewest microbatches to the most.
        share: of the devices' memory that the estimates may fill: less where they turned out to be too hopeful.
        bounds: of every search, seconds that no step in so many microbatches beats.
        to_beat: seconds of what is planned exactly already; it has fewer than ``fewest_groups``.
        found: ``(seconds, place among those of its number, search, candidate)``.
    """

    searches: Sequence[_Search]
    share: float
    bounds: Sequence[float]
    to_beat: float = inf
    fewest_groups: int = 1
    found: list[tuple[float, int, _Search, Candidate]] = field(default_factory=list)
    whole: dict[tuple[int, int, Mesh], float] = field(default_factory=dict)
    """What the commonest block takes for the whole batch, by search."""

    @property
    def few(self) -> bool:
        """Whether devices are so few that every number is looked at."""
        return self.searches[0].n_devices <= SMALL

    def look(self) -> None:
        """Look at all numbers that may be best.

        It starts from the middle, where a good plan is expected, so that others can be left alone, and goes on in both
        directions to the ends, or until :data:`WORSE` numbers in a row are far from the best.
        """
        if len(self.searches) == 1 or self.searches[0].asked.starts is not None:
            for search in self.searches:
                self._take(search, search.candidates(
                    share=self.share, beaten=self.to_beat, fewest=self.fewest_groups
                ))
            self._look_deeper()
            return
        if not self.few:
            decided: dict[tuple[object, ...], list[StagePlan]] = {}
            for search in self.searches:
                search.decided = decided
        middle = len(self.searches) // 2
        for order in (range(middle, len(self.searches)), range(middle - 1, -1, -1)):
            worse = 0
            for number in order:
                worse = 0 if self._look_at(number) else worse + 1
                if worse == WORSE and not self.few:
                    break
        self._look_deeper()

    def _look_deeper(self) -> None:
        """Look at meshes of more axes for the number of microbatches and of groups that is best so far."""
        ways = sorted(self.found, key=lambda f: f[:2])
        for _, _, search, candidate in ways[:1]:
            equal = len({n_devices(mesh) for mesh in candidate.meshes}) == 1
            if search.asked.mesh or search.asked.starts is not None or not equal or search.asked.max_axes <= AXES:
                continue
            far = NEAR if self.few else DEEPER
            shapes = search.deeper_shapes(candidate.meshes[0], candidate.devices[0])
            if not shapes:
                continue
            deeper = search.candidates(
                None, ways[0][0], far, self.share, candidate.groups, self.to_beat, shapes=shapes
            )
            self._take(search, [c for c in deeper if c.seconds <= far * ways[0][0]])

    def _look_at(self, number: int) -> bool:
        """Whether a number is near the best."""
        search, m = self.searches[number], self.searches[number].asked.microbatches
        if self.bounds[number] >= self.to_beat:
            return False
        best = min((f[0] for f in self.found), default=inf)
        floors: dict[tuple[int, Mesh], float] = {}
        for (n, pool, mesh), seconds in self.whole.items():
            if n <= number and costs_of(search.cluster).share_bounds:
                floors[pool, mesh] = max(floors.get((pool, mesh), 0.0), seconds / m)
        far = WORTH_A_LOOK if self.few else NEAR
        candidates = search.candidates(floors, best, far, self.share, beaten=self.to_beat, fewest=self.fewest_groups)
        self._take(search, candidates)
        self.whole.update({(number, pool, mesh): s * m for (pool, mesh), s in search.fastest.items() if s < inf})
        return bool(candidates) and candidates[0].seconds <= NEAR * best

    def _take(self, search: _Search, candidates: Sequence[Candidate]) -> None:
        self.found.extend((c.seconds, k, search, c) for k, c in enumerate(candidates))

    def promising(self) -> list[tuple[_Search, Candidate]]:
        """What is planned exactly, the best first."""
        if len(self.searches) == 1 or self.searches[0].asked.starts is not None:
            return [(s, c) for _, _, s, c in self.found]
        ordered = sorted(self.found, key=lambda f: f[:2])
        if not ordered or not self.few:  # estimates of one group are too long, mostly: its program chooses together
            near = [f for f in ordered if f[3].groups == 1 and f[0] <= BESIDE * ordered[0][0]][:CANDIDATES]
            return [(s, c) for _, _, s, c in (*near, *(f for f in ordered if f not in near))]
        near = [f for f in ordered if f[0] <= WORTH_A_LOOK * ordered[0][0]]
        counts = list(dict.fromkeys(id(f[2]) for f in near))  # by the best estimate of each number of microbatches
        return [
            (s, c) for _, k, s, c in near
            if id(s) in counts[:2] or (id(s) in counts[:NUMBERS] and k < CANDIDATES)
        ]  # fmt: skip


@dataclass(eq=False)
class _Search(ExactPlans):
    """Looks for ways to cut for one number of microbatches."""

    infeasible: InfeasibleError | None = None
    leanest: Need | None = None
    fastest: Mapping[tuple[int, Mesh], float] = field(default_factory=dict)
    decided: dict[tuple[object, ...], list[StagePlan]] = field(default_factory=dict)

    def candidates(
        self, floors: Mapping[tuple[int, Mesh], float] | None = None, best_known: float = inf, far: float = FAR,
        share: float = 1.0, groups: int | None = None, beaten: float = inf, fewest: int = 1,
        shapes: Sequence[Mesh] = (),
    ) -> list[Candidate]:  # fmt: skip
        """The most promising ways to cut, by estimate.

        Args:
            floors, best_known, far, beaten, fewest: as for :class:`Equal`.
            share: of the devices' memory that may be filled.
            groups: how many, where the user leaves that open; None for any number.
            shapes: the only meshes to look at.
        """
        if self.asked.starts is not None:
            return self._pinned(self.asked.starts)
        asked = self.asked
        schedules = tuple(dict.fromkeys(START if name == SEARCHED else name for name in asked.schedules))
        pools = self._pools
        shapes_of = (lambda size: [m for m in shapes if n_devices(m) == size]) if shapes else self.shapes
        search = Equal(
            self.cluster, pools, self.blocks, self.menus, shapes_of, schedules, asked.microbatches,
            [share * self.limit(pool) for pool in pools], asked.groups or groups, floors or {}, best_known, far,
            self.n_devices <= SMALL and not shapes, beaten, fewest,
        )  # fmt: skip
        cuts = search.cuts()
        self.fastest = search.fastest
        self.infeasible = self.infeasible or search.infeasible
        self.leanest = self.leanest or search.leanest
        if self.n_devices > SMALL:
            cuts = [replace(c, seconds=s) for s, c in trial.best(cuts, asked.microbatches, TRIALS)]
        best = cuts[:CANDIDATES] if self.n_devices <= SMALL else cuts
        if self.n_devices <= SMALL and cuts:  # the estimate knows neither the order of actions nor the exact plans
            near = [c for c in cuts if c.seconds <= WORTH_A_LOOK * cuts[0].seconds]
            for groups in sorted({len(c.groups) for c in near}):
                best += [c for c in near if len(c.groups) == groups][:1]
            best += [c for c in near if any(c.groups == d.groups for d in cuts[:CANDIDATES])]
        candidates = [
            Candidate(
                tuple(g.mesh for g in c.groups), tuple(g.devices for g in c.groups), self._named(c.schedule),
                tuple(self.blocks[b].first for b in c.bounds), c.seconds,
                tuple((s.static_bytes, s.kept_bytes) for s in c.stages),
            )
            for c in dict.fromkeys(best)
        ]  # fmt: skip
        return candidates if shapes else [*candidates, *self._unequal()]

    def _pinned(self, starts: Sequence[str]) -> list[Candidate]:
        """All groups, shapes and schedules for which the user's cuts are right."""
        positions = {self.name(p): p for p in range(len(self.ops))}
        bounds = tuple(positions.get(s, 0) for s in starts)
        candidates = []
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
                candidates += [_equal(groups, mesh, name, bounds) for mesh in self.shapes(self.n_devices // groups)]
        return candidates

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
        many = self.n_devices > SMALL
        common = counts.most_common(1)[0][0] if many else None
        return Menus(self.cluster, self._graph_of, options, may, frozenset(rare), self.decided, many, common)

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
                w.meshes, w.devices, name, tuple(self.blocks[b].first for b in w.bounds), w.seconds
            )
            for w in ways if len(w.meshes) > 1 for name in names
        ]  # fmt: skip

    def _graph_of(self, block: Block) -> Graph:
        """The block alone."""
        starts = [self.name(block.first)] if block.first else []
        starts += [self.name(block.end)] if block.end < len(self.ops) else []
        return cut(self.graph, starts)[1 if block.first else 0].graph

    def shapes(self, size: int, most_axes: int = AXES) -> list[Mesh]:
        """Mesh shapes of a group. The last axis joins neighbours; one larger than a node is better split in two. If
        more than :data:`AXES` axes are asked for, only those that have more."""
        if self.asked.mesh:
            return [self.asked.mesh] if n_devices(self.asked.mesh) == size else []
        near = max(1, self.cluster.n_devices // self.cluster.n_nodes)
        every = mesh_shapes(size, min(most_axes, self.asked.max_axes))
        shapes = [m for m in every if len(m) == 1 or n_devices(m[1:]) <= near]
        if most_axes > AXES:  # those with fewer were looked at before
            shapes = [m for m in shapes if len(m) > AXES]
        return [m for m in shapes if allows(m, self.asked.options)]

    def deeper_shapes(self, fewer: Mesh, devices: Sequence[int]) -> list[Mesh]:
        """Meshes with more than :data:`AXES` axes, on which the commonest block is faster than on one of fewer axes of
        the same devices: where it is not, the stages' programs would take long to say the same."""
        if self.asked.mesh or self.asked.max_axes <= AXES:
            return []
        common, _ = Counter(b.kind for b in self.blocks).most_common(1)[0]
        block = next(b for b in self.blocks if b.kind == common)
        faster = []
        for mesh in self.shapes(len(devices), self.asked.max_axes):
            try:
                before = self.menus.fastest(block, fewer, devices)
                faster += [mesh] if self.menus.fastest(block, mesh, devices) <= DEEPER * before else []
            except InfeasibleError:
                continue
        return faster

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
