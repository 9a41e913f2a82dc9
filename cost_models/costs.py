"""The interface of cost sources, and the choice of the one that prices a cluster.

The planner, the simulator of pipelines and the check of plans ask a :class:`Costs` for four things and know nothing
else of hardware:

    op            an operator on one device: forward and backward, the backward in halves
    collective    on every axis of a mesh; a copy where a tensor is resharded without one
    transfer      a message from one device to another
    once a step   executor, gradient accumulation and optimizer, in addition to operators

:mod:`cost_models.data_sheet_costs` answers from data sheets, :mod:`cost_models.measured` from a profile of ``autopar
profile``. Another source is a class with these methods and a function, marked with :func:`cost_source`, that returns it
for the clusters that it knows; nobody else asks which source it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from hardware_profiles import Cluster, Device


class OpWork(NamedTuple):
    """The work of one device for one operator.

    Attributes:
        kind: the kind in the cost model, one of ``OP_KINDS``.
        flops: FLOPs of the forward; a multiply-add counts as two.
        n_bytes: bytes that the forward reads and writes.
        dtype: the dtype of what is computed, such as ``bfloat16``.
        gemm: ``(m, n, k)`` of a contraction, if it is one; of attention queries, keys that a query sees, and the
            size of a head.
        differentiable: whether there is a backward.
        gradients: the number of factors of a contraction whose gradient the backward computes; 0 for other kinds.
        weight_gradients: how many of these are gradients of parameters.
        key: gives the name by which a profile knows the operator on these local shapes (see
            :func:`hardware_profiles.measurements.op_key`); None for one that communicates inside. To find it
            takes time.
        curve: what the cost model tells apart of a kind, one of ``OP_KINDS`` too, such as ``norm``; the kind itself
            if this is empty.
        backward_bytes: bytes that the backward reads and writes; for a contraction, those beside its products.
        row: elements of the last dim of what it reads.
        aligned: the inner sizes of a product are multiples of 16 bytes.
        joins: it runs in the kernel of the operator that made its input.
        scores_bytes: bytes of the scores in float32, for attention that fused kernels cannot compute; else 0.
    """

    kind: str
    flops: float
    n_bytes: float
    dtype: str
    gemm: tuple[int, int, int] | None
    differentiable: bool
    gradients: int
    weight_gradients: int
    key: Callable[[], str | None]
    curve: str = ""
    backward_bytes: float = 0.0
    row: int = 0
    aligned: bool = True
    joins: bool = False
    scores_bytes: float = 0.0


class OpSeconds(NamedTuple):
    """Seconds of one operator on one device.

    Attributes:
        forward: seconds of the forward.
        total: seconds of forward and backward; the forward alone without a backward.
        weights: the part of the backward that computes gradients of parameters, which may run later.
        split: what the backward takes more in two halves than whole.
        from_profile: whether this very operator was measured, not computed.
    """

    forward: float
    total: float
    weights: float = 0.0
    split: float = 0.0
    from_profile: bool = False


class StageWork(NamedTuple):
    """The work of a stage in addition to operators.

    Attributes:
        summed: ``(additions, bytes)`` of each tensor whose gradient arrives over several ways and is added up.
        parameters: ``(bytes as used, bytes as stored)`` on one rank of each parameter that has a gradient.
        n_ops: operators with a backward.
        microbatches: the number of them in a step.
        optimizer: its name, such as ``adamw``.
        cast_bytes: bytes that are read and written in a step to cast parameters to narrow copies.
        forward_only: there is no backward, and no optimizer.
        matrix_bytes: the part of the stored bytes that Muon steps on, where the optimizer is ``muon``.
        matrix_seconds: seconds of what Muon does to whole matrices, and of their way to their owners and back.
    """

    summed: Sequence[tuple[int, float]]
    parameters: Sequence[tuple[float, float]]
    n_ops: int
    microbatches: int
    optimizer: str
    cast_bytes: float = 0.0
    forward_only: bool = False
    matrix_bytes: float = 0.0
    matrix_seconds: float = 0.0


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on one stage (``step``: of a step) in addition to operators.

    Attributes:
        forward, backward: seconds of a microbatch, the backward whole.
        inputs, weights: seconds of the halves of a backward that is split.
        step: once a step.
        summed: for gradients that arrive over several ways: part of ``backward``, and of neither half.
    """

    forward: float
    backward: float
    inputs: float
    weights: float
    step: float
    summed: float


class Axis(Protocol):
    """The collectives along one axis of a mesh."""

    def seconds(self, kind: str, n_bytes: float) -> float:
        """Return the seconds of one collective; 0 on an axis of size 1. Unknown kinds raise ValueError.

        Bytes are counted as in :class:`cost_models.collective_cost.AxisCost`.
        """
        ...


class Costs(Protocol):
    """A cost source for one cluster. Devices are ranks of the cluster and always given."""

    @property
    def share_bounds(self) -> bool:
        """True if an n-th of an operator or of the batch takes at least an n-th of the seconds, a bound of searches."""

    @property
    def bucket_bytes(self) -> float:
        """Approximate size of the buckets that collectives of parameters share; 0 prices each on its own."""

    @property
    def provenance(self) -> Mapping[str, object]:
        """Date and machine (``date``, ``processor``) of the measurement; empty for a source that only computes."""

    @property
    def fuses(self) -> bool:
        """True if consecutive memory-bound operators are one kernel: work omits those bytes (:attr:`OpWork.joins`)."""

    def __hash__(self) -> int: ...

    def op(self, device: Device, work: OpWork) -> OpSeconds:
        """Return the seconds of one operator on one device."""
        ...

    def copy(self, device: Device, n_bytes: float, dtype: str) -> float:
        """Return the seconds of reading and writing ``n_bytes`` in all, where a reshard needs no collective."""
        ...

    def axes(self, shape: Mapping[str, int], devices: Sequence[int]) -> Mapping[str, Axis]:
        """Return the axes of a mesh of ``{name: size}`` on ``devices``, in row-major order.

        A mesh that does not fit the devices raises ValueError.
        """
        ...

    def transfer(self, source: int, target: int, n_bytes: float) -> float:
        """Return the seconds of one message between two devices."""
        ...

    def stage(self, work: Callable[[], StageWork]) -> StageSeconds | None:
        """Return the seconds of a stage in addition to operators; None for a source that knows nothing of it."""
        ...


Chooser = Callable[[Cluster], Costs | None]

_CHOOSERS: list[Chooser] = []


def cost_source(chooser: Chooser) -> Chooser:
    """Register a function that returns the costs of the clusters that it knows, and None for others.

    The last one registered is asked first.
    """
    _CHOOSERS.append(chooser)
    costs_of.cache_clear()
    return chooser


@lru_cache(maxsize=256)
def costs_of(cluster: Cluster) -> Costs:
    """Return the costs of a cluster: the one place where a source is chosen."""
    for chooser in reversed(_CHOOSERS):
        costs = chooser(cluster)
        if costs is not None:
            return costs
    raise ValueError(f"no cost source knows cluster {cluster.name}: mark one with cost_models.cost_source")
