"""Where to cut the pipeline, and which schedule to run: stages of blocks on groups of devices.

1. Blocks are found in the graph; every kind of block is planned alone on every mesh shape of every group size: a menu
   from the fastest way to a small one, with and without recomputing (:mod:`autopar.planner.menu`).
2. For every number of microbatches, number of groups, mesh shape and schedule, stages are filled with blocks within
   the memory that the microbatches in flight leave (:mod:`autopar.planner.equal`). Where devices differ, or their
   number divides badly, a dynamic program cuts over unequal groups (:mod:`autopar.planner.unequal`). Both have an
   estimate of the step.
3. The best few are planned exactly, stage by stage, and simulated. The simulated best is the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import ceil, inf, prod

from autopar.errors import InfeasibleError, PlanError
from autopar.graph import Graph
from autopar.pipeline import PipelinePlan, StageChoice
from autopar.placements import Mesh, mesh_shapes
from autopar.plan import Plan
from autopar.planner import trial
from autopar.planner.blocks import Block, blocks
from autopar.planner.equal import FAR, NEAR, Equal
from autopar.planner.fold import fold
from autopar.planner.menu import Menus
from autopar.planner.order import SEARCHED, START, better_order, check_name
from autopar.planner.problem import Beaten
from autopar.planner.recompute import Recompute, patterns_in, segment, segments_of
from autopar.planner.search import MEMORY_FRACTION, Options, plan_graph
from autopar.planner.stage_pins import allows, of_stage
from autopar.planner.timing import timing_of
from autopar.planner.transplant import structure, transplant
from autopar.planner.unequal import SCHEDULES as UNEQUAL_SCHEDULES
from autopar.planner.unequal import Unequal
from autopar.rules.registry import rules_of
from autopar.staging import StageGraph, cut, hot_ops
from cost_models.pipeline import Schedule, Timeline, Times, build, live_per_stage, simulate
from hardware_profiles import Cluster

PER_RANK = {"interleaved-1f1b": 2, "zb-v": 2, "dualpipe-v": 2}
"""Stages that each group holds in a schedule; one in the others."""
CANDIDATES = 3
"""Ways to cut that are planned exactly and simulated, at most."""
TRIALS = 16
"""Cuts for every number of microbatches that are simulated with the times of their estimates."""
SMALL = 16
"""Devices up to which more ways are looked at: exact plans of few stages cost little."""
RARE = 32
"""A kind of block of which there is at most one among so many is rare, on more devices than that."""
CLOSE = 0.005
"""On more devices than that, the next is planned exactly if it looks at most this much worse than the best so far."""
REFINED = 4
"""Times that the slowest stages are planned again."""
SHARES = 16
"""Parts into which a group's memory is divided among its stages: so that many stages get the same limit."""
NUMBERS = 4
"""Numbers of microbatches of which the best few ways are planned exactly; of the best two, all that are near."""
WORTH = 1.1
"""On few devices, a stage is not searched to its end if it alone takes this factor of the best step so far."""
LARGE_GAP = 0.06
"""The gap that is good enough for stages on more devices than that, where memory binds."""
WORTH_A_LOOK = 2.0
"""The best way of every number of groups is planned exactly too, on few devices, if its estimate is within this factor
of the best; and so is every schedule of the best cuts."""


@dataclass(frozen=True)
class PipelineOptions:
    """What a user may ask of a pipeline.

    Attributes:
        microbatches: per step; the graph is that of one.
        groups: groups of devices; None tries every number that divides the devices, 1 included.
        schedules: names to choose from.
        mesh: of every group; None tries every shape.
        starts: names of the first operators of all stages but the first; None lets the planner cut.
        options: for the plan of each stage.
        may_recompute: blocks may run again in the backward, where memory is short or time is saved by it. Where
            ``options.recompute`` names what runs again, that and nothing else does.
    """

    microbatches: int
    groups: int | None = None
    schedules: Sequence[str] = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
    mesh: Mesh | None = None
    starts: Sequence[str] | None = None
    options: Options = field(default_factory=Options)
    may_recompute: bool = True


