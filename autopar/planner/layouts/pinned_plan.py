"""The plan of a layout that decides everything: its stages, the step that they make, and whether it fits.

Nothing is searched: the words decide every operator and parameter (:mod:`.operator_cuts`), so a stage's plan is
completed and priced at once. A layout that needs more memory than there is has a plan all the same, with the bytes that
lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import PlanError
from autopar.garbage_collection import uncollected
from autopar.planner.inter_op.exact.shared_buffers import with_agreed_buffers
from autopar.planner.inter_op.exact.transplant import structure, transplant
from autopar.planner.inter_op.simulating.timing import step_of, timing_of
from autopar.planner.intra_op.building.decoder import Decided
from autopar.planner.intra_op.building.parameter_sharding import choices
from autopar.planner.intra_op.memory.recompute import patterns_in
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.offload_choice import check_host_memory, moved_to_host
from autopar.planner.intra_op.pins.host_storage import note_on_left_out, on_host_in_layout, what_can_move
from autopar.planner.intra_op.pins.options import Options, device_limit
from autopar.planner.layouts.dim_classes import DimClasses
from autopar.planner.layouts.operator_cuts import CONTEXT, DATA, EXPERT, SHARD, TENSOR, OperatorCuts, strategy_of
from autopar.planner.layouts.stage_starts import blocks_of, described, sizes_of, starts
from autopar.plans.memory_decisions import REGATHER
from autopar.plans.pins import Pins
from autopar.plans.plan import ParamChoice, Plan, StagePlan, one_stage, reshard_key
from autopar.plans.prices import KeptVersions, bytes_together
from autopar.plans.stage_graphs import StageGraph, cut, stage_edges_of
from autopar.plans.weight_versions import check_asynchronous, note_on_training, versions_of
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Node, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATED, Placement, State, replicated_placement
from cost_models.schedules import Schedule, Timeline, build, label_of, live_at_peak, live_per_stage
from hardware_profiles import Cluster

STEP, USE = "step", "use"
"""Lifetimes of gathered parameters: once a step (ZeRO-1), once a use (ZeRO-3)."""


@dataclass(frozen=True)
class Said:
    """A layout of a pipeline, as its words give it.

    Attributes:
        text: the words, for messages and tables; ``words``: alone, as a plan remembers them.
        mesh: the mesh of every group of devices.
        groups: the number of groups of devices; ``chunks`` stages on each.
        schedule: its name, as :func:`cost_models.schedules.build` takes it.
        microbatches: the number of them in a step.
        zero: 0: parameters are whole on all ranks of ``data`` and ``context``; 1: cut there, and gathered once a step;
            3: gathered for every use. Where the mesh has an axis ``shard``, it and ``context`` cut them.
        sequence_parallel: norms and the residual are cut by sequence on ``tensor``.
        way: the way to cut attention on ``context``.
        experts_travel: rows travel to routed experts over ``tensor``, too.
        options: the options of every stage: what is recomputed, the optimizer, the memory limit.
    """

    text: str
    words: str
    mesh: Mesh
    groups: int
    chunks: int
    schedule: str
    microbatches: int
    zero: int
    sequence_parallel: bool
    way: str
    experts_travel: bool
    options: Options


@dataclass(frozen=True)
class PinnedPlan:
    """The plan of a layout.

    Attributes:
        memory_bytes: the bytes of the fullest device; ``limit_bytes`` of that one.
        graph: the graph of the microbatch that the plan is for.
        notes: what a reader should know of how the words were followed.
        runs: the plan is one of the module as it is; else it is one for comparison alone.
    """

    plan: Plan
    timeline: Timeline
    memory_bytes: float
    limit_bytes: float
    graph: Graph
    notes: tuple[str, ...] = ()
    runs: bool = True

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.plan.seconds

    @property
    def fits(self) -> bool:
        """Every device has the memory."""
        return self.memory_bytes <= self.limit_bytes


@uncollected()
def pinned_plan(
    graph: Graph, cluster: Cluster, said: Said, rows: frozenset[int], cluster_name: str = ""
) -> PinnedPlan:
    """Return the plan of a layout.

    ``graph``: of one of ``said.microbatches``; ``rows``: inputs that have the rows of the batch, by node number;
    ``cluster_name``: by which the plan finds the cluster again.
    """
    return _Pinned(graph, cluster, said, rows).plan(cluster_name or cluster.name)


@dataclass(eq=False)
class _Pinned:
    graph: Graph
    cluster: Cluster
    said: Said
    rows: frozenset[int]

    @cached_property
    def _cuts(self) -> OperatorCuts:
        classes = DimClasses(self.graph, rules_of(self.graph), self.rows)
        said = self.said
        joined = said.experts_travel and said.mesh.names[-2:] == (EXPERT, TENSOR)
        return OperatorCuts(classes, said.text, said.sequence_parallel, said.way, said.experts_travel, joined)

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        """The options of every operator, one for each axis, by its name."""
        by_axis = [self._cuts.of_axis(axis, size) for axis, size in self.said.mesh]
        return {self.graph.nodes[i].name: tuple(names[i] for names in by_axis) for i in by_axis[0]}

    def plan(self, cluster_name: str) -> PinnedPlan:
        """Plan all stages and simulate the step."""
        said = self.said
        n_stages = said.groups * said.chunks
        graphs = cut(self.graph, starts(self.graph, n_stages, said.text))
        schedule = self._schedule
        size = said.mesh.n_devices
        devices = [tuple(range(g * size, (g + 1) * size)) for g in range(said.groups)]
        check_asynchronous(schedule, graphs)
        stages, alike = self._stages(graphs, [devices[schedule.rank_of_stage[g.number]] for g in graphs])
        live = live_at_peak(schedule, [stage.kept_bytes for stage in stages])
        stages = [stage.with_in_flight(n) for stage, n in zip(stages, live, strict=True)]
        before = stages
        stages = with_agreed_buffers(graphs, stages, schedule, self.cluster)
        alike = alike if all(a is b for a, b in zip(before, stages, strict=True)) else ()
        timeline, seconds = step_of(schedule, *timing_of(graphs, stages, schedule, self.cluster, alike))
        limits = [device_limit(self.cluster, of, said.options.memory_limit_bytes) for of in devices]
        needed = [bytes_together([stages[s].price for s in of]) for of in schedule.stages_of_rank]
        fullest = max(range(said.groups), key=lambda g: needed[g] / limits[g])
        plan = Plan(
            self.graph.fingerprint, cluster_name, tuple(stages), schedule, stage_edges_of(graphs), seconds,
            pins=self._pins,
        ).validate()  # fmt: skip
        sizes = described(sizes_of(len(blocks_of(self.graph)), n_stages)) if n_stages > 1 else ""
        left_out = note_on_left_out(said.options.offload, said.options.optimizer, versions_of(schedule))
        notes = tuple(filter(None, [sizes, note_on_training(schedule), left_out]))
        return PinnedPlan(plan, timeline, needed[fullest], limits[fullest], self.graph, notes)

    @property
    def _pins(self) -> Pins:
        """Return the pins by which the plan remembers the words."""
        said, options = self.said, self.said.options
        limit = options.memory_limit_bytes
        return Pins(
            said.groups, schedules=(said.schedule,) if said.groups > 1 else (), microbatches=said.microbatches,
            mesh=said.mesh, memory_limit_bytes=None if limit is None else int(limit),
            recompute=tuple(options.recompute), precision=self.graph.precision, expert_load=self.graph.expert_load,
            layout=said.words, offload=options.offload.text,
        )  # fmt: skip

    @cached_property
    def _schedule(self) -> Schedule:
        said = self.said
        try:
            if said.groups == 1:
                return one_stage(said.microbatches)
            return build(said.schedule, said.groups * said.chunks, said.groups, said.microbatches)
        except ValueError as error:
            raise PlanError(f"{said.text}: {error}") from None

    @cached_property
    def _in_flight(self) -> int:
        """The microbatches in flight of which peaks are counted: all, where a stage may have all, else any number."""
        m = self.said.microbatches
        return m if max(live_per_stage(self._schedule)) >= m else 1

    # -- one stage

    def _stages(
        self, graphs: Sequence[StageGraph], devices: Sequence[tuple[int, ...]]
    ) -> tuple[list[StagePlan], list[int]]:
        """Return the plans of all stages, and for each the first one with the same plan."""
        first: dict[object, int] = {}
        kinds = {of: self._kind(of) for of in dict.fromkeys(devices)}
        plans: list[StagePlan] = []
        alike: list[int] = []
        versions = versions_of(self._schedule)
        for number, (stage, of) in enumerate(zip(graphs, devices, strict=True)):
            graph = stage.graph
            hot = [node.name for _, node in graph.of_kind("op") if node.hot]
            names = tuple(self._names[name] for name in hot)
            same = first.setdefault((structure(graph), kinds[of], names, versions[number]), number)
            alike.append(same)
            if same < number:
                plans.append(replace(transplant(plans[same], graphs[same].graph, graph), devices=of))
            else:
                plans.append(self._stage(graph, of, versions[number]))
        return plans, alike

    def _kind(self, devices: tuple[int, ...]) -> object:
        """Return what is equal for groups of devices on which a plan has one price: types, and shared machines."""
        nodes = self.cluster.node_of
        return tuple((self.cluster.device(d).name, nodes[d] - nodes[devices[0]]) for d in devices)

    def _stage(self, graph: Graph, devices: tuple[int, ...], versions: KeptVersions) -> StagePlan:
        """Return the plan of a stage."""
        said = self.said
        options = replace(
            said.options, microbatches=said.microbatches, recompute=patterns_in(graph, said.options.recompute),
            may_recompute=False, fold=True, in_flight=self._in_flight, versions=versions,
        )  # fmt: skip
        setting = MeshProblem(graph, self.cluster, said.mesh, options, devices)
        plan = setting.realise(self._decided(graph, setting))
        limit = device_limit(self.cluster, devices, options.memory_limit_bytes)
        return check_host_memory(setting, moved_to_host(setting, plan, limit))

    def _decided(self, graph: Graph, setting: MeshProblem) -> Decided:
        mesh, text = self.said.mesh, self.said.text
        known: dict[tuple[int, tuple[str, ...]], Strategy] = {}
        ops: dict[int, Strategy] = {}
        wanted: dict[Ref, list[State]] = {}
        made: dict[Ref, State] = {}
        for i, node in graph.of_kind("op"):
            rule = setting.rules[i]
            if not node.hot or rule is None:
                continue
            names = self._names[node.name]
            key = graph.alike[i], names
            if key not in known:
                known[key] = strategy_of(graph, node, rule, names, mesh, text)
            ops[i] = known[key]
            for ref, state in zip(node.refs, ops[i].ins, strict=True):
                wanted.setdefault(ref, []).append(state)
            tensors = [k for k, spec in enumerate(node.outs) if spec is not None]
            made.update({Ref(i, k): state for k, state in zip(tensors, ops[i].outs, strict=True)})
        params = {
            i: self._kept(node, [s.started(node.needs_grad) for s in wanted.get(Ref(i), [])])
            for i, node in graph.of_kind("param")
        }  # fmt: skip
        outputs = {
            k: self._whole_sums(made[ref], graph.nodes[ref.node].needs_grad and graph.spec(ref).is_float)
            for k, ref in enumerate(graph.outputs)
            if isinstance(ref, Ref) and ref in made and k != graph.loss and graph.spec(ref).shape
        }  # fmt: skip
        inputs = {
            node.target: self._arrival(node, wanted[Ref(i)][0])
            for i, node in graph.of_kind("input") if node.target in graph.arriving and Ref(i) in wanted
        }  # fmt: skip
        stored = {graph.nodes[i].target for i in setting.stored}
        regathers = self.said.sequence_parallel and self.cluster.software.regathers
        again = frozenset(reshard_key(graph, ref) for ref in made) if regathers else frozenset()
        buffers = {
            name: State(REPLICATED if not p.is_shard else p for p in made[ref])
            for name, ref in graph.updates.items()
            if ref in made and name in stored and not made[ref].has_units
        }
        return Decided(ops, params, outputs, inputs, tensors={REGATHER.name: again}, buffers=buffers)

    @staticmethod
    def _whole_sums(state: State, grad: bool) -> State:
        """Return the state of an output that is made in this one, with pending sums reduced."""
        whole = replicated_placement(grad)
        return State(whole if p.is_pending or (grad and p.is_replicated) else p for p in state)

    def _arrival(self, node: Node, state: State) -> State:
        """Return the state in which a tensor of an earlier stage arrives: as its first reader wants it."""
        return self._whole_sums(state, node.needs_grad)

    # -- parameters

    def _kept(self, node: Node, uses: Sequence[State]) -> ParamChoice:
        """Return the storage and use of a parameter: cut as readers want it, and by ``zero`` where a dim divides."""
        mesh, grad, zero = self.said.mesh, node.needs_grad, self.said.zero
        used = self._used(uses, grad)
        offered = choices(node.out, grad, [used], mesh)
        replicas = (SHARD, CONTEXT) if mesh.size_of.get(SHARD, 1) > 1 else (DATA, EXPERT, CONTEXT)
        sharded = {
            a for a, (axis, n) in enumerate(mesh) if zero and axis in replicas and n > 1 and not used[a].is_shard
        }  # fmt: skip
        lifetime = USE if zero == 3 else STEP

        def rank(choice: ParamChoice) -> tuple[int, bool]:
            cut_by = {a for a, (p, u) in enumerate(zip(choice.stored, used, strict=True)) if p.is_shard != u.is_shard}
            return len(cut_by ^ sharded), choice.lifetime != lifetime

        best = min(offered, key=rank)
        lifetime_there = self._on_host(node.target)
        if lifetime_there is None:
            return best
        return replace(best, lifetime=USE if USE in (lifetime_there, best.lifetime) else STEP, on_host=True)

    def _on_host(self, name: str) -> str | None:
        """Return how long a copy on the device lives of a parameter that is stored on the host; None if it is not."""
        return self._host.get(name)

    @cached_property
    def _host(self) -> dict[str, str]:
        """The lifetimes of copies of what is stored on the host, by name."""
        options = replace(self.said.options, versions=max(versions_of(self._schedule)))
        return on_host_in_layout(self.graph, what_can_move(options).offload)

    def _used(self, uses: Sequence[State], grad: bool) -> State:
        """Return the state in which a parameter is used: what all readers want; whole where they differ."""
        whole = replicated_placement(grad)
        each: list[set[Placement]] = [{state[a] for state in uses} for a in range(len(self.said.mesh))]
        return State(next(iter(of)) if len(of) == 1 else whole for of in each)


def label(schedule: Schedule, groups: int) -> str:
    """Return the name of a schedule in tables."""
    return label_of(schedule) if groups > 1 else "none"
