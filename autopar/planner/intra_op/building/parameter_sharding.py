"""Options to store and use a parameter, and their cost per step.

Changing a parameter from its stored to its used placement is the same kind of step as a reshard; the backward of the
step is the gradient's way back. ``I -> R`` is plain data parallelism (all-reduce of the gradient), ``S -> R`` is ZeRO
(all-gather, reduce-scatter), ``S -> S`` tensor parallelism (nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from autopar.planner.intra_op.building import matrix_prices
from autopar.planner.intra_op.building.price import Pricer
from autopar.plans.plan import ParamChoice, StagePlan
from autopar.plans.stepped_by import stepped_by
from autopar.rules.kernels import Kernels
from autopar.words.graph import ITEM_BYTES, Graph, Node, Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import Placement, State, path, replicated_placement, shard, step_collectives
from autopar.words.precision import Precision
from autopar.words.shards import divides, elements_moved, fits, local_shape
from cost_models import optimizer_state_bytes
from cost_models.costs import Axis
from cost_models.host_step import host_step_seconds
from cost_models.optimizer_bytes import MUON
from cost_models.parameter_overlap import NO_COPIES, HostSeconds, ParameterSeconds


class ParamInStep(NamedTuple):
    """A parameter, and what a step does with it: equal ones have equal prices.

    Attributes:
        spec: as the program reads it.
        grad: it is trained.
        optimizer: what steps on it (:func:`autopar.plans.stepped_by.stepped_by`).
        precision: a policy, under which it is stored, and its gradient added up, in other formats.
        versions: so many there are at one time.
    """

    spec: Spec
    grad: bool
    optimizer: str
    microbatches: int
    precision: Precision | None = None
    versions: int = 1

    @classmethod
    def of(cls, graph: Graph, node: Node, optimizer: str, microbatches: int, versions: int = 1) -> ParamInStep:
        """Return the parameter of a node of `graph`, under the ``optimizer`` of a plan."""
        by = stepped_by(graph, node, optimizer)
        return cls(node.out, node.needs_grad, by, microbatches, graph.policy_of(node), versions)


@dataclass(frozen=True)
class ParamCost:
    """Seconds per step, and bytes on one rank, of a :class:`ParamChoice`.

    Attributes:
        seconds: the seconds of its collectives, by themselves.
        collectives: the same, by when they run.
        may_hide: the part of `seconds` that may overlap with computing.
        copies: the part of `may_hide` that is copied between device and host.
        step_seconds: seconds of the optimizer, and of adding its gradients up over microbatches.
        version_bytes: further versions of the weight, as operators use it.
        host_seconds: the part of `step_seconds` that the optimizer takes on the host.
        peak_bytes: what copies gathered for one use take while they live: this one and the next, which is fetched
            ahead. Of all parameters the largest counts.
    """

    seconds: float
    collectives: ParameterSeconds
    may_hide: ParameterSeconds
    step_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    peak_bytes: int = 0
    version_bytes: int = 0
    host_seconds: float = 0.0
    copies: HostSeconds = NO_COPIES

    @property
    def n_bytes(self) -> int:
        """Bytes that stay on a rank, without peaks."""
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.gathered_bytes + self.version_bytes


def choices(spec: Spec, grad: bool, used: Iterable[State], mesh: Mesh, *, all_dims: bool = False) -> list[ParamChoice]:
    """Return every option to store a parameter for the given used placements.

    Replicated or cut on each axis, both lifetimes.

    On an axis where the used placement is a shard, the stored one is the same or, if that has a block size, replicated
    or a shard of another dim. Elsewhere it is replicated or sharded on the first dim that divides or, where none does,
    on the one whose largest shard is smallest (``all_dims``: on any).
    """
    result: list[ParamChoice] = []
    whole = replicated_placement(grad)
    for use in sorted(set(used)):
        options: list[list[Placement]] = []
        for a, (_, size) in enumerate(mesh):
            if use[a].is_shard or size == 1:
                others = [shard(d) for d in range(len(spec.shape)) if d != use[a].dim]
                if use[a].unit > 1:  # what is stored is a DTensor, which knows no units
                    options.append([whole, *others])
                else:
                    options.append([use[a] if use[a].is_shard else whole])
            else:
                options.append([whole, *map(shard, range(len(spec.shape)))])
        for stored in _stored(spec.shape, options, use, mesh, all_dims):
            gathers = any(a.is_shard and not b.is_shard for a, b in zip(stored, use, strict=True))
            result.append(ParamChoice(stored, use, "step"))
            if gathers:
                result.append(ParamChoice(stored, use, "use"))
    return result


def _stored(
    shape: tuple[int, ...], options: Sequence[Sequence[Placement]], use: State, mesh: Mesh, all_dims: bool
) -> list[State]:
    """Return the states to store a parameter in, one for every set of axes that cut it (``all_dims``: all)."""
    legal = [
        stored for stored in map(State, product(*options))
        if fits(shape, stored, mesh) and path(stored, use) is not None
    ]  # fmt: skip
    if all_dims:
        return legal
    by_pattern: dict[tuple[bool, ...], list[State]] = {}
    for stored in legal:
        by_pattern.setdefault(tuple(placement.is_shard for placement in stored), []).append(stored)
    chosen = []
    for same in by_pattern.values():
        even = [stored for stored in same if divides(shape, stored, mesh)]
        chosen.append(even[0] if even else min(same, key=lambda stored: prod(local_shape(shape, stored, mesh))))
    return chosen


def bucketed_seconds(cost: Axis, kind: str, n_bytes: float, bucket_bytes: float) -> float:
    """Return the seconds of a collective that shares its bucket with others: a share of a full bucket's time."""
    if n_bytes >= bucket_bytes:
        return cost.seconds(kind, n_bytes)
    return cost.seconds(kind, bucket_bytes) * n_bytes / bucket_bytes


