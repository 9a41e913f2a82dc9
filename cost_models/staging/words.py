"""The words of staging: what a chain of blocks costs on parts of a cluster, and the stages that come out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

RECOMPUTE = ("never", "stage", "blocks")
"""What may be recomputed: nothing; all blocks of a stage or none; any number of a stage's blocks."""


@dataclass(frozen=True, order=True)
class Submesh:
    """A kind of place for a stage: `n_devices` of one device type, used as `shape` (any label: '2x4', 'dp=8 zero')."""

    device_type: str
    n_devices: int
    shape: str = ""

    def __str__(self) -> str:
        return f"{self.n_devices} x {self.device_type}" + (f" ({self.shape})" if self.shape else "")


@dataclass(frozen=True)
class Pool:
    """All devices of one type.

    Attributes:
        device_type: name.
        node_sizes: devices of each node that holds this type; nodes may be unequal.
        memory_bytes: what a stage may fill of one device.
    """

    device_type: str
    node_sizes: tuple[int, ...]
    memory_bytes: float

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return sum(self.node_sizes)


@dataclass(frozen=True)
class StageCost:
    """A run of blocks on one submesh, for one microbatch unless it says otherwise; bytes are of one device.

    Attributes:
        forward_seconds, backward_seconds: with all communication inside the stage.
        step_seconds: once a step, after the stage's last backward: gradient reductions, gathers, the optimizer.
        static_bytes: parameters, gradients, optimizer state, temporaries: whatever does not grow with microbatches.
        activation_bytes: kept from a microbatch's forward to its backward.
        recomputed_bytes: the same when every block is recomputed; None where recomputing is impossible.
        recompute_seconds: added to the backward when every block is recomputed. With q of n blocks recomputed both
            are taken in proportion.
    """

    forward_seconds: float
    backward_seconds: float
    step_seconds: float = 0.0
    static_bytes: float = 0.0
    activation_bytes: float = 0.0
    recomputed_bytes: float | None = None
    recompute_seconds: float = 0.0

    def kept_bytes(self, n_recomputed: int, n_blocks: int) -> float:
        """Return the activation bytes of one microbatch with `n_recomputed` of the stage's `n_blocks` recomputed."""
        least = self.activation_bytes if self.recomputed_bytes is None else self.recomputed_bytes
        return self.activation_bytes - n_recomputed * (self.activation_bytes - least) / n_blocks

    def needed_bytes(self, n_recomputed: int, n_blocks: int, in_flight: float) -> float:
        """Return the bytes of one device, with `in_flight` microbatches between forward and backward."""
        return self.static_bytes + in_flight * self.kept_bytes(n_recomputed, n_blocks)

    def extra_seconds(self, n_recomputed: int, n_blocks: int) -> float:
        """Return the seconds that recomputing adds to a backward."""
        return n_recomputed * self.recompute_seconds / n_blocks


Cost = Callable[[int, int, Submesh], StageCost | None]
"""(first block, last block, submesh) -> cost, or None if the blocks cannot run there."""
Transfer = Callable[[int, Submesh, Submesh], float]
"""(first block after the cut, from, to) -> seconds of one microbatch's tensors; its gradients take as long back."""


def no_transfer(_cut: int, _source: Submesh, _target: Submesh) -> float:
    """Return 0: transfers between stages are free."""
    return 0.0


def _itself(submesh: Submesh) -> Hashable:
    return submesh


