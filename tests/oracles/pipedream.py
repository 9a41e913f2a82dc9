"""PipeDream's partitioning (Narayanan et al., SOSP 2019, section 3.1) on flat links: replicated stages, no drain.

A stage that holds nodes [i, j) of a profile on r replicas takes, per minibatch,

    T = (compute + 4 (r - 1) / r * weight bytes / bandwidth) / r

seconds: each replica computes every r-th minibatch and then all-reduces its weights (a ring moves 2 (r - 1) / r of
the bytes in each direction, and the published optimizer counts both). The slowest stage sets the pace. Tensors
between stages overlap with computation and are not counted, as in the published optimizer's default; with
`count_transfers` the links join the stages: 2 * bytes / (bandwidth * replicas), there and back, on each side of a cut.

Nodes are in topological order, and a cut may be only where the nodes before it are all that some antichain depends
on: those whose ancestors they are. On a chain with short by-passes (VGG-16 has one) these are the cuts between nodes;
positions that split parallel branches are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A layer of a profile: seconds of one minibatch forward and backward, bytes of its output and its weights."""

    name: str
    what: str
    compute_seconds: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Profile:
    """Nodes in topological order, and edges between their positions."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    def cuts(self) -> tuple[int, ...]:
        """Positions p where a cut before node p severs no pair of parallel branches, and 0 and the end.

        All edges that cross it must leave from one node: then what is handed over is that node's output.
        """
        found = [0]
        for p in range(1, len(self.nodes)):
            if len({a for a, b in self.edges if a < p <= b}) <= 1:
                found.append(p)
        return (*found, len(self.nodes))

    def stage_edge_bytes(self, p: int) -> float:
        """Outputs of nodes before p that nodes from p on need."""
        return sum(self.nodes[a].activation_bytes for a in {a for a, b in self.edges if a < p <= b})


@dataclass(frozen=True)
class Replicated:
    """Nodes [first, end) on `replicas` devices."""

    first: int
    end: int
    replicas: int
    seconds: float


@dataclass(frozen=True)
class Partition:
    """The stages and the seconds of a minibatch in the steady state; beside it, one device and pure data parallel."""

    stages: tuple[Replicated, ...]
    seconds: float
    one_device_seconds: float
    data_parallel_seconds: float


def parse_profile(text: str) -> Profile:
    """A PipeDream profile. Times in it are in ms, sizes in bytes. Input nodes are dropped: they belong to no stage.

    Raises ValueError for a line that it cannot read, and for a cycle.
    """
    nodes: dict[str, Node] = {}
    pairs: list[tuple[str, str]] = []
    dropped = set()
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.strip().split(" -- ")
        if not line.strip() or line.startswith("#"):
            continue
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
            continue
        values = dict(re.findall(r"(\w+)=([0-9.eE+-]+)", parts[2])) if len(parts) == 3 else {}
        try:
            milliseconds = float(values["forward_compute_time"]) + float(values["backward_compute_time"])
            node = Node(parts[0], parts[1], milliseconds / 1e3, float(values["activation_size"]),
                        float(values["parameter_size"]))  # fmt: skip
        except (KeyError, ValueError):
            raise ValueError(f"line {number} is neither a node nor an edge of a PipeDream profile: {line!r}") from None
        if node.what.startswith("Input"):
            dropped.add(node.name)
        else:
            nodes[node.name] = node
    unknown = {n for pair in pairs for n in pair} - set(nodes) - dropped
    if unknown:
        raise ValueError(f"edges name nodes that the profile lacks: {', '.join(sorted(unknown))}")
    pairs = [(a, b) for a, b in pairs if a in nodes and b in nodes]
    order = _topological(list(nodes), pairs)
    position = {name: i for i, name in enumerate(order)}
    edges = sorted((position[a], position[b]) for a, b in pairs)
    return Profile(tuple(nodes[name] for name in order), tuple(edges))


def _topological(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Among nodes that are ready, the one with the least number in its name first: the order of the profiled model."""

    def number(name: str) -> tuple[int, str]:
        digits = re.sub(r"\D", "", name)
        return int(digits) if digits else 0, name

    before = {name: {a for a, b in pairs if b == name} for name in names}
    order: list[str] = []
    while before:
        ready = [name for name, needs in before.items() if not needs]
        if not ready:
            raise ValueError(f"the profile has a cycle through {', '.join(sorted(before, key=number))}")
        chosen = min(ready, key=number)
        order.append(chosen)
        del before[chosen]
        for needs in before.values():
            needs.discard(chosen)
    return order


def stage_seconds(profile: Profile, first: int, end: int, replicas: int, bandwidth_bytes_per_second: float) -> float:
    """Per minibatch, of nodes [first, end) on `replicas` devices: T above."""
    compute = sum(n.compute_seconds for n in profile.nodes[first:end])
    weights = sum(n.parameter_bytes for n in profile.nodes[first:end])
    synchronize = 4 * (replicas - 1) * weights / (replicas * bandwidth_bytes_per_second)
    return (compute + synchronize) / replicas


def partition(
    profile: Profile, n_devices: int, bandwidth_bytes_per_second: float, *, count_transfers: bool = False
) -> Partition:
    """The stages whose slowest is fastest, on all devices; of equal ones, that with the fewest stages.

    Raises ValueError for fewer than one device and for no bandwidth.
    """
    if n_devices < 1 or not bandwidth_bytes_per_second > 0:
        raise ValueError(f"{n_devices} devices, {bandwidth_bytes_per_second:g} bytes/s: both must be positive")
    cuts = profile.cuts()
    bandwidth = bandwidth_bytes_per_second

    def seconds(a: int, b: int, r: int) -> float:
        own = stage_seconds(profile, cuts[a], cuts[b], r, bandwidth)
        if count_transfers:
            for c in {a, b} - {0, len(cuts) - 1}:
                own = max(own, 2 * profile.stage_edge_bytes(cuts[c]) / (bandwidth * r))
        return own

    # best[j][m]: nodes before cut j on m devices: (slowest, stages, cut before the last stage, its replicas)
    best: list[dict[int, tuple[float, int, int, int]]] = [{0: (0.0, 0, 0, 0)}]
    for j in range(1, len(cuts)):
        row: dict[int, tuple[float, int, int, int]] = {}
        for i in range(j):
            for r in range(1, n_devices + 1):
                own = seconds(i, j, r)
                for m, (slowest, count, _, _) in best[i].items():
                    found = max(slowest, own), count + 1, i, r
                    if m + r <= n_devices and (m + r not in row or found < row[m + r]):
                        row[m + r] = found
        best.append(row)
    stages: list[Replicated] = []
    j, m = len(cuts) - 1, n_devices
    if m not in best[j]:
        raise AssertionError("one stage on all devices is always a way")
    while j:
        _, _, i, r = best[j][m]
        stages.append(Replicated(cuts[i], cuts[j], r, seconds(i, j, r)))
        j, m = i, m - r
    stages.reverse()
    n = len(profile.nodes)
    return Partition(
        tuple(stages), max(s.seconds for s in stages), stage_seconds(profile, 0, n, 1, bandwidth),
        stage_seconds(profile, 0, n, n_devices, bandwidth),
    )  # fmt: skip
