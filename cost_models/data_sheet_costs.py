"""Costs from data sheets: a roofline for operators, latency and bandwidth for collectives.

Backward of an operator: every differentiable factor of a contraction costs one more contraction of the same size;
attention costs 2.5 forwards (recomputed scores, four products); everything else moves its bytes once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hardware_profiles import Cluster, Device

from .collective_cost import AxisCost
from .costs import OpSeconds, OpWork, StageSeconds, StageWork, cost_source
from .mesh_links import mesh_axes
from .operator_cost import op_seconds

ATTENTION_PASSES = 3.5
"""Forwards of attention that its forward and backward cost."""
MOVED_TWICE = 2
"""The same of operators that are bound by memory: the backward moves the bytes of the forward once more."""
BUCKET_BYTES = 25 * 2**20
"""The bucket in which torch's DistributedDataParallel reduces gradients, its default."""


@dataclass(frozen=True, eq=False)
class Roofline:
    """What the numbers of a cluster's devices and links give (:class:`cost_models.costs.Costs`)."""

    cluster: Cluster
    _wires: dict[tuple[int, int], AxisCost] = field(default_factory=dict, init=False, repr=False)

    share_bounds = True

    @property
    def bucket_bytes(self) -> float:
        """Prices of an abstract mesh are those of the papers that they come from, without buckets."""
        return 0.0 if self.cluster.abstract else BUCKET_BYTES

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Nothing was measured."""
        return {}

    def op(self, device: Device, work: OpWork) -> OpSeconds:
        """By the roofline of the device."""
        forward = op_seconds(device, work.kind, work.flops, work.n_bytes, work.dtype, work.gemm)
        if not work.differentiable:
            return OpSeconds(forward, forward)
        if work.kind in ("matmul", "conv"):
            return OpSeconds(forward, forward * (1 + work.gradients), forward * work.weight_gradients)
        return OpSeconds(forward, forward * (ATTENTION_PASSES if work.kind == "attention" else MOVED_TWICE))

    def copy(self, device: Device, n_bytes: float, dtype: str) -> float:
        """By the device's memory bandwidth."""
        return op_seconds(device, "copy", 0.0, n_bytes, dtype)

    def axes(self, shape: Mapping[str, int], devices: Sequence[int]) -> Mapping[str, AxisCost]:
        """By the links that the collectives cross."""
        return mesh_axes(self.cluster, shape, devices)

    def transfer(self, source: int, target: int, n_bytes: float) -> float:
        """By the links of the route."""
        if (source, target) not in self._wires:
            self._wires[source, target] = mesh_axes(self.cluster, {"pair": 2}, [source, target])["pair"]
        return self._wires[source, target].seconds("send_recv", n_bytes)

    def stage(self, work: Callable[[], StageWork]) -> StageSeconds | None:
        """No data sheet says it."""
        return None


cost_source(Roofline)

__all__ = ["BUCKET_BYTES", "Roofline"]