@dataclass(frozen=True)
class StagingProblem:
    """A chain of `n_blocks` blocks to be cut into stages over the pools of a cluster.

    Attributes:
        n_blocks: length of the chain.
        pools: the devices, one entry a type.
        submeshes: the places that a stage may have, see `alpa_sizes`.
        cost: the cost of a stage. Asked once for every distinct run of block classes on every submesh.
        transfer: over a cut. Asked once for every distinct (class before, class after) and pair of places.
        classes: one label a block; runs of equal labels share their cost. None: all blocks differ.
        place: two submeshes with the same place are the same to `transfer`; fewer places, faster search.
        overlap: transfers run along with computation: they delay a microbatch and limit its rate like a stage of their
            own. Otherwise the earlier stage also waits for them, both ways.
        all_devices: every device must belong to a stage; otherwise some may stay idle.
        recompute: one of RECOMPUTE.
        max_stages: the most stages; None: one for every block.
    """

    n_blocks: int
    pools: tuple[Pool, ...]
    submeshes: tuple[Submesh, ...]
    cost: Cost
    transfer: Transfer = no_transfer
    classes: Sequence[Hashable] | None = None
    place: Callable[[Submesh], Hashable] = _itself
    overlap: bool = True
    all_devices: bool = False
    recompute: str = "stage"
    max_stages: int | None = None

    def __post_init__(self) -> None:
        wrong = []
        if self.n_blocks < 1:
            wrong.append(f"{self.n_blocks} blocks: at least 1 is needed")
        if self.classes is not None and len(self.classes) != self.n_blocks:
            wrong.append(f"{len(self.classes)} classes for {self.n_blocks} blocks")
        if self.recompute not in RECOMPUTE:
            wrong.append(f"recompute is '{self.recompute}'; use {', '.join(RECOMPUTE)}")
        if self.max_stages is not None and self.max_stages < 1:
            wrong.append(f"at most {self.max_stages} stages: at least 1 is needed")
        sizes = self.devices
        if len(sizes) != len(self.pools):
            wrong.append("two pools of one device type; join them")
        if not self.submeshes:
            wrong.append("no submeshes")
        for s in self.submeshes:
            if s.device_type not in sizes:
                wrong.append(f"submesh {s} is of no pool; pools: {', '.join(sizes)}")
            elif not 1 <= s.n_devices <= sizes[s.device_type]:
                wrong.append(f"submesh {s} does not fit {sizes[s.device_type]} devices")
        if len(set(self.submeshes)) != len(self.submeshes):
            wrong.append("a submesh is listed twice")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def devices(self) -> Mapping[str, int]:
        """Devices of each type."""
        return {p.device_type: p.n_devices for p in self.pools}

    @property
    def memory_bytes(self) -> Mapping[str, float]:
        """Memory of one device of each type."""
        return {p.device_type: p.memory_bytes for p in self.pools}

    @property
    def stage_limit(self) -> int:
        """The most stages there can be."""
        limit = min(self.n_blocks, sum(self.devices.values()))
        return limit if self.max_stages is None else min(limit, self.max_stages)


@dataclass(frozen=True)
class StageChoice:
    """One stage as chosen: blocks first..last (both included) on a submesh, `n_recomputed` of them recomputed."""

    first: int
    last: int
    submesh: Submesh
    n_recomputed: int = 0


@dataclass(frozen=True)
class StageEstimate:
    """A chosen stage with its share of the step.

    `seconds` is the time that one microbatch occupies it (forward, backward, recomputing, transfers that do not
    overlap); `needed_bytes` and `memory_bytes` of one device.
    """

    choice: StageChoice
    seconds: float
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    in_flight: float
    needed_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class StagingEstimate:
    """A cut with the estimate of its step.

    `lower_bound_seconds` is of all cuts that the search looked for: equal to the best candidate's `seconds` when it
    is proved optimal.
    """

    schedule: str
    n_microbatches: int
    stages: tuple[StageEstimate, ...]
    seconds: float
    lower_bound_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        head = f"{self.seconds:.6g} s a step: {len(self.stages)} stages, {self.n_microbatches} microbatches, "
        rows = [
            f"  blocks {s.choice.first}-{s.choice.last} on {s.choice.submesh}: {s.seconds:.4g} s a microbatch, "
            f"{s.needed_bytes / 1e9:.3g} of {s.memory_bytes / 1e9:.3g} GB"
            + (f", {s.choice.n_recomputed} blocks recomputed" if s.choice.n_recomputed else "")
            for s in self.stages
        ]
        return "\n".join([head + self.schedule, *rows])


class NothingFits(ValueError):
    """No cut is possible.

    `excess_bytes` is what the worst device of the nearest attempt lacks; 0 where memory is not the reason.
    """

    def __init__(self, message: str, excess_bytes: float = 0.0) -> None:
        super().__init__(message)
        self.excess_bytes = excess_bytes