class ParamCollective(NamedTuple):
    """A collective of a parameter, once or in every microbatch.

    A gather before its use, or a reduction of its gradient.

    Bytes as collectives count them.
    """

    axis: str
    kind: str
    n_bytes: int
    is_gather: bool


def param_collectives(
    spec: Spec, grad: bool, choice: ParamChoice, mesh: Mesh, precision: Precision | None = None
) -> list[ParamCollective]:
    """Return the collectives between the stored and the used placement of a parameter."""
    result: list[ParamCollective] = []
    steps = path(choice.stored, choice.used)
    assert steps is not None
    for axis, src, dst in steps:
        name, size = mesh[axis]
        if size == 1:
            continue
        moved = elements_moved(spec.shape, src, dst, mesh)
        item_bytes: float = spec.item_bytes
        if precision is not None and precision.narrow is not None and precision.narrow_gathers:
            item_bytes = precision.narrow.item_bytes
        whole = round(moved * item_bytes)
        back = whole if precision is None else moved * ITEM_BYTES[precision.summed(spec.dtype)]
        forward, backward = step_collectives(src[axis], dst[axis])
        if forward:
            result.append(ParamCollective(name, forward, whole, True))
        if backward and grad:
            result.append(ParamCollective(name, backward, back, False))
    return result


def collectives(
    spec: Spec, grad: bool, choice: ParamChoice, mesh: Mesh, microbatches: int, precision: Precision | None = None
) -> list[tuple[str, str, int, int]]:
    """Return axis, kind, bytes and times of the collectives that a parameter costs per step, by its lifetime."""
    per_use = choice.lifetime == "use"
    return [
        (axis, kind, n_bytes, 1 if not per_use else microbatches * (2 if is_gather and grad else 1))
        for axis, kind, n_bytes, is_gather in param_collectives(spec, grad, choice, mesh, precision)
    ]


def places_of(choice: ParamChoice, grad: bool, is_gather: bool) -> tuple[int, ...]:
    """Return when a collective of a parameter runs, as places in :class:`ParameterSeconds`."""
    if choice.lifetime == "step":
        return (0,) if is_gather else (1,)
    return (2, 3) if is_gather and grad else (2,) if is_gather else (3,)


