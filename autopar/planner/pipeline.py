"""Where to cut the pipeline, and which schedule to run: stages of blocks on groups of devices.

1. Blocks are found in the graph; every kind of block is planned alone on every mesh shape of every group size.
2. For every number of groups, a dynamic program over the blocks finds the cuts that minimise Alpa's estimate
   (Zheng et al., OSDI 2022, section 5): the sum of the stages' times and (microbatches - 1) times the slowest.
   Where devices differ, or their number divides badly, another one cuts over unequal groups
   (:mod:`autopar.planner.unequal`).
3. The best few are planned exactly, stage by stage, with the activations that the schedule keeps in flight, and
   simulated under every schedule that they allow. The simulated best is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod

from autopar.errors import InfeasibleError, PlanError
from autopar.graph import Graph
from autopar.pipeline import PipelinePlan, StageChoice
from autopar.placements import Mesh, local_shape, mesh_shapes
from autopar.plan import Plan
from autopar.planner.blocks import Block, blocks
from autopar.planner.fold import fold
from autopar.planner.order import SEARCHED, START, better_order, check_name
from autopar.planner.phases import Phases, phases
from autopar.planner.price import Pricer, pricer
from autopar.planner.recompute import patterns_in, segments_of
from autopar.planner.search import MEMORY_FRACTION, Options, plan_graph
from autopar.planner.stage_pins import allows, of_stage
from autopar.planner.transplant import structure, transplant
from autopar.planner.unequal import SCHEDULES as UNEQUAL_SCHEDULES
from autopar.planner.unequal import Unequal
from autopar.rules.registry import rules_of
from autopar.staging import StageGraph, cut, hot_ops
from cost_models import mesh_axes
from cost_models.pipeline import Edge, Schedule, Timeline, Times, build, live_per_stage, simulate, times
from hardware_profiles import Cluster

PER_RANK = {"interleaved-1f1b": 2, "zb-v": 2, "dualpipe-v": 2}
"""Stages that each group holds in a schedule; one in the others."""
CANDIDATES = 3
"""Shapes that are planned exactly and simulated."""


WORTH_A_LOOK = 2.0
"""The best way for every number of groups is planned exactly too, if its estimate is within this factor of the best."""


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
    """

    microbatches: int
    groups: int | None = None
    schedules: Sequence[str] = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
    mesh: Mesh | None = None
    starts: Sequence[str] | None = None
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Candidate:
    """A way to cut: positions of the stages' first operators, the groups, and an estimate of the step."""

    meshes: tuple[Mesh, ...]
    devices: tuple[tuple[int, ...], ...]
    per_rank: int
    bounds: tuple[int, ...]
    seconds: float

    @property
    def groups(self) -> int:
        return len(self.meshes)

    def __str__(self) -> str:
        shapes = [" x ".join(f"{a}={k}" for a, k in mesh) for mesh in self.meshes]
        runs = [(shape, len(list(own))) for shape, own in groupby(shapes)]
        return ", ".join(f"{n} group{'s' if n > 1 else ''} of {shape}" for shape, n in runs)


def _equal(groups: int, mesh: Mesh, per_rank: int, bounds: tuple[int, ...], seconds: float) -> Candidate:
    size = prod(k for _, k in mesh)
    devices = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
    return Candidate((mesh,) * groups, devices, per_rank, bounds, seconds)


@dataclass(frozen=True)
class Planned:
    """A pipelined plan with its simulation and what else was tried: ``(what, seconds)``, best first."""

    plan: PipelinePlan
    timeline: Timeline
    tried: tuple[tuple[str, float], ...]


def plan_pipeline(
    graph: Graph, cluster: Cluster, n_devices: int, asked: PipelineOptions, *, cluster_name: str = ""
) -> Planned:
    """The best pipelined plan on the first ``n_devices`` of a cluster; one group of all of them is among the choices.

    Raises:
        PlanError: a schedule, a number of groups or cuts that cannot be.
        InfeasibleError: nothing fits the devices' memory.
    """
    search = _Search(graph, cluster, n_devices, asked, cluster_name)
    for name in asked.schedules:
        check_name(name)
    if asked.groups is not None and not 1 <= asked.groups <= n_devices:
        raise PlanError(f"{n_devices} devices cannot be cut into {asked.groups} groups; use 1 to {n_devices}")
    if asked.options.recompute:  # the patterns are those of the whole model
        segments_of(graph, rules_of(graph, fold(graph).representative), asked.options.recompute)
    found: list[tuple[float, str, PipelinePlan, Timeline]] = []
    for candidate in search.candidates():
        try:
            found.extend(search.exact(candidate))
        except InfeasibleError as error:
            search.infeasible = error
    if not found:
        raise search.infeasible or PlanError(
            f"no schedule of {', '.join(asked.schedules)} allows {asked.microbatches} microbatches on "
            f"{asked.groups or 'any number of'} groups of {n_devices} devices; change the microbatches or the schedules"
        )
    found.sort(key=lambda f: f[0])
    _, _, plan, timeline = found[0]
    return Planned(plan, timeline, tuple((what, seconds) for seconds, what, _, _ in found))


