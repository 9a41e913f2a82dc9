"""Costs from data sheets: a roofline for operators, latency and bandwidth for collectives.

Backward of an operator: every differentiable factor of a contraction costs one more contraction of the same size, and
attention 2.5 forwards (recomputed scores, four products), by the curve of the backward if there is one. Everything
else moves the bytes that its backward reads and writes; on devices without a curve for that, those of the forward once
more.

The software that trains on the cluster multiplies all seconds by its factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hardware_profiles import Cluster, Device, Software

from .collective_cost import AxisCost
from .costs import OpSeconds, OpWork, StageSeconds, StageWork, cost_source
from .mesh_links import mesh_axes
from .operator_cost import COMPUTE_KINDS, op_seconds
from .optimizer_bytes import BESIDE_MUON, MUON

ATTENTION_BACKWARD = 2.5
"""Forwards of attention that its backward costs."""
SCORES_PASSES, SCORES_PASSES_BACK = 12, 12
"""How often attention in torch's plain operators reads or writes its scores, forward and backward: products, the mask's
addition, softmax, and what keeps rows of nothing but -inf from being no numbers."""
BUCKET_BYTES = 25 * 2**20
"""The bucket in which torch's DistributedDataParallel reduces gradients, its default."""
STEP_PASSES = {"adamw": 7, "adam": 7, "adamw8bit": 4, "sgd": 3, "sgd_momentum": 5, "muon": 12}
"""How often a fused optimizer's step reads or writes as many bytes as the parameters have: parameter, gradient and each
state are read, all but the gradient written. Muon's elementwise part is none: two interpolations, a cast, the decay and
the update follow each other (torch.optim._muon)."""
ADD_PASSES = 3
"""Passes of an addition: two tensors read, one written."""