def seconds_of(
    spec: Spec, grad: bool, choice: ParamChoice, pricer: Pricer, precision: Precision | None = None
) -> tuple[ParameterSeconds, ParameterSeconds]:
    """Return the seconds of a parameter's collectives by when they run, and of those that may overlap."""
    seconds, may_hide = [0.0] * 4, [0.0] * 4  # in the order of ParameterSeconds
    for axis, kind, n_bytes, is_gather in param_collectives(spec, grad, choice, pricer.mesh, precision):
        one = bucketed_seconds(pricer.axes[axis], kind, n_bytes, pricer.costs.bucket_bytes)
        for place in places_of(choice, grad, is_gather):
            seconds[place] += one
            if (pricer.shares.gathers if is_gather else pricer.shares.reductions) > 0:
                may_hide[place] += one
    return ParameterSeconds(*seconds), ParameterSeconds(*may_hide)


def first_read(graph: Graph, bucket_bytes: float) -> frozenset[int]:
    """Return the parameters that are read first, up to a bucket of them.

    Nothing is computed before they are there, and nothing after their gradients: these collectives are waited for.
    """
    key = "first read", bucket_bytes
    found: frozenset[int] | None = graph.derived.get(key)
    if found is None:
        numbers: dict[int, None] = {}
        n_bytes = 0
        for node in graph.nodes:
            for ref in node.refs if node.kind == "op" and (not numbers or n_bytes < bucket_bytes) else ():
                if graph.nodes[ref.node].kind == "param" and ref.node not in numbers:
                    numbers[ref.node] = None
                    n_bytes += graph.spec(ref).n_bytes
        found = graph.derived[key] = frozenset(numbers)
    return found


def cost(param: ParamInStep, choice: ParamChoice, pricer: Pricer) -> ParamCost:
    """Return the price of storing and using a parameter as ``choice`` says."""
    spec, grad, optimizer, microbatches, precision, versions = param
    mesh = pricer.mesh
    elements = prod(local_shape(spec.shape, choice.stored, mesh))
    of_master = spec.item_bytes if precision is None else ITEM_BYTES[precision.stored(spec.dtype)]
    by_itself, may_hide = seconds_of(spec, grad, choice, pricer, precision)
    copies = NO_COPIES
    if choice.on_host:
        copied = host_copy_seconds(elements * of_master, grad, choice, pricer)
        by_itself = by_itself.plus(copied.both)
        copies = copied if pricer.shares.gathers > 0 else copies
        may_hide = may_hide.plus(copies.both)
    of_sum = spec.item_bytes if precision is None else ITEM_BYTES[precision.accumulated(spec.dtype)]
    of_moments = spec.item_bytes if precision is None else ITEM_BYTES[precision.kept(spec.dtype)]
    used_elements = prod(local_shape(spec.shape, choice.used, mesh))
    stored, used = elements * of_master, used_elements * spec.item_bytes
    is_narrow = keeps_copies(precision, pricer.kernels)
    step_seconds = host_seconds = 0.0
    if grad:
        cast = cast_bytes(spec, choice, used_elements, microbatches, precision) if is_narrow else 0.0
        on_device = 0 if choice.on_host else stored
        host_seconds = host_step_seconds(optimizer, stored, pricer.known_host) if choice.on_host else 0.0
        step_seconds = pricer.parameter_step(used, on_device, microbatches, optimizer, cast) + host_seconds
        step_seconds += matrix_prices.seconds_of(pricer, spec, choice.stored) if optimizer == MUON else 0.0
    if precision is not None and is_narrow:
        used = copy_bytes(precision, used_elements, spec.item_bytes)
    gathered = 0
    is_copy = used_elements != elements or choice.on_host
    if (is_copy or of_master != spec.item_bytes or is_narrow) and choice.lifetime == "step":
        gathered = used
        if grad and (microbatches > 1 or pricer.kernels.keeps_gradients) and is_copy:
            gathered += used_elements * of_sum
            if not choice.on_host:
                gathered -= stored * pricer.kernels.keeps_gradients  # the stored gradient is a part of the buffer
    moved = param_collectives(spec, grad, choice, mesh, precision)
    if pricer.kernels.buckets_gradients and any(not is_gather for *_, is_gather in moved):
        gathered += used_elements * spec.item_bytes
    held = stored, stored if grad else 0, optimizer_state_bytes(optimizer, elements, of_moments, 1) if grad else 0
    of_device = (0, 0, 0) if choice.on_host else held
    return ParamCost(
        by_itself.of_step(microbatches), by_itself, may_hide, step_seconds, *of_device, gathered,
        2 * used if choice.lifetime == "use" and choice.is_copied else 0,
        (versions - 1) * used_elements * spec.item_bytes if grad else 0, host_seconds, copies,
    )  # fmt: skip


