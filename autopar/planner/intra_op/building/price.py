"""Prices of one op and of one reshard step: local shapes go to a cost source, seconds come back.

What an op costs on one device is the cost source's business (:mod:`cost_models.costs`); what a device does of an op
under a strategy, and which collectives that takes, is found here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import prod

from autopar.planner.intra_op.building.narrow_prices import LocalProduct, product_seconds
from autopar.rules.kernels import CPU, Kernels, kernels_of
from autopar.rules.local_calls import collectives_inside, cuts_of, local_call
from autopar.rules.notation import Rule
from autopar.rules.operator_call import In, call_of
from autopar.rules.operator_work import (
    curve_of,
    gemm_of,
    is_aligned,
    joined_gradients,
    moved_bytes,
    through_memory,
    unfused_scores_bytes,
)  # fmt: skip
from autopar.rules.registry import rules_of
from autopar.rules.strategy import Strategy, grads_of
from autopar.words.exchanges import exchanges_along
from autopar.words.graph import Graph, Node, Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State, changed_axis, step_collectives
from autopar.words.shards import elements_moved, local_shape
from cost_models.chunked_exchange import ChunkedExchange
from cost_models.costs import Axis, Costs, OpSeconds, OpWork, StageWork, costs_of
from cost_models.host_link import HostCopies, copies_of, host_copies
from cost_models.joined_axes import JOINED, JoinableAxes
from cost_models.matrix_steps import iteration_seconds
from cost_models.optimizer_bytes import MUON
from cost_models.parameter_overlap import HIDES_NOTHING, TENSOR, Shares, shares_of, tensor_exposed
from hardware_profiles import Cluster, Device
from hardware_profiles.measurements import op_key, tensor_text


@dataclass
class Pricer:
    """Prices on one mesh on one cluster; remembers what it has priced.

    Attributes:
        mesh: axis names and sizes.
        devices: ranks of the cluster, in row-major order.
        costs: the source of seconds.
        axes: collective costs by axis name.
        device: the slowest device of the mesh stands for all.
        shares: how far collectives of parameters overlap with computing.
        kernels: the kernels that run on the devices.
        tensor: the fraction that is waited for of collectives of tensor parallelism between operators.
        host: copies of the device to the memory of its host and back; None if it has none.
    """

    mesh: Mesh
    devices: tuple[int, ...]
    costs: Costs
    axes: Mapping[str, Axis]
    device: Device
    shares: Shares = HIDES_NOTHING
    kernels: Kernels = CPU
    tensor: float = 1.0
    host: HostCopies | None = None
    _steps: dict[tuple[Spec, bool, State, State], float] = field(default_factory=dict)
    _elements: dict[tuple[tuple[int, ...], State], int] = field(default_factory=dict)
    _parameters: dict[object, float] = field(default_factory=dict)
    _edges: dict[tuple[Spec, bool, int], tuple[object, list[float]]] = field(default_factory=dict)
    _iterations: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def known_host(self) -> HostCopies:
        """The way to the memory of the host.

        Raises:
            ProfileError: it is not known.
        """
        return self.host if self.host is not None else host_copies(self.device)

    # -- reshards

    def step(self, spec: Spec, grad: bool, src: State, dst: State) -> float:
        """Return the seconds, forward and backward, of changing one axis of a tensor from ``src`` to ``dst``."""
        key = (spec, grad, src, dst)
        seconds = self._steps.get(key)
        if seconds is None:
            seconds = self._steps[key] = sum(self.step_parts(spec, grad, src, dst))
        return seconds

    def steps(self, spec: Spec, grad: bool, edges: tuple[tuple[State, State], ...]) -> list[float]:
        """Return :meth:`step` of many steps.

        Results are remembered together, as each program needs those of similar tensors.
        """
        key = spec, grad, id(edges)
        known = self._edges.get(key)
        if known is None or known[0] is not edges:
            known = self._edges[key] = edges, [self.step(spec, grad, src, dst) for src, dst in edges]
        return known[1]

    def step_parts(self, spec: Spec, grad: bool, src: State, dst: State) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward of one step."""
        axis = changed_axis(src, dst)
        name, size = self.mesh[axis]
        if size == 1:
            return 0.0, 0.0
        cost = self.axes[name]
        forward, backward = step_collectives(src[axis], dst[axis])
        moved = 0
        if forward is not None or backward is not None:
            moved = elements_moved(spec.shape, src, dst, self.mesh) * spec.item_bytes
        seconds = []
        for kind in (forward, backward if grad else None):
            waits = self.tensor if kind in TENSOR else 1.0
            seconds.append(waits * cost.seconds(kind, moved) if kind is not None else 0.0)
        if forward is None and not (src[axis].is_replicated and dst[axis].is_replicated):
            n_bytes = self.local_bytes(spec, src) + self.local_bytes(spec, dst)
            copy = self.costs.copy(self.device, n_bytes, spec.dtype)
            seconds[0] += copy
            if grad and backward is None:
                seconds[1] += copy
        return seconds[0], seconds[1]

    # -- ops

    def op(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[float, float]:
        """Return the seconds of computation and of collectives inside of one op, forward and backward."""
        whole, inside, _ = self._priced(graph, node, rule, strategy)
        return whole.total, inside

    def forward(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[float, float]:
        """Return the seconds of computation and of collectives inside of the forward of one op."""
        whole, _, inside = self._priced(graph, node, rule, strategy)
        return whole.forward, inside

    def phases(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> OpSeconds:
        """Return the seconds of one op, collectives inside included."""
        whole, inside, inside_forward = self._priced(graph, node, rule, strategy)
        return whole._replace(forward=whole.forward + inside_forward, total=whole.total + inside)

    def compute(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> OpSeconds:
        """Return the seconds that one device computes for an op, without collectives inside."""
        return self._priced(graph, node, rule, strategy)[0]

    def of_kernel(self, graph: Graph, node: Node) -> tuple[bool, ...]:
        """Return what of an op goes through memory, if kernels are fused: ops that are alike may differ in it.

        The first norm of a stage, whose input arrives, reads it; those of later blocks do not.
        """
        return through_memory(graph, node) if self.costs.fuses else ()

    def _priced(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[OpSeconds, float, float]:
        """Return the seconds of computation of an op, of all collectives inside, and of those of the forward.

        They are remembered with the rule, which equal ops share, for the latest mesh.
        """
        latest: tuple[object, dict[object, tuple[OpSeconds, float, float]]] | None = rule.derived.get("seconds")
        if latest is None or latest[0] is not self:
            latest = rule.derived["seconds"] = self, {}
        read = tuple([(graph.nodes[ref.node].needs_grad, graph.nodes[ref.node].kind == "param") for ref in node.refs])
        key: tuple[object, ...] = node.target, node.needs_grad, read, strategy.names
        key = *key, *self.of_kernel(graph, node)
        priced = latest[1].get(key)
        if priced is None:
            pieces, axes = cuts_of(rule, strategy.options, self.mesh)
            compute = self._compute(graph, node, rule, strategy, pieces)
            joined = [i for i in joined_gradients(rule, strategy.names) if grads_of(graph, node)[0][i]]
            if joined:
                ins = [(graph.spec(node.refs[i]), strategy.ins[i]) for i in joined]
                n_bytes = 2 * sum(self.local_bytes(spec, state) for spec, state in ins)
                copied = self.costs.copy(self.device, n_bytes, ins[0][0].dtype)
                compute = compute._replace(total=compute.total + copied, weights=compute.weights + copied)
            differentiable = any(grads_of(graph, node)[1])
            forward = self._inside(rule, pieces, axes, compute, False)
            both = self._inside(rule, pieces, axes, compute, True) if differentiable else forward
            priced = latest[1][key] = compute, both, forward
        return priced

    def _compute(
        self, graph: Graph, node: Node, rule: Rule, strategy: Strategy, pieces: Mapping[str, int | Fraction]
    ) -> OpSeconds:
        outs = [o for o in node.outs if o is not None]
        dtype = outs[0].dtype if outs else "float32"
        differentiable, gradients, weights = _backward_of(graph, node, rule)
        key = partial(key_of, graph, node, rule, strategy, self.mesh)
        if rule.kind == "none":
            work = OpWork("none", 0.0, 0, dtype, None, differentiable, gradients, weights, key)
            return self.costs.op(self.device, work)
        ins = [graph.spec(ref) for ref in node.refs]
        read = [self.local_bytes(spec, state) for spec, state in zip(ins, strategy.ins, strict=True)]
        written = [self.local_bytes(spec, state) for spec, state in zip(outs, strategy.outs, strict=True)]
        counted = through_memory(graph, node) if self.costs.fuses else (True,) * (len(read) + len(written))
        flops = rule.flops_at(pieces)
        first = local_shape(ins[0].shape, strategy.ins[0], self.mesh) if ins else ()
        of_first_out = local_shape(outs[0].shape, strategy.outs[0], self.mesh) if outs else ()
        n_bytes, backward_bytes = moved_bytes(rule, read, written, grads_of(graph, node)[0], counted)
        work = OpWork(
            rule.kind, flops, n_bytes, dtype, gemm_of(rule, pieces, flops, first, of_first_out), differentiable,
            gradients, weights, key, curve_of(rule), backward_bytes, first[-1] if first else 0,
            is_aligned(rule, dtype, pieces), not all(counted[: len(read)]),
            unfused_scores_bytes(rule, grads_of(graph, node)[0], pieces),
        )  # fmt: skip
        if node.narrow is None:
            return self.costs.op(self.device, work)
        sizes = [self._local_elements(spec.shape, state) for spec, state in zip(ins, strategy.ins, strict=True)]
        at = node.narrow.activations[0]
        rows = sizes[at] // max(1, local_shape(ins[at].shape, strategy.ins[at], self.mesh)[-1])
        between = (0, 0)
        if len(node.narrow.weights) > 1:  # [experts, in, out] twice: the first one's results, and what the second reads
            one, two = (local_shape(ins[k].shape, strategy.ins[k], self.mesh) for k in node.narrow.weights[:2])
            between = rows * two[-2], rows * one[-1]
        out = self._local_elements(outs[0].shape, strategy.outs[0])
        local = LocalProduct(sizes, out, between, ins[at].item_bytes)
        return product_seconds(self.costs, self.device, work, node.narrow, local, self.kernels.fused)

    def waits(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> dict[str, tuple[float, float]]:
        """Return the seconds of the collectives with which an op begins and ends, forward and backward.

        They are keyed by :attr:`~autopar.rules.notation.Comm.when`, and of one axis, so that others may overlap with
        them.
        """
        pieces, axes = cuts_of(rule, strategy.options, self.mesh)
        differentiable, sizes = any(grads_of(graph, node)[1]), self.mesh.size_of
        seconds = {"first": (0.0, 0.0), "last": (0.0, 0.0)}
        ends = {f: [JOINED.join(e.axes) for e in exchanges_along(of_factor)] for f, of_factor in axes.items()}
        for comm, axis, n_bytes, times in collectives_inside(rule, pieces, axes, differentiable, sizes):
            if comm.when and axis == ends[comm.factor][-1 if comm.when == "first" else 0]:
                spent = self.axes[axis].seconds(comm.kind, n_bytes) * times
                there, back = seconds[comm.when]
                seconds[comm.when] = (there, back + spent) if comm.backward else (there + spent, back)
        forward, backward = self.chunked(graph, node, rule, strategy)
        if forward.chunks > 1:
            compute = self.compute(graph, node, rule, strategy)
            there, back = forward.waits(compute.forward), backward.waits_back(compute.total - compute.forward)
            seconds = {"first": (there[0], back[0]), "last": (there[1], back[1])}
        return seconds

    @cached_property
    def all_ranks(self) -> Axis:
        """Costs of collectives of all ranks of the mesh together."""
        return self.costs.axes({"all": len(self.devices)}, self.devices)["all"]

    def iteration(self, shape: tuple[int, ...]) -> float:
        """Return the seconds of Muon's iteration on a whole matrix; 0 if the cost source knows nothing of steps."""
        if shape not in self._iterations:
            knows = self.costs.stage(lambda: StageWork((), (), 0, 1, MUON)) is not None
            self._iterations[shape] = iteration_seconds(self.costs, self.device, shape) if knows else 0.0
        return self._iterations[shape]
    def chunked(
        self, graph: Graph, node: Node, rule: Rule, strategy: Strategy
    ) -> tuple[ChunkedExchange, ChunkedExchange]:
        """Return the exchanges of an op that are made in chunks, of the forward and of the backward."""
        pieces, axes = cuts_of(rule, strategy.options, self.mesh)
        return self._chunked(rule, pieces, axes, any(grads_of(graph, node)[1]))[1]

    def _chunked(
        self, rule: Rule, pieces: Mapping[str, int | Fraction], axes: Mapping[str, tuple[str, ...]],
        differentiable: bool,
    ) -> tuple[float, tuple[ChunkedExchange, ChunkedExchange]]:  # fmt: skip
        """Return the seconds of the collectives of an op that are waited for, and the exchanges in chunks."""
        blocking, passes = 0.0, [ChunkedExchange(), ChunkedExchange()]
        for comm, axis, n_bytes, times in collectives_inside(rule, pieces, axes, differentiable, self.mesh.size_of):
            if comm.overlaps:
                continue
            seconds, now = self.axes[axis].seconds(comm.kind, n_bytes) * times, passes[comm.backward]
            if comm.chunks > 1 and comm.when == "first":
                now = now._replace(there=now.there + seconds, chunks=comm.chunks)
            elif comm.chunks > 1:
                now = now._replace(back=now.back + seconds, chunks=comm.chunks)
            elif comm.when == "last" and exchanges_along(axes[comm.factor])[-1].chunks > 1:
                now = now._replace(beyond=now.beyond + seconds)
            else:
                blocking += seconds
            passes[comm.backward] = now
        return blocking, (passes[0], passes[1])

    def parameter_step(
        self, used_bytes: float, stored_bytes: float, microbatches: int, optimizer: str, cast_bytes: float = 0.0
    ) -> float:  # fmt: skip
        """Return the seconds of the optimizer for one parameter, its accumulated gradient and its narrow casts.

        With accumulation of its gradient and narrow casts.
        """
        key = used_bytes, stored_bytes, microbatches, optimizer, cast_bytes
        if key not in self._parameters:
            sizes = ((used_bytes, stored_bytes),)
            matrix = stored_bytes if optimizer == MUON else 0.0
            one = self.costs.stage(
                lambda: StageWork((), sizes, 0, microbatches, optimizer, cast_bytes, matrix_bytes=matrix)
            )
            none = self.costs.stage(lambda: StageWork((), (), 0, microbatches, optimizer))
            seconds = 0.0
            if one is not None and none is not None:
                seconds = one.step - none.step + microbatches * (one.backward - none.backward)
            self._parameters[key] = seconds
        return self._parameters[key]

    def launches(self, graph: Graph) -> float:
        """Return the seconds, both passes, of the launches of an op, or of the smallest kernels it may have.

        They mean nothing if the cost source does not compute with them.
        """
        least = self.device.kernel_seconds
        device = self.device if least is None else replace(self.device, launch_seconds=least)
        without, total = replace(device, launch_seconds=0.0, kernel_seconds=None if least is None else 0.0), 0.0
        rules = rules_of(graph)
        for i, node in graph.of_kind("op"):
            if (rule := rules[i]) is not None and rule.kind != "none":
                dtype = next((o.dtype for o in node.outs if o is not None), "float32")
                work = OpWork(rule.kind, 0.0, 0, dtype, None, *_backward_of(graph, node, rule), lambda: None)
                total += self.costs.op(device, work).total - self.costs.op(without, work).total
        return total

    def _inside(
        self, rule: Rule, pieces: Mapping[str, int | Fraction], axes: Mapping[str, tuple[str, ...]], compute: OpSeconds,
        differentiable: bool,
    ) -> float:  # fmt: skip
        """Return the seconds of an op's collectives that ``compute``, the seconds of its computation, does not hide."""
        beside = {False: 0.0, True: 0.0}
        for comm, axis, n_bytes, times in collectives_inside(rule, pieces, axes, differentiable, self.mesh.size_of):
            if comm.overlaps:
                beside[comm.backward] += self.axes[axis].seconds(comm.kind, n_bytes) * times
        blocking, chunked = self._chunked(rule, pieces, axes, differentiable)
        backward = compute.total - compute.forward if differentiable else 0.0
        if chunked[0].chunks > 1:
            blocking += chunked[0].forward(compute.forward) - compute.forward
        if chunked[1].chunks > 1:
            blocking += chunked[1].backward(backward) - backward
        if not any(beside.values()):
            return blocking
        return blocking + max(0.0, beside[False] - compute.forward) + max(0.0, beside[True] - backward)

    def local_bytes(self, spec: Spec, state: State) -> int:
        """Return the bytes of a tensor on one rank."""
        return self._local_elements(spec.shape, state) * spec.item_bytes

    def _local_elements(self, shape: tuple[int, ...], state: State) -> int:
        """Return the elements of a tensor on one rank."""
        key = shape, state
        elements = self._elements.get(key)
        if elements is None:
            elements = self._elements[key] = prod(local_shape(shape, state, self.mesh))
        return elements


def _backward_of(graph: Graph, node: Node, rule: Rule) -> tuple[bool, int, int]:
    """Return whether an op has a backward and, of a contraction, how many inputs and parameters get gradients."""
    in_grads, out_grads = grads_of(graph, node)
    if not any(out_grads) or rule.kind not in ("matmul", "conv"):
        return any(out_grads), 0, 0
    read = enumerate(zip(in_grads, node.refs, strict=True))
    reached = [ref for i, (grad, ref) in read if grad and i not in rule.additive]
    return True, len(reached), sum(graph.nodes[ref.node].kind == "param" for ref in reached)


def key_of(graph: Graph, node: Node, rule: Rule, strategy: Strategy, mesh: Mesh) -> str | None:
    """Return the key of an op under a strategy in a profile; None for one that communicates inside."""
    call = local_call(call_of(node, graph.spec), rule, strategy.options, mesh)
    if call.distributed and (not rule.random or cuts_of(rule, strategy.options, mesh)[0]):
        return None
    in_grads, _ = grads_of(graph, node)
    texts = [
        tensor_text(graph.spec(ref).dtype, local_shape(graph.spec(ref).shape, state, mesh), grad)
        for ref, state, grad in zip(node.refs, strategy.ins, in_grads, strict=True)
    ]
    return op_key(node.target, call.args, call.kwargs, lambda v: texts[v.position] if isinstance(v, In) else None)


def pricer(cluster: Cluster, mesh: Mesh, devices: Sequence[int] | None = None) -> Pricer:
    """Return the :class:`Pricer` of a mesh by the cluster's cost source, on its first devices or those given."""
    ranks = range(mesh.n_devices) if devices is None else devices
    return _pricer(cluster, mesh, tuple(ranks), costs_of(cluster))


@lru_cache(maxsize=4096)
def _pricer(cluster: Cluster, mesh: Mesh, devices: tuple[int, ...], costs: Costs) -> Pricer:
    axes = JoinableAxes(costs, mesh.size_of, devices)
    device = cluster.slowest(devices)
    return Pricer(
        mesh, devices, costs, axes, device, shares_of(cluster), kernels_of(cluster, device), tensor_exposed(cluster),
        copies_of(cluster, device),
    )  # fmt: skip
