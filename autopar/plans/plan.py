"""The plan: every decision, as a value.

A plan is stages, the schedule that orders their work, and transfers between them; a model that is not cut has one
stage. A stage says for every op which factor each mesh axis cuts, for every parameter how it is stored and used, for
every tensor the steps that bring it from the placement its producer gives to those its consumers want, and what all
that is predicted to cost. A plan holds no tensors and no code.

The schedule's ranks are *groups* of devices: all stages of a group run on the same devices, and groups share none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.plans.device_groups import check_places
from autopar.plans.memory_decisions import RECOMPUTE, RECOMPUTE_RESULT, REGATHER, Memory
from autopar.plans.pins import Pins
from autopar.plans.plan_table import plan_html, plan_line, plan_text
from autopar.plans.prices import ONE_VERSION, KeptVersions, Moment, Price, StagePeaks, bytes_together
from autopar.plans.transfer import Side
from autopar.words.graph import Graph, Ref, Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State, whole_state
from cost_models.schedules.actions import Action, Schedule, check_size

VERSION = 2
"""The version of plan files (:mod:`autopar.planfile`)."""
LIFETIMES = ("step", "use")
HOST, DEVICE = MEMORIES = "host", "device"
"""Where a parameter is stored, in pins."""

Recompute = tuple[tuple[str, str], ...]
"""Segments ``(first op, last op)``, runs of operators in execution order that are recomputed in the backward."""


@dataclass(frozen=True)
class ParamChoice:
    """Storage and use of one parameter.

    Attributes:
        stored: placement in which the optimizer sees it; made of ``S`` and ``I`` only (``R`` without gradient).
        used: placement in which the program takes it.
        lifetime: how long a gathered copy lives: ``step`` (gathered once; ZeRO-1/2) or ``use`` (regathered for
            the backward; ZeRO-3).
        on_host: what is stored is in the memory of the host, and so are its gradient and the state of the optimizer,
            which steps there. The device has a copy, for a step or for one use.
    """

    stored: State
    used: State
    lifetime: str = "step"
    on_host: bool = False

    @property
    def is_copied(self) -> bool:
        """Whether the program reads a copy, not what is stored itself, formats apart."""
        return self.on_host or self.stored != self.used

    def pinned(self, moves: bool) -> str:
        """Return the pin of how it is stored, ``S0,I``; with ``host`` or ``device`` where it may be in either."""
        memory = HOST if self.on_host else DEVICE
        return f"{','.join(self.stored)} {memory}" if moves or self.on_host else ",".join(self.stored)


@dataclass(frozen=True)
class Solution:
    """The solver's verdict on a plan.

    ``status`` is ``optimal`` (proven), ``within gap`` (proven to be no further from the optimum than was asked),
    ``best found`` (further from the bound than that) or ``time limit``; ``gap`` is relative to the bound. ``binds``:
    with more memory there may be a faster plan; without it, a larger limit would change nothing.
    """

    solver: str
    status: str
    objective_seconds: float
    gap: float
    binds: bool = False


@dataclass(frozen=True)
class StagePlan:
    """Decisions for one graph on one mesh: a stage, or a model that is not cut into stages.

    Attributes:
        fingerprint: the fingerprint of the graph that this plan is for.
        mesh: axis names and sizes.
        ops: node name -> option name per axis (a factor, ``I``, ``R`` or ``P<group>``).
        params: qualified name -> how it is stored and used.
        buffers: qualified name -> placement; ``R`` unless every reader wants the same shard.
        outputs: placement of each output tensor (None for an output that is no tensor).
        routes: tensor, by :func:`reshard_key` -> reshard steps ``(from, to)``, a tree rooted at the producer's state.
        inputs: placement in which a rank receives an input; inputs not named here arrive whole (``R``).
        optimizer, microbatches, in_flight: what the price is counted for: ``microbatches`` a step, of which
            ``in_flight`` keep their activations at once (more than one in a stage of a pipeline).
        price: the price of a training step on one rank.
        solution: what the solver said; None for a plan that was edited by hand.
        memory: what is not kept for the backward, by decision (:mod:`autopar.plans.memory_decisions`): for each the
            segments or the tensors, by :func:`reshard_key`, that it is made for.
        first: name of the first operator that depends on a parameter; a stage ends where the next one begins. Empty
            if there is none.
        devices: ranks, in row-major order of the mesh.
        versions: the versions of its weights that are kept at one time.
        fullest: when the peak of the price is reached; None if that is when the optimizer steps, or was not looked for.
        peaks: what the peak of the price follows from; None of a plan whose price was not made here.
    """

    fingerprint: str
    mesh: Mesh
    ops: Mapping[str, tuple[str, ...]]
    params: Mapping[str, ParamChoice]
    buffers: Mapping[str, State]
    outputs: tuple[State | None, ...]
    reshard_paths: Mapping[str, tuple[tuple[State, State], ...]]
    inputs: Mapping[str, State] = field(default_factory=dict)
    optimizer: str = "adamw"
    microbatches: int = 1
    price: Price = field(default_factory=Price)
    solution: Solution | None = None
    memory: Memory = field(default_factory=dict)
    in_flight: int = 1
    first: str = ""
    devices: tuple[int, ...] = ()
    versions: KeptVersions = ONE_VERSION
    fullest: Moment | None = field(default=None, compare=False, repr=False)
    peaks: StagePeaks | None = field(default=None, compare=False, repr=False)

    @property
    def recompute(self) -> Recompute:
        """Segments ``(first op, last op)`` in execution order that keep only their inputs and are recomputed."""
        return self.memory.get(RECOMPUTE.name, ())

    @property
    def gather_again(self) -> tuple[str, ...]:
        """Tensors whose gathered copies are regathered in the backward."""
        return self.memory.get(REGATHER.name, ())

    @property
    def make_again(self) -> tuple[str, ...]:
        """Results of segments that are given up and recomputed."""
        return self.memory.get(RECOMPUTE_RESULT.name, ())

    @property
    def about_tensors(self) -> dict[str, frozenset[str]]:
        """Decisions for tensors by themselves: all but those of segments and of their results."""
        of_segments = (RECOMPUTE.name, RECOMPUTE_RESULT.name)
        return {name: frozenset(keys) for name, keys in self.memory.items() if name not in of_segments}

    @property
    def whole_backward(self) -> bool:
        """The backward is not split into that of inputs and that of weights: both would need what is brought back."""
        return bool(self.memory)

    @property
    def kept_bytes(self) -> int:
        """Bytes that one microbatch keeps from its forward to its backward."""
        return (self.price.activation_bytes - self.price.again_bytes) // self.in_flight

    @property
    def transient_bytes(self) -> int:
        """The most bytes of the peak beyond persistent state and the activations of all microbatches in flight."""
        passing = self.price.transient_bytes
        return passing if self.peaks is None else max(passing, self.peaks.transient_bytes())

    def with_in_flight(self, n: int) -> StagePlan:
        """Return the same decisions with ``n`` microbatches in flight."""
        if n == self.in_flight:
            return self
        if self.peaks is not None:
            return replace(self, in_flight=n, price=self.peaks.added_to(self.price, n), fullest=self.peaks.fullest(n))
        activation_bytes = n * self.kept_bytes + self.price.again_bytes
        working_bytes = max(self.price.working_bytes, -activation_bytes)  # when the optimizer steps, none is there
        price = replace(self.price, activation_bytes=activation_bytes, working_bytes=working_bytes)
        return replace(self, in_flight=n, price=price)

    @property
    def n_devices(self) -> int:
        """Number of devices of its mesh."""
        return self.mesh.n_devices


@dataclass(frozen=True)
class StageEdge:
    """A tensor that one stage makes and later stages read.

    Attributes:
        tensor: its name, as plans have it (:func:`reshard_key` of the whole graph): the readers have an input of that
            name.
        spec: the spec of one microbatch, whole.
        needs_grad: whether a gradient comes back.
        source: number of the stage that makes it.
        output: its position among the outputs of that stage.
        targets: numbers of the stages that read it.
    """

    tensor: str
    spec: Spec
    needs_grad: bool
    source: int
    output: int
    targets: tuple[int, ...]

    def sides(self, stages: Sequence[StagePlan], target: int) -> tuple[Side, Side]:
        """Return the tensor's side at the stage that makes it, and at one that reads it."""
        maker, reader = stages[self.source], stages[target]
        made_as = maker.outputs[self.output]
        assert made_as is not None
        wanted = reader.inputs.get(self.tensor, whole_state(reader.mesh, self.needs_grad))
        return Side(made_as, maker.mesh, maker.devices), Side(wanted, reader.mesh, reader.devices)