def host_copy_seconds(n_bytes: float, grad: bool, choice: ParamChoice, pricer: Pricer) -> HostSeconds:
    """Return the seconds of a parameter's copies between host and device, by when they run.

    Its values come in before their use, in the backward once more where a copy lives for one use; its gradient goes
    out. ``n_bytes`` are those of what is stored, on one rank.
    """
    there = pricer.known_host.to_device(n_bytes)
    back = pricer.known_host.to_host(n_bytes) if grad else 0.0
    if choice.lifetime == "step":
        return HostSeconds(ParameterSeconds(gathers=there), ParameterSeconds(reductions=back))
    again = there if grad else 0.0
    coming = ParameterSeconds(forward_each=there, backward_each=again)
    return HostSeconds(coming, ParameterSeconds(backward_each=back))


def keeps_copies(precision: Precision | None, kernels: Kernels) -> bool:
    """Return whether a rank keeps narrow copies of weights; programs of our own cast for each use."""
    if precision is None or precision.narrow is None:
        return False
    return kernels.fused or not precision.narrow.runs


def cast_bytes(
    spec: Spec, choice: ParamChoice, elements: float, microbatches: int, precision: Precision | None
) -> float:  # fmt: skip
    """Return the bytes read and written in a step to cast a trained weight to narrow copies.

    Once where a rank keeps them, at every use where it gathers them; none where ranks gather copies that the
    optimizer's step wrote. ``elements`` are those of the weight on one rank, as products read it.
    """
    if precision is None or precision.narrow is None or precision.narrow_gathers:
        return 0.0
    times = 1 if choice.lifetime == "step" else 2 * microbatches
    return times * elements * precision.narrow.cast_bytes(spec.item_bytes)


def copy_bytes(precision: Precision, elements: int, wide: int) -> int:
    """Return the bytes of the copies of a weight that products read: narrow ones, or else the wide one too.

    Narrow ones, and the wide one unless narrow are gathered.
    """
    assert precision.narrow is not None
    return round(elements * ((0 if precision.narrow_gathers else wide) + precision.narrow.copies_bytes))


def cheapest(options: Sequence[tuple[float, ...]], keep_memory: bool) -> list[int]:
    """Return the numbers of the options worth keeping: no other is as good in everything.

    An option is its seconds if nothing is hidden, its seconds if all is that may be, and its bytes (with
    ``keep_memory``).
    """
    order = sorted(range(len(options)), key=lambda i: (options[i], i))
    kept: list[int] = []
    for i in order:
        counted = options[i] if keep_memory else options[i][:-1]
        if not any(all(a <= b for a, b in zip(options[k], counted, strict=False)) for k in kept):
            kept.append(i)
    return kept


def peak_bytes(graph: Graph, plan: StagePlan, pricer: Pricer) -> int:
    """Return the bytes of a plan that belong to copies gathered for one use."""
    nodes = {node.target: node for _, node in graph.of_kind("param")}
    times, versions = plan.microbatches, plan.versions.number
    return max(
        (
            cost(ParamInStep.of(graph, nodes[name], plan.optimizer, times, versions), choice, pricer).peak_bytes
            for name, choice in plan.params.items()
        ),
        default=0,
    )
