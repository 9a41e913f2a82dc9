"""Prices of one op and of one reshard step, in seconds, from local shapes and the hardware's numbers.

Backward of an op: every differentiable input of a contraction costs one more contraction of the same size; attention
costs 2.5 forwards (recomputed scores, four products); everything else moves its bytes once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from autopar.graph import Graph, Node, Spec
from autopar.placements import Mesh, State, elements_moved, local_shape, n_devices, only_change, step_collectives
from autopar.rules.local import collectives_inside, cuts_of, local_call
from autopar.rules.notation import In, Rule, call_of
from autopar.rules.strategy import Strategy, grads_of
from cost_models import AxisCost, op_seconds
from cost_models.measured import corrected
from hardware_profiles import Cluster, Device
from hardware_profiles.measured import Measured, OpSeconds, op_key, tensor_text


@dataclass
class Pricer:
    """Numbers of one mesh on one cluster; remembers what it has priced.

    Attributes:
        mesh: axis names and sizes.
        axes: collective costs by axis name.
        device: the slowest device of the mesh stands for all.
        bucket_bytes: parameter collectives share buckets of about this size; 0 prices each on its own.
        measured: of a profile: seconds of ops that were measured, corrections for others.
    """

    mesh: Mesh
    axes: Mapping[str, AxisCost]
    device: Device
    bucket_bytes: float = 25 * 2**20
    measured: Measured | None = None
    _steps: dict[tuple[Spec, bool, State, State], float] = field(default_factory=dict)

    # -- reshards

    def step(self, spec: Spec, grad: bool, src: State, dst: State) -> float:
        """Seconds, forward and backward, of changing one axis of a tensor from ``src`` to ``dst``."""
        key = (spec, grad, src, dst)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = sum(self.step_parts(spec, grad, src, dst))
        return known

    def step_parts(self, spec: Spec, grad: bool, src: State, dst: State) -> tuple[float, float]:
        """Seconds of the forward and of the backward of one step."""
        axis = only_change(src, dst)
        name, size = self.mesh[axis]
        if size == 1:
            return 0.0, 0.0
        cost = self.axes[name]
        src_bytes = prod(local_shape(spec.shape, src, self.mesh)) * spec.item_bytes
        dst_bytes = prod(local_shape(spec.shape, dst, self.mesh)) * spec.item_bytes
        forward, backward = step_collectives(src[axis], dst[axis])
        moved = elements_moved(spec.shape, src, dst, self.mesh) * spec.item_bytes
        seconds = []
        for kind in (forward, backward if grad else None):
            seconds.append(cost.seconds(kind, moved) if kind is not None else 0.0)
        if forward is None and {src[axis], dst[axis]} != {"I", "R"}:
            copy = op_seconds(self.device, "copy", 0.0, src_bytes + dst_bytes, spec.dtype)
            seconds[0] += copy
            if grad and backward is None:
                seconds[1] += copy
        return seconds[0], seconds[1]

    # -- ops

    def op(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[float, float]:
        """``(compute seconds, seconds of collectives inside)`` of one op, forward and backward."""
        pieces, axes = cuts_of(rule, strategy.options, self.mesh)
        in_grads, out_grads = grads_of(graph, node)
        differentiable = any(out_grads)
        compute = self._compute(graph, node, rule, strategy, pieces, in_grads, differentiable)

        def forward() -> float:
            return self._compute(graph, node, rule, strategy, pieces, in_grads, False)

        return compute, self._inside(rule, pieces, axes, compute, forward if differentiable else None)

    def forward(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[float, float]:
        """``(compute seconds, seconds of collectives inside)`` of the forward of one op."""
        pieces, axes = cuts_of(rule, strategy.options, self.mesh)
        in_grads, _ = grads_of(graph, node)
        compute = self._compute(graph, node, rule, strategy, pieces, in_grads, False)
        return compute, self._inside(rule, pieces, axes, compute, None)

    def phases(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[float, float, float]:
        """Seconds of one op: ``(forward, all, gradients of weights)``, collectives inside included."""
        pieces, axes = cuts_of(rule, strategy.options, self.mesh)
        in_grads, out_grads = grads_of(graph, node)
        both = any(out_grads)
        compute = [
            self._compute(graph, node, rule, strategy, pieces, in_grads, differentiable)
            for differentiable in (False, both)
        ]
        inside = [
            self._inside(rule, pieces, axes, compute[0], None),
            self._inside(rule, pieces, axes, compute[1], (lambda: compute[0]) if both else None),
        ]
        weights = 0.0
        if both and rule.kind in ("matmul", "conv"):
            held = sum(
                grad and i not in rule.additive and graph.nodes[ref.node].kind == "param"
                for i, (grad, ref) in enumerate(zip(in_grads, node.refs, strict=True))
            )
            weights = compute[0] * held
        if both and self.measured is not None:
            known = self.known(graph, node, rule, strategy)
            if known is not None:
                weights = min(known.weight_seconds, known.backward_seconds)
            elif weights:
                times = sum(1 for i, g in enumerate(in_grads) if g and i not in rule.additive)
                weights *= (compute[1] - compute[0]) / (compute[0] * times) if compute[0] else 0.0
        return compute[0] + inside[0], compute[1] + inside[1], weights

    def _compute(
        self, graph: Graph, node: Node, rule: Rule, strategy: Strategy, pieces: Mapping[str, int],
        in_grads: Sequence[bool], differentiable: bool,
    ) -> float:  # fmt: skip
        if self.measured is not None:
            known = self.known(graph, node, rule, strategy)
            if known is not None:
                return known.forward_seconds + (known.backward_seconds if differentiable else 0.0)
            forward, both = self.formula(graph, node, rule, strategy, pieces, in_grads, differentiable)
            return sum(corrected(self.measured, rule.kind, forward, both - forward, differentiable))
        return self.formula(graph, node, rule, strategy, pieces, in_grads, differentiable)[1]

    def formula(
        self, graph: Graph, node: Node, rule: Rule, strategy: Strategy, pieces: Mapping[str, int],
        in_grads: Sequence[bool], differentiable: bool,
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of the forward of one op, and of forward and backward, by the roofline of the device."""
        if rule.kind == "none":
            return 0.0, 0.0
        n_bytes = 0
        for ref, state in zip(node.refs, strategy.ins, strict=True):
            n_bytes += self.local_bytes(graph.spec(ref), state)
        outs = [o for o in node.outs if o is not None]
        for spec, state in zip(outs, strategy.outs, strict=True):
            n_bytes += self.local_bytes(spec, state)
        dtype = outs[0].dtype if outs else "float32"
        flops = rule.flops_at(pieces)
        gemm = _gemm(rule, pieces) if rule.kind in ("matmul", "conv") else None
        forward = op_seconds(self.device, rule.kind, flops, n_bytes, dtype, gemm)
        if not differentiable:
            return forward, forward
        if rule.kind in ("matmul", "conv"):
            times = sum(1 for i, g in enumerate(in_grads) if g and i not in rule.additive)
            return forward, forward * (1 + times)
        if rule.kind == "attention":
            return forward, forward * 3.5
        return forward, forward * 2

    def known(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> OpSeconds | None:
        """What the profile has of an op at these local shapes."""
        if self.measured is None:
            return None
        key = key_of(graph, node, rule, strategy, self.mesh)
        return self.measured.ops.get(key) if key is not None else None

    def split(self, graph: Graph, node: Node, rule: Rule | None, strategy: Strategy) -> float:
        """Seconds that the backward of an op takes more in two halves than whole, as far as it was measured."""
        known = self.known(graph, node, rule, strategy) if rule is not None else None
        if known is None or not known.weight_seconds or not known.input_seconds:
            return 0.0
        return max(0.0, known.input_seconds + known.weight_seconds - known.backward_seconds)

    def shares(self, graph: Graph, node: Node, rule: Rule, strategy: Strategy) -> tuple[float, float]:
        """``(measured, computed)`` seconds of an op, forward and backward: one of them is 0."""
        pieces, _ = cuts_of(rule, strategy.options, self.mesh)
        in_grads, out_grads = grads_of(graph, node)
        seconds = self._compute(graph, node, rule, strategy, pieces, in_grads, any(out_grads))
        return (seconds, 0.0) if self.known(graph, node, rule, strategy) is not None else (0.0, seconds)

    def _inside(
        self, rule: Rule, pieces: Mapping[str, int], axes: Mapping[str, tuple[str, ...]], compute_seconds: float,
        forward_seconds: Callable[[], float] | None,
    ) -> float:  # fmt: skip
        """Seconds of an op that its lowering's collectives take beside compute.

        Args:
            compute_seconds: of all passes that are priced.
            forward_seconds: of these, the forward's; None where there is no backward.
        """
        sizes, blocking, beside = dict(self.mesh), 0.0, {False: 0.0, True: 0.0}
        for comm, axis, n_bytes in collectives_inside(rule, pieces, axes, forward_seconds is not None):
            seconds = self.axes[axis].seconds(comm.kind, n_bytes) * comm.times(sizes[axis])
            if comm.overlaps:
                beside[comm.backward] += seconds
            else:
                blocking += seconds
        if not any(beside.values()):
            return blocking
        forward = compute_seconds if forward_seconds is None else forward_seconds()
        return blocking + max(0.0, beside[False] - forward) + max(0.0, beside[True] - (compute_seconds - forward))

    def local_bytes(self, spec: Spec, state: State) -> int:
        """Bytes of a tensor on one rank."""
        return prod(local_shape(spec.shape, state, self.mesh)) * spec.item_bytes


def _gemm(rule: Rule, pieces: Mapping[str, int]) -> tuple[int, int, int] | None:
    """``(m, n, k)`` of a contraction on one rank: k is summed, n comes from the second input alone, m is the rest."""
    if len(rule.inputs) < 2:
        return None
    first = {f for d in rule.inputs[0] for f in d}
    second = {f for d in rule.inputs[1] for f in d}
    out = {f for d in rule.outputs[0] for f in d}

    def size(factors: set[str]) -> int:
        return prod(rule.size_at(f, pieces) for f in factors)

    return size(out - (second - first)), size((second & out) - first), size((first | second) - out)


def key_of(graph: Graph, node: Node, rule: Rule, strategy: Strategy, mesh: Mesh) -> str | None:
    """By what a profile knows an op under a strategy; None for one that communicates inside."""
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
    """The :class:`Pricer` of a mesh on a cluster; on its first devices, or on those given, in row-major order."""
    return _pricer(cluster, mesh, None if devices is None else tuple(devices))


@lru_cache(maxsize=4096)
def _pricer(cluster: Cluster, mesh: Mesh, devices: tuple[int, ...] | None) -> Pricer:
    from cost_models import mesh_axes

    axes = mesh_axes(cluster, dict(mesh), devices)
    n = n_devices(mesh)
    numbers = range(n) if devices is None else devices
    slowest = min(map(cluster.device, numbers), key=lambda d: (max(d.peak_flops.values()), d.memory_bytes_per_second))
    return Pricer(mesh, axes, slowest, 0.0 if cluster.abstract else 25 * 2**20, cluster.measured)
