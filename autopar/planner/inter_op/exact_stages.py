"""Exact plans of the stages of a way to cut, and the simulation of the step that they make.

Plans of stages are shared: stages alike in all but names are solved once, and microbatches in flight are counted up to
a round number. A group's memory is divided among its stages by need. Where memory binds, the slowest stages are planned
again for just what they keep, and on few devices the cut itself is searched. What runs again in the backward is decided
in the program of every stage, with its cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import ceil, inf
from typing import TypeVar

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.meshes import Mesh
from autopar.plan import Plan, StagePlan, one_stage
from autopar.planner.inter_op.blocks import Block, blocks
from autopar.planner.inter_op.estimates import EstimatedCut
from autopar.planner.inter_op.order import SEARCHED, START, better_order
from autopar.planner.inter_op.phases import phases
from autopar.planner.inter_op.shared_buffers import with_agreed_buffers
from autopar.planner.inter_op.stage_pins import of_stage
from autopar.planner.inter_op.timing import timing_of
from autopar.planner.inter_op.transplant import structure, transplant
from autopar.planner.inter_op.trial import simulated
from autopar.planner.intra_op.fold import fold
from autopar.planner.intra_op.mesh_plan import Earlier, Options, device_limit, plan_graph
from autopar.planner.intra_op.price import pricer
from autopar.planner.intra_op.problem import Beaten
from autopar.planner.intra_op.recompute import is_asked, patterns_in, segments_of
from autopar.prices import bytes_together
from autopar.rules.registry import rules_of
from autopar.staging import StageGraph, crossings_of, cut, hot_ops
from autopar.texts import show_bytes
from autopar.wishes import MOST_AXES
from cost_models.pipeline import (
    SCHEDULES,
    USUAL,
    Schedule,
    Timeline,
    Times,
    build,
    label_of,
    live_at_peak,
    live_per_stage,
    simulate,
)
from hardware_profiles import Cluster

SMALL = 16
"""Devices up to which more ways are looked at: exact plans of few stages cost little."""
REFINED = 4
"""Times that the slowest stages are planned again, or the bounds are moved."""
SHARES = 16
"""Parts into which a group's memory is divided for every two of its stages: so that many stages get the same limit."""
WORTH = 1.1
"""On few devices, a stage is not searched to its end if it alone takes this factor of the best step so far; what is no
pipeline, if it takes as long."""
FINER = 1.03
"""On many devices, a way to cut is given up that takes more than this factor of the best so far, before its slowest
stages are planned again for just what they keep: that hardly saves more."""
FEW = 4
"""Times as many microbatches, kept at another moment than that at which the group is fullest, are many more."""
LARGE_GAP = 0.06
"""The gap that is good enough for stages where memory binds; on few devices, until the best is known."""

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class PipelineOptions:
    """What a user may ask of a pipeline.

    Attributes:
        microbatches: per step; the graph is that of one.
        groups: groups of devices; None tries every number that divides the devices, 1 included.
        schedules: names to choose from; ``interleaved-1f1b:4`` is one with a degree of interleaving.
        mesh: of every group; None tries every shape.
        starts: names of the first operators of all stages but the first; None lets the planner cut.
        options: for the plan of each stage.
        may_recompute: blocks may run again in the backward, where memory is short or time is saved by it. Where
            ``options.recompute`` or the model itself (activation checkpointing) says what runs again, that and nothing
            else does.
        top: so many different layouts are planned exactly, if there are.
        max_axes: of a group's mesh, where every shape is tried.
    """

    microbatches: int
    groups: int | None = None
    schedules: Sequence[str] = USUAL
    mesh: Mesh | None = None
    starts: Sequence[str] | None = None
    options: Options = field(default_factory=Options)
    may_recompute: bool = True
    top: int = 1
    max_axes: int = MOST_AXES