@dataclass
class _Search:
    graph: Graph
    cluster: Cluster
    n_devices: int
    asked: PipelineOptions
    cluster_name: str
    _solved: dict[tuple[tuple[int, ...], Mesh, int, int], Phases | None] = field(default_factory=dict)
    infeasible: InfeasibleError | None = None
    _plans: dict[tuple[object, ...], tuple[Graph, Plan]] = field(default_factory=dict)

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

    def candidates(self) -> list[Candidate]:
        """The most promising ways to cut, by estimate; ways with one group are always among them."""
        found: list[Candidate] = []
        n, asked = self.n_devices, self.asked
        counts = [g for g in range(1, n + 1) if n % g == 0 and asked.groups in (None, g)]
        counts = [g for g in counts if g <= len(self.blocks) or asked.groups or asked.starts]
        deep = sorted({PER_RANK.get(name, 1) for name in asked.schedules})
        for groups in counts:
            for mesh in [asked.mesh] if asked.mesh else self._shapes(n // groups):
                if prod(size for _, size in mesh) != n // groups:
                    continue
                for per_rank in deep if groups > 1 else [1]:
                    one = self._cut(groups, mesh, per_rank)
                    if one is not None:
                        found.append(one)
        found.sort(key=lambda c: (c.seconds, c.groups, c.meshes))
        best = found[:CANDIDATES]
        for groups in sorted({c.groups for c in found}):  # the estimate knows no schedule and no memory
            own = [c for c in found if c.groups == groups and c.seconds <= WORTH_A_LOOK * found[0].seconds]
            best += [c for c in own[:1] if c not in best]
        return [*best, *self._unequal()]

    def _unequal(self) -> list[Candidate]:
        """Ways to cut over unequal groups, where these are worth a search: devices that differ, or divide badly."""
        asked, n = self.asked, self.n_devices
        names = [START if name == SEARCHED else name for name in asked.schedules]
        names = [name for name in names if name in UNEQUAL_SCHEDULES]
        divides = sum(n % g == 0 for g in range(1, n + 1)) > 2
        if asked.mesh or asked.starts or not names or n != self.cluster.n_devices or n < 3:
            return []
        if divides and not self._uneven and not (asked.groups and n % asked.groups):
            return []
        search = Unequal(self.cluster, n, self.blocks, self._graph_of, asked.options, asked.microbatches)
        try:
            ways = search.candidates(names[0], CANDIDATES, asked.groups)
        except InfeasibleError as error:
            self.infeasible = self.infeasible or error
            return []
        return [
            Candidate(w.meshes, w.devices, 1, tuple(self.blocks[b].first for b in w.bounds), w.seconds)
            for w in ways if len(w.meshes) > 1
        ]  # fmt: skip

    def _graph_of(self, block: Block) -> Graph:
        """The block alone."""
        starts = [self.name(block.first)] if block.first else []
        starts += [self.name(block.end)] if block.end < len(self.ops) else []
        return cut(self.graph, starts)[1 if block.first else 0].graph

    def _shapes(self, size: int) -> list[Mesh]:
        """Mesh shapes of a group. The last axis joins neighbours; one larger than a node is better split in two."""
        near = max(1, self.cluster.n_devices // self.cluster.n_nodes)
        shapes = [m for m in mesh_shapes(size) if len(m) == 1 or m[-1][1] <= near]
        return [m for m in shapes if allows(m, self.asked.options)]

    def _cut(self, groups: int, mesh: Mesh, per_rank: int) -> Candidate | None:
        stages = groups * per_rank
        if self.asked.starts is not None:
            if len(self.asked.starts) + 1 != stages:
                return None
            positions = {self.name(p): p for p in range(len(self.ops))}
            bounds = tuple(positions.get(s, 0) for s in self.asked.starts)
            return _equal(groups, mesh, per_rank, bounds, 0.0)
        if stages > len(self.blocks):
            return None
        costs = [self._block(b, mesh, groups, per_rank) for b in self.blocks]
        if any(c is None for c in costs):
            return None
        seconds = [c.forward_seconds + c.backward_seconds for c in costs if c is not None]
        step = [c.step_seconds for c in costs if c is not None]
        ends, estimate = partition(seconds, step, stages, self.asked.microbatches)
        bounds = tuple(self.blocks[e].first for e in ends)
        return _equal(groups, mesh, per_rank, bounds, estimate / (per_rank if groups > 1 else 1))

    def _block(self, block: Block, mesh: Mesh, groups: int, per_rank: int) -> Phases | None:
        """The block alone on a mesh, within its share of the memory; None if it does not fit.

        A stage's memory is shared out by the bytes of the blocks' parameters, but no block gets less than an equal
        share. The first stage of 1F1B keeps as many microbatches as there are groups.
        """
        stages, options = groups * per_rank, self.asked.options
        equal = min(1.0, stages / len(self.blocks))
        share = min(1.0, max(equal, block.param_bytes * stages / max(1, sum(b.param_bytes for b in self.blocks))))
        limit = options.memory_limit_bytes
        if limit is None:
            limit = MEMORY_FRACTION * min(self.cluster.device(d).memory_bytes for d in range(self.n_devices))
        key = block.kind, mesh, groups, per_rank
        if key not in self._solved:
            graph = self._graph_of(block)
            options = replace(
                options, memory_limit_bytes=share * limit / per_rank, constraints=None, params=None, inputs=None,
                outputs=None, microbatches=self.asked.microbatches, in_flight=min(groups, self.asked.microbatches),
                memory_gap=0.05, recompute=patterns_in(graph, options.recompute),
            )  # fmt: skip
            try:
                plan = plan_graph(graph, self.cluster, mesh, options)
                self._solved[key] = phases(graph, plan, pricer(self.cluster, mesh))
            except InfeasibleError as error:
                self._solved[key] = None
                self.infeasible = self.infeasible or error
        return self._solved[key]

    # -- exact

    def exact(self, candidate: Candidate) -> list[tuple[float, str, PipelinePlan, Timeline]]:
        """Plans of the stages, and the simulation of every schedule that fits."""
        starts = self.asked.starts or [self.name(p) for p in candidate.bounds]
        graphs = cut(self.graph, starts)
        found = []
        for asked in self.asked.schedules if candidate.groups > 1 else self.asked.schedules[:1]:
            name = START if asked == SEARCHED else asked
            if candidate.groups > 1 and PER_RANK.get(name, 1) != candidate.per_rank:
                continue
            try:
                schedule = build(
                    name if candidate.groups > 1 else "gpipe", len(graphs), candidate.groups, self.asked.microbatches
                )
            except ValueError:
                continue  # this schedule does not allow these counts
            if candidate.groups == 1:
                schedule = _one_group(len(graphs), self.asked.microbatches)
            choices, timing, step = self._stages(graphs, schedule, candidate)
            if asked == SEARCHED and candidate.groups > 1:
                limits = [self._limit(own) for own in candidate.devices]
                choices, schedule = better_order(choices, schedule, timing, limits)
            timeline = simulate(schedule, timing)
            seconds = timeline.makespan_seconds + step
            plan = PipelinePlan(
                self.graph.fingerprint, self.cluster_name or self.cluster.name, choices, schedule,
                self.asked.options.optimizer, seconds,
            ).validate()  # fmt: skip
            found.append((seconds, f"{candidate}, {schedule.name}", plan, timeline))
        return found

    def _limit(self, devices: Sequence[int]) -> float:
        """Bytes that a device of a group may hold."""
        limit = self.asked.options.memory_limit_bytes
        if limit is None:
            limit = MEMORY_FRACTION * min(self.cluster.device(d).memory_bytes for d in devices)
        return limit

    def _stages(
        self, graphs: Sequence[StageGraph], schedule: Schedule, candidate: Candidate
    ) -> tuple[tuple[StageChoice, ...], Times, float]:
        live = live_per_stage(schedule)
        group = schedule.rank_of_stage
        shares = {g: [s for s in range(len(graphs)) if group[s] == g] for g in set(group.values())}
        choices: list[StageChoice] = []
        stored: dict[tuple[int, str], str] = {}
        for stage in graphs:
            mesh, devices = candidate.meshes[group[stage.number]], candidate.devices[group[stage.number]]
            limit = self._limit(devices)
            own = of_stage(self.asked.options, stage, mesh)
            pins = dict(own.params or {})
            names = {n.target for _, n in stage.graph.of_kind("param")}
            pins.update({n: how for (g, n), how in stored.items() if g == group[stage.number] and n in names})
            options = replace(
                own, in_flight=live[stage.number], params=pins or None,
                microbatches=self.asked.microbatches,
                memory_limit_bytes=limit / len(shares[group[stage.number]]),
                recompute=patterns_in(stage.graph, own.recompute),
            )  # fmt: skip
            plan = self._stage_plan(stage.graph, mesh, options, devices)
            stored.update({(group[stage.number], n): ",".join(c.stored) for n, c in plan.params.items()})
            begin = next(n.name for n in stage.graph.nodes if n.kind == "op" and n.hot)
            choices.append(StageChoice(begin, devices, plan))
        timing, step = timing_of(graphs, choices, schedule, self.cluster)
        return tuple(choices), timing, step

    def _stage_plan(self, graph: Graph, mesh: Mesh, options: Options, devices: tuple[int, ...]) -> Plan:
        """The plan of a stage; stages alike in all but names, on devices alike, are solved once."""
        if options.constraints or options.params or options.inputs or options.outputs:
            return plan_graph(graph, self.cluster, mesh, options, devices=devices)
        kinds = tuple(self.cluster.device(d).name for d in devices)
        again = segments_of(graph, rules_of(graph), options.recompute) if options.recompute else ()
        places = tuple((graph.index[first], graph.index[last]) for first, last in again)
        key = structure(graph), mesh, kinds, options.in_flight, options.memory_limit_bytes, places
        if key not in self._plans:
            self._plans[key] = graph, plan_graph(graph, self.cluster, mesh, options, devices=devices)
        first, plan = self._plans[key]
        return plan if first is graph else transplant(plan, first, graph)

    @cached_property
    def _uneven(self) -> bool:
        """Whether groups of equal size can differ: devices of several types, or nodes of several sizes."""
        return len({self.cluster.device(d) for d in range(self.n_devices)}) > 1


def timing_of(
    graphs: Sequence[StageGraph], choices: Sequence[StageChoice], schedule: Schedule, cluster: Cluster
) -> tuple[Times, float]:
    """What a schedule is simulated with, and the seconds that follow it once a step (gradients, gathers)."""
    own = [
        phases(stage.graph, choice.plan, pricer(cluster, choice.mesh, choice.devices))
        for stage, choice in zip(graphs, choices, strict=True)
    ]
    timing = times(
        len(graphs), [p.forward_seconds for p in own], [p.input_seconds for p in own],
        [p.weight_seconds + _twice(g, p) for g, p in zip(graphs, own, strict=True)], [p.backward_seconds for p in own],
        edges=_edges(graphs, choices, cluster), activation_bytes=[c.plan.kept_bytes for c in choices],
        static_bytes=[_static_bytes([choices[s].plan for s in held]) for held in schedule.stages_of_rank],
    )  # fmt: skip
    return timing, max(sum(own[s].step_seconds for s in held) for held in schedule.stages_of_rank)


def _twice(stage: StageGraph, spent: Phases) -> float:
    """Seconds that a split backward recomputes once more; where no input wants a gradient nothing is split."""
    return spent.again_seconds if any(n.needs_grad for _, n in stage.graph.of_kind("input")) else 0.0


def _static_bytes(plans: Sequence[Plan]) -> float:
    """What a group's stages hold all the time, and the segment that runs again: one at a time."""
    held = sum(p.price.memory_bytes - p.price.activation_bytes for p in plans)
    return held + max(p.price.again_bytes for p in plans)


def _one_group(n_stages: int, microbatches: int) -> Schedule:
    """No pipeline: forward and backward of each microbatch in turn."""
    from cost_models.pipeline import Action

    row = tuple(Action(0, kind, k) for k in range(microbatches) for kind in "FB")
    return Schedule("none", n_stages, microbatches, (tuple(range(n_stages)),), (row,)).validate()


def partition(
    seconds: Sequence[float], step: Sequence[float], stages: int, microbatches: int
) -> tuple[tuple[int, ...], float]:
    """First blocks of all stages but the first, and the estimate ``sum + (m - 1) slowest + step``.

    The slowest stage is enumerated over all sums of consecutive blocks, from the shortest possible on, and cuts are
    filled greedily from the left; the sum of all stages is the same for every cut of a chain.
    """
    n = len(seconds)
    total = [0.0]
    for s in seconds:
        total.append(total[-1] + s)
    longest = max(total[i + 1] - total[i] for i in range(n))
    sums = sorted({t for i in range(n) for j in range(i + 1, n + 1) if (t := total[j] - total[i]) >= longest})
    low, high = 0, len(sums) - 1
    while low < high:  # the least slowest stage: filling greedily, fewer cuts are never worse
        middle = (low + high) // 2
        if len(_fill(total, sums[middle] * (1 + 1e-12))) <= stages:
            high = middle
        else:
            low = middle + 1
    limit = sums[low] * (1 + 1e-12)
    bounds = _even(total, stages, limit)
    stretches = list(zip((0, *bounds), (*bounds, n), strict=True))
    slowest = max(total[b] - total[a] for a, b in stretches)
    once = max(sum(step[a:b]) for a, b in stretches)
    return tuple(bounds), total[-1] + (microbatches - 1) * slowest + once


def _fill(total: Sequence[float], limit: float) -> list[int]:
    """Ends of stages filled from the left up to a limit, which is at least the longest block."""
    ends, start = [], 0
    for i in range(1, len(total)):
        if total[i] - total[start] > limit:
            ends.append(i - 1)
            start = i - 1
    return [*ends, len(total) - 1]


def _even(total: Sequence[float], stages: int, limit: float) -> list[int]:
    """Exactly ``stages`` stages within the limit, with the least sum of squares: the most even of the fastest cuts."""
    n = len(total) - 1
    inf = float("inf")
    best = [[inf] * (n + 1) for _ in range(stages + 1)]
    back = [[0] * (n + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for k in range(1, stages + 1):
        for j in range(k, n + 1):
            for i in range(j - 1, k - 2, -1):
                t = total[j] - total[i]
                if t > limit:
                    break
                if best[k - 1][i] + t * t < best[k][j]:
                    best[k][j], back[k][j] = best[k - 1][i] + t * t, i
    bounds: list[int] = []
    j = n
    for k in range(stages, 1, -1):
        j = back[k][j]
        bounds.append(j)
    return bounds[::-1]


def _edges(graphs: Sequence[StageGraph], choices: Sequence[StageChoice], cluster: Cluster) -> list[Edge]:
    """Seconds on the wire between stages: every piece crosses once, and is gathered where it is wanted whole."""
    found: dict[tuple[int, int], list[float]] = {}
    for graph in graphs:
        here = choices[graph.number]
        for name, source in graph.takes:
            there = choices[source]
            node = next(n for _, n in graph.graph.of_kind("input") if n.target == name)
            out = there.plan.outputs[graphs[source].gives.index(name)]
            assert out is not None
            arriving = here.plan.inputs[name]
            row = found.setdefault((source, graph.number), [0.0, 0.0])
            if there.devices != here.devices:
                pair = mesh_axes(cluster, {"pair": 2}, [there.devices[0], here.devices[0]])["pair"]
                wire = pair.seconds("send_recv", node.out.n_bytes / min(len(there.devices), len(here.devices)))
                row[0] += wire
                row[1] += wire if node.needs_grad else 0.0
            row[0] += _gather(node.out.shape, node.out.item_bytes, arriving, here, cluster)
            row[1] += _gather(node.out.shape, node.out.item_bytes, out, there, cluster) if node.needs_grad else 0.0
    return [Edge(a, b, forward, backward) for (a, b), (forward, backward) in sorted(found.items())]


def _gather(
    shape: tuple[int, ...], item_bytes: int, state: tuple[str, ...], choice: StageChoice, cluster: Cluster
) -> float:
    priced: Pricer = pricer(cluster, choice.mesh, choice.devices)
    n_bytes = prod(local_shape(shape, state, choice.mesh)) * item_bytes
    axes = [a for p, (a, size) in zip(state, choice.mesh, strict=True) if p[0] != "S" and size > 1]
    return sum(priced.axes[a].seconds("all_gather", n_bytes) for a in axes)


__all__ = ["PipelineOptions", "Planned", "partition", "plan_pipeline", "timing_of"]