@dataclass(frozen=True, repr=False)
class Plan:
    """Decisions for one model.

    Of a plan of one stage, what it decides is found on the plan itself too: ``plan.mesh``, ``plan.ops``,
    ``plan.params``, ``plan.price`` and so on. With several stages that is an error that says where to look.

    Attributes:
        fingerprint: the fingerprint of the whole graph, at the size of one microbatch.
        cluster: name or path of the hardware profile.
        stages: in execution order.
        schedule: what each group of devices does in which order; its number of microbatches is that of a step.
        crossings: what stages take from each other.
        seconds: the seconds of a training step, simulated.
        notes: notes for the reader.
        pins: what the user asked for, so that the plan can be solved again with the same options.
        graph: the graph of one microbatch that it is for, in the process that planned it or read its file; else None.
    """

    fingerprint: str
    cluster: str
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    stage_edges: tuple[StageEdge, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    pins: Pins = field(default_factory=Pins)
    graph: Graph | None = field(default=None, compare=False)

    @classmethod
    def alone(cls, stage: StagePlan, cluster: str = "", pins: Pins | None = None, notes: tuple[str, ...] = ()) -> Plan:
        """Return the plan of a model that is not cut: one stage, whose microbatches follow each other."""
        schedule = one_stage(stage.microbatches)
        return cls(stage.fingerprint, cluster, (stage,), schedule, (), stage.price.seconds, notes, pins or Pins())

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        return self.schedule.n_microbatches

    @property
    def optimizer(self) -> str:
        """For which the stages' memory is counted."""
        return self.stages[0].optimizer

    @property
    def starts(self) -> tuple[str, ...]:
        """First operators of all stages but the first, as :func:`autopar.plans.stage_graphs.cut` takes them."""
        return tuple(s.first for s in self.stages[1:])

    @property
    def n_devices(self) -> int:
        """Number of devices of all groups."""
        return len({d for s in self.stages for d in s.devices})

    @property
    def memory_bytes(self) -> int:
        """The peak on a device: of the group of devices that holds most."""
        return max(bytes_together([self.stages[s].price for s in group]) for group in self.schedule.stages_of_rank)

    def only(self, what: str = "decisions") -> StagePlan:
        """Return the stage of a plan that has one.

        Raises:
            PlanError: there are several; it says how to come at ``what`` of each.
        """
        if len(self.stages) != 1:
            last = len(self.stages) - 1
            raise PlanError(
                f"the plan has {len(self.stages)} stages, each with {what} of its own: see plan.stages[0] to "
                f"plan.stages[{last}]"
            )
        return self.stages[0]

    @property
    def mesh(self) -> Mesh:
        """Axis names and sizes."""
        return self.only("a mesh").mesh

    @property
    def ops(self) -> Mapping[str, tuple[str, ...]]:
        """Options of each operator, by axis; of a plan with one stage."""
        return self.only("ops").ops

    @property
    def params(self) -> Mapping[str, ParamChoice]:
        """Storage of each parameter; of a plan with one stage."""
        return self.only("parameters").params

    @property
    def buffers(self) -> Mapping[str, State]:
        """Placement of each buffer; of a plan with one stage."""
        return self.only("buffers").buffers

    @property
    def inputs(self) -> Mapping[str, State]:
        """Placement of each input; of a plan with one stage."""
        return self.only("inputs").inputs

    @property
    def outputs(self) -> tuple[State | None, ...]:
        """Placement of each output (None if no tensor); of a plan with one stage."""
        return self.only("outputs").outputs

    @property
    def reshard_paths(self) -> Mapping[str, tuple[tuple[State, State], ...]]:
        """Reshard steps of each tensor; of a plan with one stage."""
        return self.only("routes").reshard_paths

    @property
    def memory(self) -> Memory:
        """Decisions about memory; of a plan with one stage."""
        return self.only("decisions about memory").memory

    @property
    def recompute(self) -> Recompute:
        """Recomputed segments; of a plan with one stage."""
        return self.only("recomputed segments").recompute

    @property
    def gather_again(self) -> tuple[str, ...]:
        """Tensors that are regathered; of a plan with one stage."""
        return self.only("tensors that are gathered again").gather_again

    @property
    def make_again(self) -> tuple[str, ...]:
        """Results of segments that are recomputed; of a plan with one stage."""
        return self.only("tensors that are made again").make_again

    @property
    def price(self) -> Price:
        """Price of a step; of several stages see ``plan.seconds`` and ``plan.memory_bytes``."""
        return self.only("a price").price

    @property
    def solution(self) -> Solution | None:
        """The solver's verdict; of a plan with one stage."""
        return self.only("a solution").solution

    def of_graphs(self, fingerprint: str, of_stages: Sequence[str]) -> Plan:
        """Return the same decisions for a model with the same operators, such as one in another precision.

        Args:
            fingerprint: the fingerprint of the model's graph.
            of_stages: fingerprints of the stages' graphs.
        """
        stages = (replace(stage, fingerprint=new) for stage, new in zip(self.stages, of_stages, strict=True))
        return replace(self, fingerprint=fingerprint, stages=tuple(stages), graph=None)

    def of_graph(self, fingerprint: str) -> Plan:
        """Return :meth:`of_graphs` for a plan of one stage."""
        return self.of_graphs(fingerprint, [fingerprint])

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "graph": None}  # other processes capture the model themselves

    def __repr__(self) -> str:
        return f"<Plan: {plan_line(self)}>"

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)

    def validate(self) -> Plan:
        """Check the plan and return it.

        Raises:
            PlanError: stages and schedule do not agree, a mesh does not have as many devices as it names or names one
                twice, stages of a group are on different devices, or groups share a device.
        """
        check_places(self.schedule, [s.mesh for s in self.stages], [s.devices for s in self.stages])
        return self