@dataclass(frozen=True)
class Candidate:
    """A way to cut: positions of the stages' first operators, the groups, and an estimate of the step.

    ``recomputed`` counts the blocks of each stage that run again; empty for none. ``n_bytes`` are estimates for each
    stage of what it holds all the time and of what it keeps of a microbatch; empty where they are not known.
    """

    meshes: tuple[Mesh, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: str
    bounds: tuple[int, ...]
    seconds: float
    recomputed: tuple[int, ...] = ()
    n_bytes: tuple[tuple[float, float], ...] = ()

    @property
    def groups(self) -> int:
        return len(self.meshes)

    def __str__(self) -> str:
        shapes = [" x ".join(f"{a}={k}" for a, k in mesh) for mesh in self.meshes]
        runs = [(shape, len(list(own))) for shape, own in groupby(shapes)]
        return ", ".join(f"{n} group{'s' if n > 1 else ''} of {shape}" for shape, n in runs)


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
    found: list[_Exact] = []
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
    best = min(found, key=lambda f: f.seconds)
    if n_devices <= SMALL and best.binds:
        found += best.search.improved(best)
    found.sort(key=lambda f: f.seconds)
    best = found[0]
    tried = {f.what: f.seconds for f in reversed(found)}
    return Planned(best.plan, best.timeline, tuple(sorted(tried.items(), key=lambda t: t[1])))


def _promising(searches: Sequence[_Search]) -> list[tuple[_Search, Candidate]]:
    """What is planned exactly, of searches from the fewest microbatches to the most.

    A smaller microbatch never takes less time a row, so what was too slow with a larger one is not planned again.
    """
    if len(searches) == 1 or searches[0].asked.starts is not None:
        return [(s, c) for s in searches for c in s.candidates()]
    if searches[0].n_devices > SMALL:
        decided: dict[tuple[object, ...], list[Plan]] = {}
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


@dataclass(frozen=True, eq=False)
class _Exact:
    """An exact plan of a candidate, with its simulation."""

    seconds: float
    what: str
    plan: PipelinePlan
    timeline: Timeline
    search: _Search
    candidate: Candidate

    @property
    def binds(self) -> bool:
        """Whether memory made a stage slower."""
        return any(s.plan.recompute or not _is_free(s.plan) for s in self.plan.stages)


@dataclass(eq=False)
class _Search:
    graph: Graph
    cluster: Cluster
    n_devices: int
    asked: PipelineOptions
    cluster_name: str
    infeasible: InfeasibleError | None = None
    fastest: Mapping[tuple[int, Mesh], float] = field(default_factory=dict)
    decided: dict[tuple[object, ...], list[Plan]] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], dict[int, tuple[Graph, Plan]]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[Block]:
        folding = fold(self.graph)
        return blocks(self.graph, folding, rules_of(self.graph, folding.representative))

    @cached_property
    def ops(self) -> list[int]:
        return hot_ops(self.graph)

    def name(self, position: int) -> str:
        return self.graph.nodes[self.ops[position]].name

    # -- candidates

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
        names = {START if name == SEARCHED else name: name for name in asked.schedules}
        pools = self._pools
        search = Equal(
            self.cluster, pools, self.blocks, self.menus, self._shapes, tuple(names), asked.microbatches,
            [self._limit(pool) for pool in pools], asked.groups, floors or {}, best_known, far,
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
                tuple(g.mesh for g in c.groups), tuple(g.devices for g in c.groups), names[c.schedule],
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
        for name in self.asked.schedules:
            groups, rest = divmod(len(starts) + 1, PER_RANK.get(name, 1))
            if rest or self.n_devices % groups or self.asked.groups not in (None, groups):
                continue
            found += [_equal(groups, mesh, name, bounds) for mesh in self._shapes(self.n_devices // groups)]
        return found

    @cached_property
    def menus(self) -> Menus:
        """What blocks can cost."""
        options = replace(self.asked.options, microbatches=self.asked.microbatches)
        may = self.asked.may_recompute and not options.recompute
        counts = Counter(b.kind for b in self.blocks)
        rare = [k for k, n in counts.items() if RARE * n <= len(self.blocks) and self.n_devices > SMALL]
        return Menus(
            self.cluster, self._graph_of, options, may, frozenset(rare), self.decided, self.n_devices > SMALL
        )

    def _unequal(self) -> list[Candidate]:
        """Ways to cut over unequal groups, where these are worth a search: devices that differ, or divide badly."""
        asked, n = self.asked, self.n_devices
        names = [name for name in asked.schedules if name in UNEQUAL_SCHEDULES]
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

    # -- exact

    def improved(self, best: _Exact) -> list[_Exact]:
        """Plans of cuts like the best so far, with as many blocks recomputed as is best: what the estimate knows least
        about where memory binds. Cuts that differ by one block at one bound are tried as long as that is better."""
        found: list[_Exact] = []
        near = [best.candidate]
        tried = set()
        for _ in range(REFINED):
            new = []
            for candidate in near:
                tried.add(candidate.bounds)
                try:
                    one = self.exact(candidate, best.seconds, thorough=True)
                except (InfeasibleError, Beaten):
                    continue
                new += [one] if one is not None else []
            found += new
            fastest = min(new, key=lambda f: f.seconds, default=best)
            if fastest.seconds >= best.seconds and len(tried) > 1:
                break
            best = min(best, fastest, key=lambda f: f.seconds)
            near = [c for c in self._moved(best.candidate) if c.bounds not in tried]
        return found

    def _moved(self, candidate: Candidate) -> list[Candidate]:
        """Cuts that differ by one block at one bound."""
        if self.asked.starts is not None:
            return []
        firsts = [b.first for b in self.blocks]
        found = []
        for k, bound in enumerate(candidate.bounds):
            for step in (-1, 1):
                number = firsts.index(bound) + step
                new = firsts[number] if 0 < number < len(firsts) else None
                if new is not None and new not in candidate.bounds:
                    found.append(replace(candidate, bounds=(*candidate.bounds[:k], new, *candidate.bounds[k + 1 :])))
        return found

    def exact(self, candidate: Candidate, best_known: float = inf, thorough: bool = False) -> _Exact | None:
        """Plans of the stages, and the simulation; None if the schedule does not allow these counts.

        Args:
            best_known: seconds of a step.
            thorough: as for :meth:`_fitting`.

        Raises:
            InfeasibleError: a stage does not fit.
            Beaten: a stage alone takes longer than the best known, and by how much is not worth the search.
        """
        starts = self.asked.starts or [self.name(p) for p in candidate.bounds]
        graphs = cut(self.graph, starts)
        asked, n = candidate.schedule, candidate.groups
        try:
            schedule = build(START if asked == SEARCHED else asked, len(graphs), n, self.asked.microbatches)
        except ValueError:
            if n > 1:
                return None  # this schedule does not allow these counts
        if n == 1:
            schedule = _one_group(len(graphs), self.asked.microbatches)
        choices, timing, step = self._stages(graphs, schedule, candidate, best_known, thorough)
        if asked == SEARCHED and n > 1:
            limits = [self._limit(own) for own in candidate.devices]
            choices, schedule = better_order(choices, schedule, timing, limits)
        timeline = simulate(schedule, timing)
        seconds = timeline.makespan_seconds + step
        plan = PipelinePlan(
            self.graph.fingerprint, self.cluster_name or self.cluster.name, choices, schedule,
            self.asked.options.optimizer, seconds,
        ).validate()  # fmt: skip
        count = f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"
        return _Exact(seconds, f"{candidate}, {schedule.name}, {count}", plan, timeline, self, candidate)

    def _limit(self, devices: Sequence[int]) -> float:
        """Bytes that a device of a group may hold."""
        limit = self.asked.options.memory_limit_bytes
        if limit is None:
            limit = MEMORY_FRACTION * min(self.cluster.device(d).memory_bytes for d in devices)
        return limit

    def _stages(
        self, graphs: Sequence[StageGraph], schedule: Schedule, candidate: Candidate, best_known: float,
        thorough: bool,
    ) -> tuple[tuple[StageChoice, ...], Times, float]:
        live = live_per_stage(schedule)
        group = schedule.rank_of_stage
        shares = {g: [s for s in range(len(graphs)) if group[s] == g] for g in set(group.values())}
        choices: list[StageChoice] = []
        asked: list[Options] = []
        stored: dict[tuple[int, str], str] = {}
        for stage in graphs:
            mesh, devices = candidate.meshes[group[stage.number]], candidate.devices[group[stage.number]]
            limit = self._limit(devices)
            own = of_stage(self.asked.options, stage, mesh)
            pins = dict(own.params or {})
            names = {n.target for _, n in stage.graph.of_kind("param")}
            pins.update({n: how for (g, n), how in stored.items() if g == group[stage.number] and n in names})
            if self.n_devices > SMALL:
                own = replace(own, memory_gap=max(own.memory_gap, LARGE_GAP))
            else:
                own = replace(own, worth_seconds=WORTH * best_known)
            options = replace(
                own, in_flight=live[stage.number], params=pins or None,
                microbatches=self.asked.microbatches,
                memory_limit_bytes=limit * self._share(stage.number, shares[group[stage.number]], live, candidate),
                recompute=patterns_in(stage.graph, own.recompute),
            )  # fmt: skip
            plan = self._fitting(stage, candidate, mesh, options, devices, thorough=thorough)
            stored.update({(group[stage.number], n): ",".join(c.stored) for n, c in plan.params.items()})
            begin = next(n.name for n in stage.graph.nodes if n.kind == "op" and n.hot)
            choices.append(StageChoice(begin, devices, plan))
            asked.append(options)
        self._refine(graphs, choices, asked, schedule, candidate)
        timing, step = timing_of(graphs, choices, schedule, self.cluster)
        return tuple(choices), timing, step

    def _refine(
        self, graphs: Sequence[StageGraph], choices: list[StageChoice], asked: Sequence[Options], schedule: Schedule,
        candidate: Candidate,
    ) -> None:  # fmt: skip
        """Plan the slowest stages again for just the microbatches that they keep in flight, where memory made them
        slow: plans are shared between stages by counting up to a round number."""
        owners = Counter(n.target for stage in graphs for _, n in stage.graph.of_kind("param"))
        for _ in range(REFINED):
            slowest = max(schedule.stages_of_rank, key=lambda held: sum(_pace(choices[s].plan) for s in held))
            better = False
            for s in slowest:
                graph, choice = graphs[s], choices[s]
                if _is_pinned(asked[s]) or _rounded(asked[s].in_flight) == asked[s].in_flight:
                    continue  # planned for just these
                if any(owners[n.target] > 1 for _, n in graph.graph.of_kind("param")):
                    continue  # stages that share a parameter store it alike
                plan = self._fitting(graph, candidate, choice.mesh, asked[s], choice.devices, exact=True)
                if _pace(plan) < _pace(choice.plan):
                    choices[s], better = replace(choice, plan=plan), True
            if not better:
                return

    @staticmethod
    def _share(stage: int, held: Sequence[int], live: Sequence[int], candidate: Candidate) -> float:
        """A stage's share of its group's memory: by what is estimated that each stage needs, or else equal."""
        if not candidate.n_bytes or len(held) == 1:
            return 1 / len(held)
        needs = {s: candidate.n_bytes[s][0] + live[s] * candidate.n_bytes[s][1] for s in held}
        most = max(held, key=lambda s: (needs[s], s))
        parts = {s: ceil(SHARES * needs[s] / sum(needs.values())) for s in held if s != most}
        return parts.get(stage, SHARES - sum(parts.values())) / SHARES

    def _fitting(
        self, stage: StageGraph, candidate: Candidate, mesh: Mesh, options: Options, devices: tuple[int, ...],
        exact: bool = False, thorough: bool = False,
    ) -> Plan:  # fmt: skip
        """The plan of a stage with as many blocks recomputed as the estimate says; with all of them if that is not
        enough; or (``thorough``), where memory binds, with the number of them at which the stage is fastest."""
        blocks = self._segments(stage, candidate)
        n = candidate.recomputed[stage.number] if candidate.recomputed else 0
        free = self.asked.may_recompute and not self.asked.options.recompute
        failed: InfeasibleError | Beaten | None = None
        plans: dict[int, Plan | None] = {}

        def seconds(count: int) -> float:
            """What the plan with so many blocks recomputed would make of a step if all stages took as long; infinite
            if none fits."""
            nonlocal failed
            if count not in plans:
                try:
                    again = replace(options, segments=blocks[:count])
                    plans[count] = self._stage_plan(stage.graph, mesh, again, devices, exact)
                except (InfeasibleError, Beaten) as error:
                    plans[count], failed = None, error
            plan = plans[count]
            return plan.price.seconds + (candidate.groups - 1) * _pace(plan) if plan else inf

        best = n = min(n, len(blocks))
        if seconds(n) == inf and free and not isinstance(failed, Beaten):
            best = len(blocks)
        known = plans[0] if n == 0 else None
        if free and thorough and not (known and _is_free(known)):
            best = min(dict.fromkeys((best, 0, len(blocks))), key=seconds)
            for step in (-1, 1):  # seconds fall and rise again: each block less costs memory, each more costs time
                while 0 <= best + step <= len(blocks) and seconds(best + step) < seconds(best):
                    best += step
        if seconds(best) == inf and failed:
            raise failed
        plan = plans[best]
        assert plan is not None
        return plan

    def _segments(self, stage: StageGraph, candidate: Candidate) -> Recompute:
        """What would run again of a stage, block by block."""
        bounds = (0, *candidate.bounds, len(self.ops))
        first, end = bounds[stage.number], bounds[stage.number + 1]
        graph, found = stage.graph, []
        rules = rules_of(graph)
        for block in self.blocks:
            if first <= block.first and block.end <= end:
                a, b = (graph.index[self.name(p)] for p in (block.first, block.end - 1))
                found.append(segment(graph, rules, a, b))
        return tuple(s for s in found if s is not None)

    def _stage_plan(
        self, graph: Graph, mesh: Mesh, options: Options, devices: tuple[int, ...], exact: bool = False
    ) -> Plan:
        """The plan of a stage; stages alike in all but names, on devices alike, are solved once.

        A plan for more microbatches in flight serves for fewer too, if its memory does not bind; where it does, it is
        solved for a round number of them, and so for few different ones; or for just as many as there are (``exact``).
        """
        if _is_pinned(options):
            return plan_graph(graph, self.cluster, mesh, options, devices=devices)
        kinds = tuple(self.cluster.device(d).name for d in devices)
        again = options.segments or segments_of(graph, rules_of(graph), options.recompute)
        places = tuple((graph.index[first], graph.index[last]) for first, last in again)
        key = structure(graph), mesh, kinds, options.memory_limit_bytes, places, options.worth_seconds
        known = self._plans.setdefault(key, {})
        wanted = options.in_flight
        target = wanted if exact else _rounded(wanted)
        for n, (first, plan) in sorted(known.items()):
            if n == target or (n > wanted and _is_free(plan)):
                own = plan if first is graph else transplant(plan, first, graph)
                return own.with_in_flight(wanted)
        n = target
        try:
            plan = plan_graph(graph, self.cluster, mesh, replace(options, in_flight=n), devices=devices)
        except InfeasibleError:
            if n == wanted:
                raise
            n, plan = wanted, plan_graph(graph, self.cluster, mesh, options, devices=devices)
        known[n] = graph, plan
        return plan.with_in_flight(wanted)

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


def _rounded(in_flight: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again."""
    power = 1 << (in_flight - 1).bit_length()  # the next power of two
    between = power * 3 // 4
    return between if power >= 4 and between >= in_flight else power


def _is_pinned(options: Options) -> bool:
    """Whether the plan of a stage is its own: pins may name what is in it."""
    return bool(options.constraints or options.params or options.inputs or options.outputs)


def _pace(plan: Plan) -> float:
    """Seconds of a microbatch, forward and backward."""
    return (plan.price.compute_seconds + plan.price.activation_seconds) / plan.microbatches


def _is_free(plan: Plan) -> bool:
    """Whether a plan is the optimum, and would be with more memory too."""
    return plan.solution is not None and plan.solution.status == "optimal" and not plan.solution.binds


def _one_group(n_stages: int, microbatches: int) -> Schedule:
    """No pipeline: forward and backward of each microbatch in turn."""
    from cost_models.pipeline import Action

    row = tuple(Action(0, kind, k) for k in range(microbatches) for kind in "FB")
    return Schedule("none", n_stages, microbatches, (tuple(range(n_stages)),), (row,)).validate()


__all__ = ["PipelineOptions", "Planned", "plan_pipeline"]
