"""The records of a hardware profile: devices, links, collective curves, clusters. Plain numbers in SI units.

Nothing here computes a price: `cost_models` does. Everything is frozen. Objects compare by identity, so that they can
key caches in constant time; load a profile once and pass it around.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import networkx as nx

from .errors import ProfileError
from .host_links import HostLink
from .measurements import Measured
from .software import OWN, Software, software_named

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
RATES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "float4", "int8")
"""Formats with a data-sheet rate; ``tf32`` is float32 on tensor cores."""
OP_KINDS = ("matmul", "conv", "attention", "pointwise")
"""Kinds for which every device has a curve."""
MOVING_KINDS = (
    "pointwise", "broadcast", "widen", "narrow", "reduce", "norm", "rms_norm", "batch_norm", "softmax", "loss",
    "lookup", "optimizer",
)  # fmt: skip
"""Kinds that are bound by memory bandwidth and may have curves of their own; `pointwise` stands for one that has none.

    broadcast   pointwise, with an input smaller than the output    softmax   along a dim that is not cut
    widen       a cast to a wider type                              loss      cross entropy and its like
    narrow      a cast to a narrower one                            lookup    rows read by number: embeddings, gathers
"""
CURVES = (*OP_KINDS, "matmul_float8", "attention_backward", *MOVING_KINDS[1:],
          *(f"{kind}_backward" for kind in MOVING_KINDS))  # fmt: skip
"""All curves that a device may have. Where `<kind>_backward` is there, that of `pointwise` for one that lacks its own,
backwards are priced by the bytes that they move, else by those of the forward."""


@dataclass(frozen=True)
class EfficiencyCurve:
    """The fraction of a data-sheet rate that an op reaches, growing with its size.

    With a gemm shape (m, n, k):  fraction * m n k / (((m+half_m)(n+half_n) + half_mn)(k+half_k))
    of rows of r elements:        fraction * r/(r+half_row) * w/(w+half_work), w in bytes
    without either:               fraction * w/(w+half_work), w in flops (bytes for kinds bound by memory)

    Attention counts as (queries, keys that a query sees, size of a head). `half_mn` is the output below which the
    device has idle cores. Time is proportional to the denominator: smooth, growing in every size, so that a part of an
    op is never slower than the whole.

    Attributes:
        bytes_per_flop: what cores move of a kind that is bound by memory, in bytes for each flop of the float32 peak: a
            limit beside the fraction of bandwidth, as faster memory on the same cores does not help; 0 for none.
        item_bytes: elements of fewer bytes take as long as elements of so many; 0 where bytes alone count.
        unaligned: the part of the rate that is left where the inner sizes of a product are no multiples of 16 bytes.
    """

    fraction: float
    half_m: float = 0.0
    half_n: float = 0.0
    half_k: float = 0.0
    half_mn: float = 0.0
    half_work: float = 0.0
    source: str = ""
    half_row: float = 0.0
    item_bytes: float = 0.0
    bytes_per_flop: float = 0.0
    unaligned: float = 1.0


@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator, or one process on a CPU.

    `peak_flops` maps a dtype name to dense flop/s; for GPUs `float32` is the rate *without* tensor cores and
    `tf32` the one with them. `launch_seconds` is what the host takes to launch an op. `efficiency` maps names of
    CURVES to curves; for MOVING_KINDS the rate is `memory_bytes_per_second`, for the others `peak_flops`. The
    optional `matmul_float8` stands in for `matmul` where 8-bit types are multiplied. `power_watts` is the board's
    limit; None if a data sheet does not say it. `kernel_seconds` is what a kernel takes at least, where the host
    launches ahead of the device: an op then takes the longer of launch and kernel. None if the processor that
    launches computes, too: both add up.

    `link` names the link into its domain: the `domain` devices that reach each other by it (8 behind the switches
    of a machine, 72 of an NVL72, 2 with a bridge; 1: none). `host_link` names the PCIe of its machines. `host` is the
    way to the memory of its host; None where it is not known or, as for a process on a CPU, is the device's own.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    peak_flops: Mapping[str, float]
    launch_seconds: float
    efficiency: Mapping[str, EfficiencyCurve]
    sources: Mapping[str, str] = field(default_factory=dict)
    power_watts: float | None = None
    kernel_seconds: float | None = None
    link: str = ""
    domain: int = 1
    host_link: str = ""
    host: HostLink | None = None


@dataclass(frozen=True)
class Link:
    """One direction of a wire: data-sheet bandwidth, latency, and the name of the curve it follows.

    ``sums``: its switches add up what machines send (SHARP), so that an all_reduce sends each byte once.
    """

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    curve: str
    source: str = ""
    sums: bool = False


@dataclass(frozen=True)
class CollectiveCurve:
    """One collective's behaviour over one kind of link, for n ranks (or nodes) in a ring.

    latency(n) = base_seconds + steps(n) * step_seconds
    rate(n)    = link bandwidth * fraction * (1 - ramp / n)
    seconds    = (latency^sharpness + (wire bytes / rate)^sharpness)^(1/sharpness)

    sharpness 1 is the plain alpha-beta model; below 1 the middle sizes are slower than alpha-beta, as
    measured.

    Of links between machines, over which the library has several algorithms:

    Attributes:
        inside_step_seconds: seconds of each of a ring's hops inside machines, if the ring leaves them: it then moves
            its chunks by another protocol than inside one machine; 0: such a hop takes that of the link inside.
        ring_step_seconds: seconds of an all_reduce in a ring, for each of its 2 (nodes - 1) hops between machines;
            ``step_seconds`` is then that of a level of a tree. 0: there are trees alone.
        tree_fraction: the share of the rings' rate that trees reach.
    """

    base_seconds: float
    step_seconds: float
    fraction: float
    ramp: float = 0.0
    sharpness: float = 1.0
    source: str = ""
    inside_step_seconds: float = 0.0
    ring_step_seconds: float = 0.0
    tree_fraction: float = 1.0


@dataclass(frozen=True)
class AbstractAxis:
    """One axis of an abstract mesh. Units are those of the paper it came from; `constants` by collective."""

    name: str
    size: int
    alpha: float
    beta: float
    constants: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices by rank and the directed graph that joins them.

    Graph nodes: the ranks 0..n-1 (int) and switches (str). Every edge carries a `link` (Link) for its direction.
    `node_of[rank]` is the machine of a rank; collectives go around inside a machine before they leave it.
    `curves[link.curve][collective]` prices traffic. `overlap` is False where collectives use the computing cores.
    `abstract` lists the axes of an abstract mesh; the graph then has no edges and compute is free. `measured` holds the
    tables of a profile file, where the cluster came from one. `software` is what trains on it.
    """

    name: str
    devices: tuple[Device, ...]
    graph: nx.DiGraph
    node_of: tuple[int, ...]
    curves: Mapping[str, Mapping[str, CollectiveCurve]]
    overlap: bool = True
    abstract: tuple[AbstractAxis, ...] = ()
    description: str = ""
    measured: Measured | None = None
    software: Software = field(default_factory=lambda: software_named(OWN))

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def n_nodes(self) -> int:
        """Number of machines."""
        return len(set(self.node_of))

    @property
    def is_profile(self) -> bool:
        """True for a profile file: a cluster on which operators were measured."""
        return self.measured is not None

    def device(self, rank: int) -> Device:
        """Return the device of a global rank; ValueError for a rank that the cluster does not have."""
        if not 0 <= rank < len(self.devices):
            raise ValueError(f"cluster {self.name}: no rank {rank}, it has ranks 0 to {len(self.devices) - 1}")
        return self.devices[rank]

    def only(self, ranks: Iterable[int]) -> Cluster:
        """Return some of the devices with the links between them, as a cluster of its own.

        Its rank 0 is the first of ``ranks``, and :func:`~hardware_profiles.load_cluster` finds it by its name.

        Raises:
            ProfileError: no rank, one that the cluster does not have or that is named twice, an abstract mesh, or
                devices that reach each other only through others.
        """
        kept = tuple(ranks)
        name = f"{self.name}{subset_suffix(kept)}"
        missing = sorted({rank for rank in kept if not 0 <= rank < self.n_devices})
        if missing:
            raise ProfileError(name, [f"there is no rank {missing[0]}, the cluster has 0 to {self.n_devices - 1}"])
        if not kept or len(set(kept)) < len(kept) or self.abstract:
            raise ProfileError(name, ["an abstract mesh has no devices to choose from" if self.abstract else
                                      "name each device once, and at least one"])  # fmt: skip
        switches = [node for node in self.graph if not isinstance(node, int)]
        graph = nx.relabel_nodes(self.graph.subgraph([*kept, *switches]), {rank: i for i, rank in enumerate(kept)})
        if any(not nx.has_path(graph, *pair) for i in range(1, len(kept)) for pair in ((0, i), (i, 0))):
            raise ProfileError(name, ["these devices reach each other only through devices that are left out"])
        nodes = list(dict.fromkeys(self.node_of[rank] for rank in kept))
        return replace(
            self, name=name, devices=tuple(self.devices[rank] for rank in kept), graph=nx.DiGraph(graph),
            node_of=tuple(nodes.index(self.node_of[rank]) for rank in kept),
        )  # fmt: skip

    def slowest(self, ranks: Iterable[int]) -> Device:
        """Return the slowest of some ranks' devices, for which the others wait when all do the same.

        It has the lowest peak rate, then the lowest memory bandwidth.
        """
        return min(map(self.device, ranks), key=speed_of)

    def describe(self) -> str:
        """Return a few lines for people: devices, machines, links."""
        kinds: dict[str, int] = {}
        for device in self.devices:
            kinds[device.name] = kinds.get(device.name, 0) + 1
        lines = [f"{self.name}: {self.n_devices} devices in {self.n_nodes} node{'s' * (self.n_nodes > 1)}"]
        if self.description:
            lines.append(f"  {self.description}")
        for axis in self.abstract:
            lines.append(f"  abstract axis {axis.name}: {axis.size} devices, alpha {axis.alpha:g}, beta {axis.beta:g}")
        for name, count in kinds.items():
            device = next(d for d in self.devices if d.name == name)
            rate = max(device.peak_flops.items(), key=lambda item: (item[0] == "bfloat16", item[1]))
            lines.append(
                f"  {count} x {name}: {device.memory_bytes / 1e9:.4g} GB at "
                f"{device.memory_bytes_per_second / 1e9:.4g} GB/s, {rate[1] / 1e12:.4g} TFLOP/s {rate[0]}"
            )
            if (host := device.host) is not None:
                there, back = host.to_host_bytes_per_second / 1e9, host.to_device_bytes_per_second / 1e9
                lines.append(
                    f"    host: {there:.4g} GB/s to it, {back:.4g} back, {host.memory_bytes / 1e9:.4g} GB"
                    + f" for {host.memory_devices} devices" * (host.memory_devices > 1)
                )
        links: dict[tuple[str, float, float], int] = {}
        for _, _, link in self.graph.edges(data="link"):
            key = (link.name, link.bandwidth_bytes_per_second, link.latency_seconds)
            links[key] = links.get(key, 0) + 1
        for (name, bandwidth, latency), count in links.items():
            lines.append(f"  {count} x {name}: {bandwidth / 1e9:.4g} GB/s per direction, {latency * 1e6:.3g} us")
        if self.measured is not None:
            said, n_ops = self.measured.provenance, len(self.measured.ops)
            lines.append(f"  measured {said['date']} on {said['processor']}: {n_ops} ops of {said['model']}")
        return "\n".join(lines)


def speed_of(device: Device) -> tuple[float, float]:
    """Return a sort key of a device's speed: the highest peak rate, then the memory bandwidth."""
    return max(device.peak_flops.values()), device.memory_bytes_per_second


def subset_suffix(ranks: Iterable[int]) -> str:
    """Return the end of the name of a cluster of some devices of another: ``@0-3,6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "@" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