@dataclass(frozen=True, eq=False)
class Roofline:
    """Costs by the numbers of a cluster's devices and links (:class:`cost_models.costs.Costs`).

    ``trainer`` is the software that trains; None for the cluster's own.
    """

    cluster: Cluster
    trainer: Software | None = None
    _wires: dict[tuple[int, int], AxisCost] = field(default_factory=dict, init=False, repr=False)
    _devices: dict[Device, Device] = field(default_factory=dict, init=False, repr=False)

    share_bounds = True

    @cached_property
    def software(self) -> Software:
        """The software that trains on the cluster."""
        return self.cluster.software if self.trainer is None else self.trainer

    @property
    def bucket_bytes(self) -> float:
        """Bucket size; none for an abstract mesh, whose prices are those of the papers that they come from."""
        return 0.0 if self.cluster.abstract else BUCKET_BYTES

    @property
    def provenance(self) -> Mapping[str, object]:
        """Empty: nothing was measured."""
        return {}

    @property
    def fuses(self) -> bool:
        """True if the software fuses memory-bound operators."""
        return self.software.fused

    def op(self, device: Device, work: OpWork) -> OpSeconds:
        """Return the seconds of an operator by the roofline of the device."""
        factor, device = self.software.factor, self._as_launched(device)
        if work.scores_bytes and _knows_backwards(device):
            return self._unfused_attention(device, work)
        kind, gemm = work.curve or work.kind, work.gemm
        forward = factor * op_seconds(
            device, kind, work.flops, work.n_bytes, work.dtype, gemm, row=work.row, aligned=work.aligned,
            joins=work.joins,
        )  # fmt: skip
        if not work.differentiable:
            return OpSeconds(forward, forward)
        if kind not in COMPUTE_KINDS:
            return OpSeconds(forward, forward + self._moving_backward(device, kind, work, forward))
        passes, times = (ATTENTION_BACKWARD, 1) if kind == "attention" else (1.0, work.gradients)
        backward = forward * passes
        if f"{kind}_backward" in device.efficiency:
            backward = factor * op_seconds(
                device, kind, passes * work.flops, passes * work.n_bytes, work.dtype, gemm, aligned=work.aligned,
                backward=True,
            )  # fmt: skip
        weights, total = backward * work.weight_gradients, forward + backward * times
        if work.backward_bytes and _knows_backwards(device):
            more = factor * op_seconds(device, "reduce", 0.0, work.backward_bytes, work.dtype, backward=True)
            weights, total = weights + more, total + more
        return OpSeconds(forward, total, weights)

    def _unfused_attention(self, device: Device, work: OpWork) -> OpSeconds:
        """Return the seconds of attention with scores in memory: products in float32, and passes over the scores."""
        products = op_seconds(device, "matmul", work.flops, 0.0, "float32", work.gemm)

        def passes(times: int) -> float:
            return op_seconds(device, "pointwise", 0.0, times * work.scores_bytes, "float32", joins=True)

        forward = self.software.factor * (products + passes(SCORES_PASSES))
        if not work.differentiable:
            return OpSeconds(forward, forward)
        return OpSeconds(forward, forward + self.software.factor * (2 * products + passes(SCORES_PASSES_BACK)))

    def _moving_backward(self, device: Device, kind: str, work: OpWork, forward: float) -> float:
        """Return the seconds of the backward of a memory-bound operator."""
        if kind == "none" or not _knows_backwards(device):
            return forward
        if not work.backward_bytes:
            return 0.0
        return self.software.factor * op_seconds(
            device, kind, work.flops, work.backward_bytes, work.dtype, row=work.row, backward=True, joins=work.joins
        )

    def _as_launched(self, device: Device) -> Device:
        """Return the device with the launch seconds of the software's host, where known and launched ahead."""
        seconds = self.software.launch_seconds
        if seconds is None or device.kernel_seconds is None:
            return device
        known = self._devices.get(device)
        if known is None:
            known = self._devices[device] = replace(device, launch_seconds=seconds)
        return known

    @cached_property
    def _without_launches(self) -> Device:
        """The slowest device, for kernels that take many tensors at once."""
        return replace(self.cluster.slowest(range(self.cluster.n_devices)), launch_seconds=0.0, kernel_seconds=0.0)

    def copy(self, device: Device, n_bytes: float, dtype: str) -> float:
        """Return the seconds of a copy by the device's memory bandwidth."""
        return self.software.factor * op_seconds(self._as_launched(device), "copy", 0.0, n_bytes, dtype)

    def axes(self, shape: Mapping[str, int], devices: Sequence[int]) -> Mapping[str, AxisCost]:
        """Return the axes of a mesh with the links that its collectives cross."""
        axes = mesh_axes(self.cluster, shape, devices)
        factor = self.software.factor
        return axes if factor == 1.0 else {name: axis.times(factor) for name, axis in axes.items()}

    def transfer(self, source: int, target: int, n_bytes: float) -> float:
        """Return the seconds of a message by the links of its route."""
        if (source, target) not in self._wires:
            self._wires[source, target] = self.axes({"pair": 2}, [source, target])["pair"]
        return self._wires[source, target].seconds("send_recv", n_bytes)

    def stage(self, work: Callable[[], StageWork]) -> StageSeconds | None:
        """Return the seconds of the optimizer, of gradient accumulation and of casts of weights.

        They follow from the bytes moved on the slowest device; None on devices of which only the four curves are known.
        """
        device = self._without_launches
        if self.cluster.abstract or not _knows_backwards(device):
            return None
        stage_work, factor = work(), self.software.factor

        def seconds(kind: str, n_bytes: float) -> float:
            return factor * op_seconds(device, kind, 0.0, n_bytes, "float32")

        summed = sum(times * seconds("pointwise", ADD_PASSES * n_bytes) for times, n_bytes in stage_work.summed)
        used, stored = (sum(sizes[i] for sizes in stage_work.parameters) for i in (0, 1))
        later = (stage_work.microbatches - 1) / stage_work.microbatches * seconds("pointwise", ADD_PASSES * used)
        matrices = stage_work.matrix_bytes
        name = BESIDE_MUON if stage_work.optimizer == MUON else stage_work.optimizer
        passes = STEP_PASSES.get(name, STEP_PASSES["adamw"]) * (stored - matrices)
        step = seconds("optimizer", passes + STEP_PASSES[MUON] * matrices) + stage_work.matrix_seconds
        step += seconds("pointwise", stage_work.cast_bytes) if stage_work.cast_bytes else 0.0
        return StageSeconds(0.0, summed + later, 0.0, later, step, summed)


def _knows_backwards(device: Device) -> bool:
    """Return True if the device has curves for backwards."""
    return "pointwise_backward" in device.efficiency


cost_source(Roofline)