@dataclass(frozen=True)
class Candidate:
    """A way to cut: positions of the stages' first operators, the groups, and an estimate of the step.

    ``n_bytes`` are estimates for each stage of what it holds all the time and of what it keeps of a microbatch; empty
    where they are not known; so is ``estimate``, which has the stages' times.
    """

    meshes: tuple[Mesh, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: str
    bounds: tuple[int, ...]
    seconds: float
    n_bytes: tuple[tuple[float, float], ...] = ()
    estimate: EstimatedCut | None = field(default=None, compare=False, repr=False)

    @property
    def groups(self) -> int:
        return len(self.meshes)

    def __str__(self) -> str:
        shapes = [mesh.shown() for mesh in self.meshes]
        runs = [(shape, len(list(run))) for shape, run in groupby(shapes)]
        return ", ".join(f"{n} group{'s' if n > 1 else ''} of {shape}" for shape, n in runs)


@dataclass(frozen=True, eq=False)
class Exact:
    """An exact plan of a candidate, with its simulation."""

    seconds: float
    what: str
    plan: Plan
    timeline: Timeline
    search: ExactPlans
    candidate: Candidate


@dataclass(eq=False)
class ExactPlans:
    """Plans of a microbatch's graph on the first devices of a cluster, cut in any way."""

    graph: Graph
    cluster: Cluster
    n_devices: int
    asked: PipelineOptions
    cluster_name: str
    _plans: dict[tuple[object, ...], dict[int, tuple[Graph, StagePlan]]] = field(default_factory=dict, init=False)
    _earlier: dict[tuple[object, ...], tuple[Graph, Earlier]] = field(default_factory=dict, init=False)

    @cached_property
    def blocks(self) -> list[Block]:
        folding = fold(self.graph)
        return blocks(self.graph, folding, rules_of(self.graph, folding.representative))

    @cached_property
    def ops(self) -> list[int]:
        return hot_ops(self.graph)

    def name(self, position: int) -> str:
        return self.graph.nodes[self.ops[position]].name

    def improved(self, best: Exact) -> list[Exact]:
        """Plans of the best cut so far, its stages searched to their end, and of cuts that differ by one block at one
        bound, as long as that is better."""
        plans: list[Exact] = []
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
            plans += new
            fastest = min(new, key=lambda f: f.seconds, default=best)
            if fastest.seconds >= best.seconds and len(tried) > 1:
                break
            best = min(best, fastest, key=lambda f: f.seconds)
            near = [c for c in self._moved(best.candidate) if c.bounds not in tried]
        return plans

    def _moved(self, candidate: Candidate) -> list[Candidate]:
        """Cuts that differ by one block at one bound."""
        if self.asked.starts is not None:
            return []
        firsts = [b.first for b in self.blocks]
        moved = []
        for k, bound in enumerate(candidate.bounds):
            for step in (-1, 1):
                number = firsts.index(bound) + step
                new = firsts[number] if 0 < number < len(firsts) else None
                if new is not None and new not in candidate.bounds:
                    moved.append(replace(candidate, bounds=(*candidate.bounds[:k], new, *candidate.bounds[k + 1 :])))
        return moved

    def exact(self, candidate: Candidate, best_known: float = inf, thorough: bool = False) -> Exact | None:
        """Plans of the stages, and the simulation; None if the schedule does not allow these counts.

        Args:
            best_known: seconds of a step.
            thorough: stages are as near to their optimum as was asked, where memory binds too.

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
            schedule = one_stage(self.asked.microbatches)
        choices, timing, step = self._stages(graphs, schedule, candidate, best_known, thorough)
        if asked == SEARCHED and n > 1:
            limits = [self.limit(devices) for devices in candidate.devices]
            choices, schedule = better_order(choices, schedule, timing, limits)
        timeline = simulate(schedule, timing)
        seconds = timeline.makespan_seconds + step
        plan = Plan(
            self.graph.fingerprint, self.cluster_name or self.cluster.name, choices, schedule, crossings_of(graphs),
            seconds,
        ).validate()  # fmt: skip
        return Exact(seconds, self.what(candidate, label_of(schedule)), plan, timeline, self, candidate)

    def n_programs(self, candidate: Candidate) -> int:
        """About how many different programs the exact plans of a candidate's stages take."""
        try:
            name = START if candidate.schedule == SEARCHED else candidate.schedule
            schedule = build(name, len(candidate.bounds) + 1, candidate.groups, self.asked.microbatches)
        except ValueError:
            return 0
        live = live_at_peak(schedule, [n for _, n in candidate.n_bytes] or [1.0] * schedule.n_stages)
        counted = _counted(live, live_per_stage(schedule))
        shares = [self._share(s, of, live, counted, candidate) for of in schedule.stages_of_rank for s in of]
        in_turn = [counted[s] for of in schedule.stages_of_rank for s in of]
        return len({(_rounded(n), share) for n, share in zip(in_turn, shares, strict=True)})

    def what(self, candidate: Candidate, schedule: str | None = None) -> str:
        """The layout of a candidate in words.

        Args:
            schedule: its label, if it was built.
        """
        if schedule is None:
            kind = SCHEDULES.get(candidate.schedule)
            each = (len(candidate.bounds) + 1) // candidate.groups
            schedule = kind.at(each).label if kind and candidate.groups > 1 else candidate.schedule
            schedule = schedule if candidate.groups > 1 else "none"
        m = self.asked.microbatches
        return f"{candidate}, {schedule}, {m} microbatch{'es' if m > 1 else ''}"

    def limit(self, devices: Sequence[int]) -> float:
        """Bytes that a device of a group may hold."""
        return device_limit(self.cluster, devices, self.asked.options.memory_limit_bytes)

    def _stages(
        self,
        graphs: Sequence[StageGraph],
        schedule: Schedule,
        candidate: Candidate,
        best_known: float,
        thorough: bool,
    ) -> tuple[tuple[StagePlan, ...], Times, float]:
        """Plans of the stages, what the schedule is simulated with, and the seconds that follow it once a step.

        Stages of a group share its memory. How many microbatches of each they keep when the group is fullest depends
        on what each keeps of one: an estimate at first, then what the plans say. Where that is more than the group
        has, its stages are planned again with less.
        """
        kept: list[float] = [n for _, n in candidate.n_bytes] or [1.0] * len(graphs)
        limits = [self.limit(devices) for devices in candidate.devices]
        rooms = list(limits)
        for _ in range(REFINED):
            live = live_at_peak(schedule, kept)
            choices = self._planned(graphs, schedule, candidate, live, rooms, best_known, thorough)
            kept = [choice.kept_bytes for choice in choices]
            live = live_at_peak(schedule, kept)
            choices = [c.with_in_flight(n) for c, n in zip(choices, live, strict=True)]
            needed = [bytes_together([choices[s].price for s in of_group]) for of_group in schedule.stages_of_rank]
            shared = [g for g, of_group in enumerate(schedule.stages_of_rank) if len(of_group) > 1]
            full = [g for g in shared if needed[g] > limits[g]]
            if not full:
                timing, step = timing_of(graphs, choices, schedule, self.cluster)
                return tuple(choices), timing, step
            for g in full:
                rooms[g] *= limits[g] / needed[g]
        raise InfeasibleError(
            f"no plan fits {show_bytes(limits[full[0]])} per device: the {len(schedule.stages_of_rank[full[0]])} "
            f"stages of group {full[0]} need {show_bytes(needed[full[0]])} together; use fewer stages a group or "
            "smaller microbatches"
        )

    def _planned(
        self, graphs: Sequence[StageGraph], schedule: Schedule, candidate: Candidate, live: Sequence[int],
        rooms: Sequence[float], best_known: float, thorough: bool,
    ) -> list[StagePlan]:  # fmt: skip
        """Plans of all stages.

        Args:
            live: microbatches in flight of each.
            rooms: bytes of a device of each group, which its stages share.
        """
        group = schedule.rank_of_stage
        stored: dict[tuple[int, str], str] = {}
        counted = _counted(live, live_per_stage(schedule))
        planned: dict[int, tuple[StagePlan, Options]] = {}
        for of_group in spread_out(schedule.stages_of_rank):  # one that alone takes too long ends it
            spent = 0.0
            for number in of_group:
                stage = graphs[number]
                mesh, devices = candidate.meshes[group[number]], candidate.devices[group[number]]
                wishes = of_stage(self.asked.options, stage, mesh)
                pins = dict(wishes.params or {})
                names = {n.target for _, n in stage.graph.of_kind("param")}
                pins.update({n: how for (g, n), how in stored.items() if g == group[number] and n in names})
                if not thorough:
                    wishes = replace(wishes, memory_gap=max(wishes.memory_gap, LARGE_GAP))
                worth = WORTH * best_known if self.n_devices <= SMALL and candidate.groups > 1 else best_known
                share = self._share(number, of_group, live, counted, candidate)
                options = replace(
                    wishes, in_flight=counted[number], params=pins or None, worth_seconds=worth - spent,
                    microbatches=self.asked.microbatches, memory_limit_bytes=rooms[group[number]] * share,
                    recompute=patterns_in(stage.graph, wishes.recompute), may_recompute=self._may_recompute,
                    blocks=self._blocks_in(stage.graph),
                )  # fmt: skip
                plan = self._stage_plan(stage.graph, mesh, options, devices)
                stored.update({(group[number], n): ",".join(c.stored) for n, c in plan.params.items()})
                planned[number] = plan, options
                if self.n_devices > SMALL:
                    spent += self.asked.microbatches * _pace(plan)
                    if spent >= worth:
                        raise Beaten
            if self._seems_beaten(graphs, candidate, planned, len(schedule.stages_of_rank), best_known):
                raise Beaten
        choices = [planned[number][0] for number in range(len(graphs))]
        asked = [planned[number][1] for number in range(len(graphs))]
        if self.n_devices > SMALL and best_known < inf:
            timing, step = timing_of(graphs, choices, schedule, self.cluster)
            if simulate(schedule, timing).makespan_seconds + step > FINER * best_known:
                raise Beaten
        self._refine(graphs, choices, asked, schedule)
        return with_agreed_buffers(graphs, choices, schedule, self.cluster)

    def _seems_beaten(
        self, graphs: Sequence[StageGraph], candidate: Candidate,
        planned: Mapping[int, tuple[StagePlan, Options]], groups: int, best_known: float,
    ) -> bool:  # fmt: skip
        """Whether a step takes too long in the simulator with the stages that are planned so far, the others taking
        what is estimated: on many devices, where that is asked after one group, two, four and so on."""
        done = len(planned) * groups // len(graphs)
        if self.n_devices <= SMALL or best_known == inf or candidate.estimate is None or done & (done - 1):
            return False
        exact = dict(enumerate(candidate.estimate.stages))
        for number, (plan, _) in planned.items():
            spent = phases(graphs[number].graph, plan, pricer(self.cluster, plan.mesh, plan.devices))
            whole = plan.whole_backward
            exact[number] = replace(
                exact[number], forward_seconds=spent.forward_seconds, step_seconds=spent.step_seconds,
                seconds=spent.forward_seconds + spent.backward_seconds,
                weight_seconds=0.0 if whole else min(spent.weight_seconds, spent.backward_seconds),
            )  # fmt: skip
        stages = tuple(exact[number] for number in range(len(graphs)))
        expected = simulated(replace(candidate.estimate, stages=stages), self.asked.microbatches)
        return expected > FINER * best_known

    @cached_property
    def _may_recompute(self) -> bool:
        """Whether the planner chooses what runs again: neither the user nor the model says it."""
        return self.asked.may_recompute and not is_asked(self.graph, self.asked.options.recompute)

    def _blocks_in(self, graph: Graph) -> tuple[str, ...]:
        """The operators with which the blocks begin that a stage's graph has."""
        return tuple(name for name in (self.name(block.first) for block in self.blocks) if name in graph.index)

    def _refine(
        self, graphs: Sequence[StageGraph], choices: list[StagePlan], asked: Sequence[Options], schedule: Schedule
    ) -> None:
        """Plan the slowest stages again for just the microbatches that they keep in flight, where memory made them
        slow: plans are shared between stages by counting up to a round number."""
        owners = Counter(n.target for stage in graphs for _, n in stage.graph.of_kind("param"))
        for _ in range(REFINED):
            slowest = max(schedule.stages_of_rank, key=lambda of_group: sum(_pace(choices[s]) for s in of_group))
            better = False
            for s in slowest:
                graph, choice = graphs[s], choices[s]
                if _is_pinned(asked[s]) or _rounded(asked[s].in_flight) == asked[s].in_flight:
                    continue  # planned for just these
                if any(owners[n.target] > 1 for _, n in graph.graph.of_kind("param")):
                    continue  # stages that share a parameter store it alike
                plan = self._stage_plan(graph.graph, choice.mesh, asked[s], choice.devices, exact=True)
                if _pace(plan) < _pace(choice):
                    choices[s], better = plan, True
            if not better:
                return

    @staticmethod
    def _share(
        stage: int, of_group: Sequence[int], live: Sequence[int], counted: Sequence[int], candidate: Candidate
    ) -> float:
        """The share of its group's memory that a stage is planned for, with the microbatches that are counted: by what
        is estimated that each stage needs when the group is fullest, or else equal."""
        if not candidate.n_bytes or len(of_group) == 1:
            return 1 / len(of_group)

        def need(s: int, in_flight: int) -> float:
            static, kept = candidate.n_bytes[s]
            return static + in_flight * kept

        needs = {s: need(s, live[s]) for s in of_group}
        most = max(of_group, key=lambda s: (needs[s], s))
        shares = SHARES * len(of_group) // 2
        parts = {s: ceil(shares * needs[s] / sum(needs.values())) for s in of_group if s != most}
        if stage == most:
            return (shares - sum(parts.values())) / shares
        return ceil(shares * need(stage, counted[stage]) / sum(needs.values())) / shares

    def _stage_plan(
        self, graph: Graph, mesh: Mesh, options: Options, devices: tuple[int, ...], exact: bool = False
    ) -> StagePlan:
        """The plan of a stage; stages alike in all but names, on devices alike, are solved once.

        A plan for more microbatches in flight serves for fewer too, if its memory does not bind; where it does, it is
        solved for a round number of them, and so for few different ones; or for just as many as there are (``exact``).
        """
        if _is_pinned(options):
            return plan_graph(graph, self.cluster, mesh, options, devices=devices)
        kinds = tuple(self.cluster.device(d).name for d in devices)
        asked_again = segments_of(graph, rules_of(graph), options.recompute)
        places = tuple((graph.index[first], graph.index[last]) for first, last in asked_again)
        begins = tuple(graph.index[name] for name in options.blocks)
        key = structure(graph), mesh, kinds, options.memory_limit_bytes, places, begins
        by_in_flight = self._plans.setdefault(key, {})
        wanted = options.in_flight
        target = wanted if exact else _rounded(wanted)
        for n, (first, plan) in sorted(by_in_flight.items()):
            if n == target or (n > wanted and _is_free(plan)):
                alike = plan if first is graph else transplant(plan, first, graph)
                return replace(alike.with_in_flight(wanted), devices=devices)
        first, earlier = self._earlier.setdefault((*key[:3], places, begins), (graph, Earlier()))
        if first is not graph:
            free = transplant(earlier.free, first, graph) if earlier.free is not None else None
            earlier = Earlier(free, earlier.ends)

        def planned(in_flight: int) -> StagePlan:
            asked = replace(options, in_flight=in_flight)
            return plan_graph(graph, self.cluster, mesh, asked, devices=devices, earlier=earlier)

        n = target
        try:
            plan = planned(n)
        except InfeasibleError:
            if n == wanted:
                raise
            n, plan = wanted, planned(wanted)
        by_in_flight[n] = graph, plan
        return plan.with_in_flight(wanted)


def spread_out(groups: Sequence[_Group]) -> list[_Group]:
    """Groups in an order in which the first few say most of all: the first, the middle one, those between, and so on.

    Their place in it is the number of a group with its binary digits reversed.
    """
    digits = max(1, (len(groups) - 1).bit_length())
    order = sorted(range(len(groups)), key=lambda k: format(k, f"0{digits}b")[::-1])
    return [groups[k] for k in order]


def _counted(live: Sequence[int], most: Sequence[int]) -> list[int]:
    """The microbatches in flight that each stage is planned for: those that it keeps when its group is fullest; where
    it keeps many more at another moment, these. A stage that is planned for one alone would keep so much of it that the
    group were fullest at that other moment."""
    return [n if FEW * n >= at_most else at_most for n, at_most in zip(live, most, strict=True)]


def _rounded(in_flight: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again."""
    power = 1 << (in_flight - 1).bit_length()  # the next power of two
    between = power * 3 // 4
    return between if power >= 4 and between >= in_flight else power


def _is_pinned(options: Options) -> bool:
    """Whether the plan of a stage is its own: pins may name what is in it."""
    return bool(options.constraints or options.params or options.inputs or options.outputs)


def _pace(plan: StagePlan) -> float:
    """Seconds of a microbatch, forward and backward."""
    return (plan.price.compute_seconds + plan.price.activation_seconds) / plan.microbatches


def _is_free(plan: StagePlan) -> bool:
    """Whether a plan is the optimum, and would be with more memory too."""
    return plan.solution is not None and plan.solution.status == "optimal" and not plan.solution.binds


__all__ = ["SMALL", "Candidate", "Exact", "ExactPlans", "PipelineOptions", "spread_out"]
