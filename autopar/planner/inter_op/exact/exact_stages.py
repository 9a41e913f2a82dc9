"""Exact plans of the stages of a layout, and the simulation of the step that they make.

Plans of stages are shared (:mod:`.stage_plans`), and so is a group's memory among its stages (:mod:`.memory_shares`).
Where memory binds, the slowest stages are planned again for just what they keep, and on few devices the cut itself is
searched. Recomputation is decided in the program of every stage, with its cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from autopar.errors import InfeasibleError, first_few
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.blocks import Block, blocks
from autopar.planner.inter_op.candidates import Candidate, PipelineOptions
from autopar.planner.inter_op.estimating.simulated_estimate import simulated
from autopar.planner.inter_op.exact.memory_shares import counted_in_flight, extra_bytes, share_of, with_more, with_needs
from autopar.planner.inter_op.exact.shared_buffers import with_agreed_buffers
from autopar.planner.inter_op.exact.stage_plans import StagePlans, pace_of, rounded
from autopar.planner.inter_op.simulating.order import SEARCHED, START, better_order
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.inter_op.simulating.timing import OnceAStep, step_of, timing_of
from autopar.planner.inter_op.stage_pins import of_stage
from autopar.planner.intra_op.building.fold import Fold, fold
from autopar.planner.intra_op.building.integer_program import Beaten, NoChoice
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recomputable import block_starts
from autopar.planner.intra_op.memory.recompute import is_asked, patterns_in
from autopar.planner.intra_op.mesh_plan import Options, device_limit
from autopar.planner.intra_op.pins.small_parameters import TooSmallError
from autopar.planner.intra_op.within_memory import UNLIMITED
from autopar.plans.plan import Plan, StagePlan, one_stage
from autopar.plans.prices import bytes_together
from autopar.plans.stage_graphs import StageGraph, cut, hot_ops, stage_edges_of
from autopar.plans.weight_versions import check_asynchronous, note_on_training, versions_of
from autopar.progress import tell
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.texts import show_bytes
from cost_models.schedules import (
    KNOWN,
    Schedule,
    Timeline,
    Times,
    build,
    label_of,
    live_at_peak,
    live_per_stage,
)  # fmt: skip
from hardware_profiles import Cluster

_Group = TypeVar("_Group")


class _StageTooLarge(InfeasibleError):
    """A stage that does not fit its share of its group's memory; the message has both."""

    def __init__(self, error: InfeasibleError, stage: int, of_group: Sequence[int], limit: float) -> None:
        others = first_few([str(s) for s in of_group if s != stage])
        super().__init__(
            f"{error}\n  stage {stage} shares {show_bytes(limit)} per device with the others of its group: {others}"
        )
        self.stage = stage


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
    """Plans of a microbatch's graph on the first devices of a cluster, cut in any layout."""

    graph: Graph
    cluster: Cluster
    n_devices: int
    request: PipelineOptions
    cluster_name: str

    @property
    def few(self) -> bool:
        """Devices so few that more layouts are planned exactly."""
        return self.n_devices <= EFFORT.few_devices

    @cached_property
    def stage_plans(self) -> StagePlans:
        """Plans of stages that were made so far."""
        return StagePlans(self.cluster)

    @cached_property
    def folding(self) -> Fold:
        """Repeats of the graph."""
        return fold(self.graph)

    @cached_property
    def blocks(self) -> list[Block]:
        """Blocks of the graph, of which stages are made."""
        return blocks(self.graph, self.folding, rules_of(self.graph, self.folding.representative))

    @cached_property
    def ops(self) -> list[int]:
        """Operators of which stages are made."""
        return hot_ops(self.graph)

    def name(self, position: int) -> str:
        """Return the name of the operator at a position among :attr:`ops`."""
        return self.graph.nodes[self.ops[position]].name

    def improved(self, best: Exact) -> list[Exact]:
        """Return plans of the best cut, searched to their end, and of cuts one block away, while these improve."""
        plans: list[Exact] = []
        near = [best.candidate]
        tried = set()
        for _ in range(EFFORT.replans):
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
        """Return the cuts that differ by one block at one bound."""
        if self.request.starts is not None:
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

    def exact(
        self, candidate: Candidate, best_known: float = inf, thorough: bool = False, explains: bool = False
    ) -> Exact | None:
        """Return plans of the stages with their simulation; None if the schedule does not allow these counts.

        ``best_known`` are seconds of a step. With ``thorough``, stages are as near to their optimum as wanted where
        memory binds too; with ``explains``, the error of a stage that does not fit has what the smallest would need.

        Raises:
            InfeasibleError: a stage does not fit.
            Beaten: a stage alone takes longer than the best known, and by how much is not worth the search.
        """
        starts = self.request.starts or [self.name(p) for p in candidate.bounds]
        graphs = cut(self.graph, starts)
        request, n = candidate.schedule, candidate.groups
        try:
            schedule = build(START if request == SEARCHED else request, len(graphs), n, self.request.microbatches)
        except ValueError:
            if n > 1:
                return None  # this schedule does not allow these counts
        if n == 1:
            schedule = one_stage(self.request.microbatches)
        check_asynchronous(schedule, graphs)
        choices, timing, once = self._stages(graphs, schedule, candidate, best_known, thorough, explains)
        if request == SEARCHED and n > 1:
            limits = [self.limit(devices) for devices in candidate.devices]
            choices, schedule = better_order(choices, schedule, timing, limits)
        timeline, seconds = step_of(schedule, timing, once)
        note = note_on_training(schedule)
        plan = Plan(
            self.graph.fingerprint, self.cluster_name or self.cluster.name, choices, schedule, stage_edges_of(graphs),
            seconds, (note,) if note else (),
        ).validate()  # fmt: skip
        return Exact(seconds, self.what(candidate, label_of(schedule)), plan, timeline, self, candidate)

    def n_programs(self, candidate: Candidate) -> int:
        """Return about how many different programs the exact plans of a candidate's stages take."""
        try:
            name = START if candidate.schedule == SEARCHED else candidate.schedule
            schedule = build(name, len(candidate.bounds) + 1, candidate.groups, self.request.microbatches)
        except ValueError:
            return 0
        live = live_at_peak(schedule, [n for _, n in candidate.n_bytes] or [1.0] * schedule.n_stages)
        counted = counted_in_flight(live, live_per_stage(schedule))
        shares = [share_of(s, of, live, counted, candidate) for of in schedule.stages_of_rank for s in of]
        in_turn = [counted[s] for of in schedule.stages_of_rank for s in of]
        return len({(rounded(n), share) for n, share in zip(in_turn, shares, strict=True)})

    def what(self, candidate: Candidate, schedule: str | None = None) -> str:
        """Return the layout of a candidate in words; ``schedule`` is its label, if it was built.

        ``schedule``: its label, if it was built.
        """
        if schedule is None:
            kind = KNOWN.get(candidate.schedule)
            each = (len(candidate.bounds) + 1) // candidate.groups
            schedule = kind.at(each).label if kind and candidate.groups > 1 else candidate.schedule
            schedule = schedule if candidate.groups > 1 else "none"
        m = self.request.microbatches
        return f"{candidate}, {schedule}, {m} microbatch{'es' if m > 1 else ''}"

    def limit(self, devices: Sequence[int]) -> float:
        """Return the bytes that a device of a group may hold."""
        return device_limit(self.cluster, devices, self.request.options.memory_limit_bytes)

    def _stages(
        self, graphs: Sequence[StageGraph], schedule: Schedule, candidate: Candidate, best_known: float, thorough: bool,
        explains: bool,
    ) -> tuple[tuple[StagePlan, ...], Times, OnceAStep]:  # fmt: skip
        """Return plans of the stages, the times that simulate the schedule, and those that a step takes in addition.

        Stages of a group share its memory. How many microbatches of each they keep when the group is fullest depends
        on what each keeps of one: an estimate at first, then what the plans say. Where that is more than the group
        has, its stages are planned again with less. Where the cuts are given, there is no estimate: the fastest plans
        of the stages say what each needs, and a stage that does not fit then is given more, for as long as others
        can do with less.
        """
        kept: list[float] = [n for _, n in candidate.n_bytes] or [1.0] * len(graphs)
        limits = [self.limit(devices) for devices in candidate.devices]
        of_groups, rooms, retried, refined = schedule.stages_of_rank, list(limits), 0, 0
        full: list[int] = []
        given = self.request.starts is not None and any(len(of) > 1 for of in of_groups) and max(limits) < inf
        if given and not candidate.n_bytes:
            rooms = [UNLIMITED] * len(limits)
        while refined < EFFORT.replans:
            live = live_at_peak(schedule, kept)
            try:
                choices = self._planned(graphs, schedule, candidate, live, rooms, best_known, thorough, explains)
            except _StageTooLarge as error:
                retried += 1
                if not (given and candidate.n_bytes) or retried > EFFORT.replans:
                    raise
                candidate = with_more(candidate, error.stage)
                continue
            kept = [choice.kept_bytes for choice in choices]
            live = live_at_peak(schedule, kept)
            choices = [c.with_in_flight(n) for c, n in zip(choices, live, strict=True)]
            needed = [bytes_together([choices[s].price for s in of_group]) for of_group in of_groups]
            full = [g for g, of in enumerate(of_groups) if (len(of) > 1 or given) and needed[g] > limits[g]]
            if not full:
                timing, once = timing_of(graphs, choices, schedule, self.cluster)
                return tuple(choices), timing, once
            if given and not candidate.n_bytes:  # these were the fastest plans, whatever they need
                candidate, rooms = with_needs(candidate, of_groups, choices), list(limits)
                continue
            refined += 1
            for g in full:
                rooms[g] *= limits[g] / needed[g]
        raise InfeasibleError(
            f"no plan fits {show_bytes(limits[full[0]])} per device: the {len(of_groups[full[0]])} "
            f"stages of group {full[0]} need {show_bytes(needed[full[0]])} together; use fewer stages a group or "
            "smaller microbatches"
        )

    def _planned(
        self, graphs: Sequence[StageGraph], schedule: Schedule, candidate: Candidate, live: Sequence[int],
        rooms: Sequence[float], best_known: float, thorough: bool, explains: bool,
    ) -> list[StagePlan]:  # fmt: skip
        """Return plans of all stages.

        ``live`` are the microbatches in flight of each, ``rooms`` the bytes of a device of each group, which its stages
        share.
        """
        group = schedule.rank_of_stage
        stored: dict[tuple[int, str], str] = {}
        counted = counted_in_flight(live, live_per_stage(schedule))
        versions = versions_of(schedule)
        planned: dict[int, tuple[StagePlan, Options]] = {}
        for of_group in spread_out(schedule.stages_of_rank):  # one that alone takes too long ends it
            spent = 0.0
            for number in of_group:
                tell(lambda n=number: f"{self.what(candidate)}: stage {n} of {len(graphs)}")  # type: ignore[misc]
                stage = graphs[number]
                mesh, devices = candidate.meshes[group[number]], candidate.devices[group[number]]
                plan_options = of_stage(self.request.options, stage, mesh)
                pins = dict(plan_options.params or {})
                names = {n.target for _, n in stage.graph.of_kind("param")}
                pins.update({n: how for (g, n), how in stored.items() if g == group[number] and n in names})
                if not thorough:
                    plan_options = replace(plan_options, memory_gap=max(plan_options.memory_gap, EFFORT.first_gap))
                worth = best_known * (EFFORT.lone_stage if self.few and candidate.groups > 1 else 1)
                share = share_of(number, of_group, live, counted, candidate)
                options = replace(
                    plan_options, in_flight=counted[number], params=pins or None, worth_seconds=worth - spent,
                    microbatches=self.request.microbatches, versions=versions[number],
                    memory_limit_bytes=rooms[group[number]] * share + extra_bytes(number, of_group, candidate),
                    recompute=patterns_in(stage.graph, plan_options.recompute), may_recompute=self._may_recompute,
                    blocks=self._blocks_in(stage.graph), explains=explains,
                )  # fmt: skip
                try:
                    plan = self.stage_plans.plan(stage.graph, mesh, options, devices)
                except InfeasibleError as error:
                    if len(of_group) == 1 or isinstance(error, (NoChoice, TooSmallError)):  # whatever its memory
                        raise
                    raise _StageTooLarge(error, number, of_group, self.limit(devices)) from error
                moves = bool(plan_options.offload)
                stored.update({(group[number], n): c.pinned(moves) for n, c in plan.params.items()})
                planned[number] = plan, options
                if not self.few:
                    spent += self.request.microbatches * pace_of(plan)
                    if spent >= worth:
                        raise Beaten
            if self._seems_beaten(graphs, candidate, planned, len(schedule.stages_of_rank), best_known):
                raise Beaten
        choices = [planned[number][0] for number in range(len(graphs))]
        request = [planned[number][1] for number in range(len(graphs))]
        if not self.few and best_known < inf:
            timing, once = timing_of(graphs, choices, schedule, self.cluster)
            if step_of(schedule, timing, once)[1] > EFFORT.unrefined * best_known:
                raise Beaten
        self._refine(graphs, choices, request, schedule)
        return with_agreed_buffers(graphs, choices, schedule, self.cluster)

    def _seems_beaten(
        self, graphs: Sequence[StageGraph], candidate: Candidate,
        planned: Mapping[int, tuple[StagePlan, Options]], groups: int, best_known: float,
    ) -> bool:  # fmt: skip
        """Return whether a step is simulated to take too long with the stages planned so far, the others estimated.

        It is checked on many devices, after one group, two, four and so on.
        """
        done = len(planned) * groups // len(graphs)
        if self.few or best_known == inf or candidate.estimate is None or done & (done - 1):
            return False
        exact = dict(enumerate(candidate.estimate.stages))
        for number, (plan, _) in planned.items():
            spent = phases(graphs[number].graph, plan, pricer(self.cluster, plan.mesh, plan.devices))
            whole = plan.whole_backward
            exact[number] = replace(
                exact[number], forward_seconds=spent.forward_seconds, gather_seconds=spent.gather_seconds,
                reduction_seconds=spent.reduction_seconds, optimizer_seconds=spent.optimizer_seconds,
                seconds=spent.forward_seconds + spent.backward_seconds,
                weight_seconds=0.0 if whole else min(spent.weight_seconds, spent.backward_seconds),
            )  # fmt: skip
        stages = tuple(exact[number] for number in range(len(graphs)))
        expected = simulated(replace(candidate.estimate, stages=stages), self.request.microbatches)
        return expected > EFFORT.unrefined * best_known

    @cached_property
    def _may_recompute(self) -> bool:
        """The planner chooses what is recomputed: neither the user nor the model does."""
        return self.request.may_recompute and not is_asked(self.graph, self.request.options.recompute)

    @cached_property
    def _repeated(self) -> list[str]:
        """The operators with which repeated blocks of the whole model begin, which are also those of one mesh.

        Pieces of a model without repeats bound only where stages may begin, not what may be recomputed.
        """
        return [self.graph.nodes[i].name for i in block_starts(self.graph, self.folding)]

    def _blocks_in(self, graph: Graph) -> tuple[str, ...]:
        """Return the first operators of repeated blocks in a stage's graph, which may have too few to find them."""
        return tuple(name for name in self._repeated if name in graph.index)

    def _refine(
        self, graphs: Sequence[StageGraph], choices: list[StagePlan], request: Sequence[Options], schedule: Schedule
    ) -> None:
        """Plan slow stages again for just the microbatches that they keep in flight, where memory made them slow."""
        owners = Counter(n.target for stage in graphs for _, n in stage.graph.of_kind("param"))
        for _ in range(EFFORT.replans):
            slowest = max(schedule.stages_of_rank, key=lambda of_group: sum(pace_of(choices[s]) for s in of_group))
            better = False
            for s in slowest:
                graph, choice = graphs[s], choices[s]
                if rounded(request[s].in_flight) == request[s].in_flight:
                    continue  # planned for just these
                if any(owners[n.target] > 1 for _, n in graph.graph.of_kind("param")):
                    continue  # stages that share a parameter store it alike
                plan = self.stage_plans.plan(graph.graph, choice.mesh, request[s], choice.devices, exact=True)
                if pace_of(plan) < pace_of(choice):
                    choices[s], better = plan, True
            if not better:
                return

def spread_out(groups: Sequence[_Group]) -> list[_Group]:
    """Return groups in an order in which the first few cover the range: by their number's binary digits reversed."""
    digits = max(1, (len(groups) - 1).bit_length())
    order = sorted(range(len(groups)), key=lambda k: format(k, f"0{digits}b")[::-1])
    return [groups[k] for k in order]