def one_stage(microbatches: int) -> Schedule:
    """Return the schedule without a pipeline: forward and backward of each microbatch in turn.

    Raises:
        ValueError: there are too many microbatches.
    """
    check_size(1, microbatches)
    row = tuple(Action(0, kind, k) for k in range(microbatches) for kind in "FB")
    return Schedule("none", 1, microbatches, ((0,),), (row,))


def reshard_key(graph: Graph, ref: Ref) -> str:
    """Return the name of a tensor in a plan.

    ``node`` for a node's first output, ``node#1`` for the second, and so on.
    """
    name = graph.nodes[ref.node].name
    return f"{name}#{ref.out}" if ref.out else name


def segment_numbers(graph: Graph, recompute: Recompute) -> dict[int, int]:
    """Return the number of the segment of each operator that is in one.

    Raises:
        PlanError: a name is no operator, a segment ends before it begins, or segments overlap or are out of order.
    """
    numbers: dict[int, int] = {}
    end = -1
    for number, (first, last) in enumerate(recompute):
        for name in (first, last):
            if name not in graph.index or graph.nodes[graph.index[name]].kind != "op":
                raise PlanError(f"recompute[{number}]: '{name}' is no operator of the model; see autopar show --code")
        a, b = graph.index[first], graph.index[last]
        if b < a:
            raise PlanError(f"recompute[{number}]: '{last}' runs before '{first}'; exchange the two")
        if a <= end:
            raise PlanError(
                f"recompute[{number}]: '{first}' does not come after the segment before, which ends with "
                f"'{recompute[number - 1][1]}'; segments stand in execution order and do not overlap"
            )
        numbers.update((i, number) for i in range(a, b + 1) if graph.nodes[i].kind == "op")
        end = b
    return numbers
