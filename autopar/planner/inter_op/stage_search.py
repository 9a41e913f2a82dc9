"""The search for a pipeline's cuts and schedule: stages of blocks on groups of devices.

Every number of microbatches (:mod:`.per_microbatch_count`) goes through four steps, each of which costs more than the
one before and sees less of what there is to choose from:

1. Bound: what no step in so many microbatches, on such a mesh, beats. Every kind of block is planned alone
   (:mod:`.estimating.block_costs`), in its fastest way.
2. Estimate: for every number of groups, mesh shape and schedule, stages are filled with blocks within the memory that
   the microbatches in flight leave (:mod:`.estimating.equal`). Where devices differ, or their number divides badly, a
   dynamic program cuts over unequal groups (:mod:`.estimating.unequal`).
3. Simulate: on many devices, the best estimates are run in the simulator (:mod:`.estimating.simulated_estimate`).
4. Plan exactly: the best few are planned stage by stage and simulated again (:mod:`.exact.exact_stages`), as long as
   they may beat the best so far (:mod:`.incumbents`), which is the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2

from autopar.errors import PlanError
from autopar.garbage_collection import uncollected
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.candidates import Candidate, PipelineOptions
from autopar.planner.inter_op.estimating.block_costs import BlockPlans
from autopar.planner.inter_op.exact.exact_stages import Exact
from autopar.planner.inter_op.incumbents import Incumbents
from autopar.planner.inter_op.nothing_fits import nothing_fits
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.inter_op.simulating.order import check_name
from autopar.planner.inter_op.single_stage import least_seconds, one_group
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.building.integer_program import Beaten
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.plans.plan import Plan
from autopar.progress import note_best, tell
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.costs import costs_of
from cost_models.schedules import Timeline
from hardware_profiles import Cluster

INTERRUPTED = "the search was interrupted: this is the best plan so far"


@dataclass(frozen=True)
class Planned:
    """A pipelined plan with its simulation, and the other layouts: ``(layout, seconds)``, best first.

    ``others`` has all exact plans, this one first.
    """

    plan: Plan
    timeline: Timeline
    tried: tuple[tuple[str, float], ...]
    others: tuple[Exact, ...] = ()


@uncollected()  # a search plans thousands of blocks
def plan_pipeline(
    graph: Graph | Mapping[int, Graph], cluster: Cluster, n_devices: int, request: PipelineOptions, *,
    cluster_name: str = "", beaten: float = inf,
) -> Planned:  # fmt: skip
    """Return the best pipelined plan on the first ``n_devices`` of a cluster; one group of all of them is a choice too.

    ``graph`` is that of a microbatch, or graphs by number of microbatches, to choose the number too (that of
    ``request`` does not matter then). A plan of ``beaten`` seconds or more is not searched for.

    Raises:
        PlanError: a schedule, a number of groups or cuts that cannot be.
        InfeasibleError: nothing fits the devices' memory.
        Beaten: nothing that fits takes less than ``beaten``.
    """
    graphs = dict(sorted(graph.items())) if isinstance(graph, Mapping) else {request.microbatches: graph}
    for name in request.schedules:
        check_name(name)
    if request.groups is not None and not 1 <= request.groups <= n_devices:
        raise PlanError(f"{n_devices} devices cannot be cut into {request.groups} groups; use 1 to {n_devices}")
    searches = [
        OneNumber(one, cluster, n_devices, replace(request, microbatches=m), cluster_name) for m, one in graphs.items()
    ]
    if request.options.recompute:  # the patterns are those of the whole model
        first = searches[0].graph
        segments_of(first, rules_of(first, fold(first).representative), request.options.recompute)
    best = Incumbents(n_devices, beaten)
    note_best("")
    promising: list[tuple[OneNumber, Candidate]] = []
    bounds = [0.0] * len(searches)
    few = n_devices <= EFFORT.few_devices
    alone = few and request.starts is None and request.groups in (None, 1)
    if alone:
        with best.interruptible():
            _in_one_group(searches, bounds, best)
    for share in EFFORT.room_shares:
        if best.interrupted or (best.plans and request.groups == 1):
            break
        fewest = 2 if alone and request.groups is None else 1  # where one group is wanted, estimates say what it needs
        numbers = _Numbers(searches, share, bounds, best.to_beat, fewest)
        with best.interruptible(numbers.found):
            numbers.look()
        with best.interruptible():
            promising = numbers.promising()
            best.plan_exactly(promising)
        if best.plans or best.interrupted or request.starts is not None:
            break
    if beaten < inf and (not best.plans or best.fastest.seconds >= beaten):
        raise Beaten
    if not best.plans:
        best.look_closer(searches)
    if not best.plans:
        raise nothing_fits(searches, request, n_devices)
    if not few and not best.interrupted:
        with best.interruptible():
            best.share_equally(searches)
    if few and not best.interrupted:
        with best.interruptible():
            best.plans += best.fastest.search.improved(best.fastest)
    if request.top > 1 and not best.interrupted:
        with best.interruptible():
            best.next_best(request.top, promising)
    best.plans.sort(key=lambda f: f.seconds)
    tried: dict[str, Exact] = {}
    for f in best.plans:
        tried.setdefault(f.what, f)
    fastest = best.fastest
    notes = (*fastest.plan.notes, INTERRUPTED) if best.interrupted else fastest.plan.notes
    seconds = tuple((what, f.seconds) for what, f in tried.items())
    return Planned(replace(fastest.plan, notes=notes), fastest.timeline, seconds, tuple(tried.values()))


def _in_one_group(searches: Sequence[OneNumber], bounds: list[float], best: Incumbents) -> None:
    """Add exact plans in one group of all devices, and fill in ``bounds`` as far as needed.

    Every number of microbatches whose bound is below the best plan so far is planned on every mesh; on meshes of more
    axes, the best number alone, and where its commonest block is faster there.
    """
    n, seconds = searches[0].n_devices, [inf] * len(searches)
    order = list(range(len(searches)))
    for n_axes in range(1, EFFORT.first_axes + 1):  # meshes of one axis take no time, and show which numbers are good
        for k in order:
            bounds[k] = bounds[k] or max(least_seconds(searches[k]), *bounds[:k], 0.0)
            if bounds[k] >= best.to_beat:  # so are those of smaller microbatches
                best.slower += [
                    (searches[k], replace(one_group(mesh), seconds=bounds[k]))
                    for mesh in searches[k].shapes(n) if len(mesh) == n_axes
                ]  # fmt: skip
                bounds[k:] = [max(bounds[k], bound) for bound in bounds[k:]]
                continue
            for mesh in searches[k].shapes(n):
                if len(mesh) == n_axes:
                    seconds[k] = min(seconds[k], best.add(searches[k], one_group(mesh)))
        order.sort(key=lambda k: seconds[k])
    if best.plans:
        fastest = best.fastest
        number = [search is fastest.search for search in searches].index(True)
        if bounds[number] < EFFORT.deeper_gain * fastest.seconds and not _is_full_of_state(fastest):
            for mesh in searches[number].deeper_shapes(fastest.candidate.meshes[0], range(n)):
                best.add(searches[number], one_group(mesh))


def _is_full_of_state(plan: Exact) -> bool:
    """Return whether state leaves so little of a device that programs of more axes take minutes.

    A relaxation of 200,000 columns took 96 s so near to what can be, where others take 2 s.
    """
    (stage,) = plan.plan.stages
    return stage.price.state_bytes > EFFORT.tight_share * plan.search.limit(stage.devices)


@dataclass
class _Numbers:
    """The first three steps of the search, over numbers of microbatches: bound, estimate, simulate.

    A smaller microbatch never takes less time a row, so what was too slow with a larger one is not planned again.

    Attributes:
        searches: from the fewest microbatches to the most.
        share: the share of the devices' memory that the estimates may fill: less where they turned out to be too
            hopeful.
        bounds: for every search, seconds that no step in its number of microbatches beats.
        to_beat: seconds of what is planned exactly already; it has fewer than ``fewest_groups``.
        found: ``(seconds, place among those of its number, search, candidate)``.
    """

    searches: Sequence[OneNumber]
    share: float
    bounds: Sequence[float]
    to_beat: float = inf
    fewest_groups: int = 1
    found: list[tuple[float, int, OneNumber, Candidate]] = field(default_factory=list)
    whole: dict[tuple[int, int, Mesh], float] = field(default_factory=dict)
    """What the commonest block takes for the whole batch, by search."""

    @property
    def few(self) -> bool:
        """Devices so few that every number is looked at."""
        return self.searches[0].few

    def look(self) -> None:
        """Look at all numbers that may be best.

        It starts where a good plan is expected, so that others can be left alone, and goes on to more and then to
        fewer, to the ends, or until ``EFFORT.worse_in_a_row`` numbers are far from the best; on many devices to fewer
        only if the start is not far from the best by then. A small model on many devices starts from the fewest.
        """
        if len(self.searches) == 1 or self.searches[0].request.starts is not None:
            for search in self.searches:
                self._take(search, search.candidates(share=self.share, beaten=self.to_beat, fewest=self.fewest_groups))
            self._look_deeper()
            return
        decided = BlockPlans()
        for search in self.searches:
            search.decided = decided
        start = len(self.searches) // 2
        if not self.few:
            # a second microbatch launches everything once more
            start = 0 if self.searches[start].launches_most() else self._likely_best(start)
        for order in (range(start, len(self.searches)), range(start - 1, -1, -1)):
            if not self.few and self._is_far(start):
                break  # it got better in the first direction
            worse = 0
            for number in order:
                worse = 0 if self._look_at(number) else worse + 1
                if worse == EFFORT.worse_in_a_row and not self.few:
                    break
        self._look_deeper()

    def _likely_best(self, middle: int) -> int:
        """Return where to start: ``EFFORT.devices_a_microbatch`` devices have one row each, or the middle."""
        if self.searches[0].n_devices <= EFFORT.devices_a_microbatch:
            return middle
        numbers = [search.request.microbatches for search in self.searches]
        wanted = log2(numbers[-1] * EFFORT.devices_a_microbatch / self.searches[0].n_devices)
        return min(range(len(numbers)), key=lambda k: abs(log2(numbers[k]) - wanted))

    def _look_deeper(self) -> None:
        """Look at meshes of more axes for the number of microbatches and of groups that is best so far."""
        best_first = sorted(self.found, key=lambda f: f[:2])
        for _, _, search, candidate in best_first[:1]:
            equal = len({mesh.n_devices for mesh in candidate.meshes}) == 1
            request = search.request
            if request.mesh or request.starts is not None or not equal or request.max_axes <= EFFORT.first_axes:
                continue
            far = EFFORT.near_mesh if self.few else EFFORT.deeper_gain
            shapes = search.deeper_shapes(candidate.meshes[0], candidate.devices[0])
            if not shapes:
                continue
            best = best_first[0][0]
            deeper = search.candidates(None, best, far, self.share, candidate.groups, self.to_beat, shapes=shapes)
            self._take(search, [c for c in deeper if c.seconds <= far * best])

    def _look_at(self, number: int) -> bool:
        """Look at a number of microbatches and return whether it is near the best."""
        search, m = self.searches[number], self.searches[number].request.microbatches
        if self.bounds[number] >= self.to_beat:
            return False
        tell(lambda: f"estimates for {m} microbatches")
        best = min((f[0] for f in self.found), default=inf)
        floors: dict[tuple[int, Mesh], float] = {}
        for (n, pool, mesh), seconds in self.whole.items():
            if n <= number and costs_of(search.cluster).share_bounds:
                floors[pool, mesh] = max(floors.get((pool, mesh), 0.0), seconds / m)
        far = EFFORT.worth_a_look if self.few else EFFORT.near_mesh
        candidates = search.candidates(floors, best, far, self.share, beaten=self.to_beat, fewest=self.fewest_groups)
        self._take(search, candidates)
        self.whole.update({(number, pool, mesh): s * m for (pool, mesh), s in search.fastest.items() if s < inf})
        return bool(candidates) and candidates[0].seconds <= EFFORT.near_mesh * best

    def _is_far(self, number: int) -> bool:
        """Return whether a number that was looked at is far from the best."""
        seconds = [found[0] for found in self.found if found[2] is self.searches[number]]
        return bool(seconds) and min(seconds) > EFFORT.near_mesh * min(found[0] for found in self.found)

    def _take(self, search: OneNumber, candidates: Sequence[Candidate]) -> None:
        self.found.extend((c.seconds, k, search, c) for k, c in enumerate(candidates))

    def promising(self) -> list[tuple[OneNumber, Candidate]]:
        """Return the candidates for exact plans, the best first."""
        if len(self.searches) == 1 or self.searches[0].request.starts is not None:
            return [(s, c) for _, _, s, c in self.found]
        ordered = sorted(self.found, key=lambda f: f[:2])
        if not ordered:
            return []
        if not self.few:
            near = EFFORT.one_group_near * ordered[0][0]
            alone = [f for f in ordered if f[3].groups == 1 and f[0] <= near][: EFFORT.candidates]
            stages = [f for f in ordered if f not in alone]
            first = [f for f in stages[:EFFORT.candidates] if f[0] <= EFFORT.near_mesh * stages[0][0]]
            if len(first) > 1:  # what takes few programs is planned first: by what it takes, the others may end early
                first.sort(key=lambda f: f[2].n_programs(f[3]))
            # estimates of one group are too long, mostly: its program chooses together
            return [(s, c) for _, _, s, c in (*alone, *first, *stages[len(first):])]
        near = [f for f in ordered if f[0] <= EFFORT.worth_a_look * ordered[0][0]]
        counts = list(dict.fromkeys(id(f[2]) for f in near))  # by the best estimate of each number of microbatches
        return [
            (s, c) for _, k, s, c in near
            if id(s) in counts[:2] or (id(s) in counts[:EFFORT.exact_numbers] and k < EFFORT.candidates)
        ]  # fmt: skip


__all__ = ["INTERRUPTED", "PipelineOptions", "Planned", "plan_pipeline"]
