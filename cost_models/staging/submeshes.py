"""The places that a stage may have in a cluster, and which devices they are in the end.

Alpa's rule (Zheng et al., OSDI 2022, section 5.2): a stage has 1, 2, 4, .. devices of one node, or whole nodes. It
keeps every combination packable when nodes are alike and hold a power of two. `any_sizes` leaves nothing out, for
small clusters. Neither assumes powers of two: a node of 6 offers 1, 2, 4, 6, and nodes of 8 and 7 offer 7, 8 and 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hardware_profiles import Cluster

from .words import Pool, Submesh

SMALL = 16
"""Devices of a type up to which any count is a size."""
MANY_NODES = 16
"""Nodes of a type from which whole nodes come in powers of two times and in divisors of their number."""


def pools_of(cluster: Cluster, memory_fraction: float) -> tuple[Pool, ...]:
    """Return one pool for every device type of a cluster; stages may fill `memory_fraction` of a device's memory."""
    nodes: dict[str, dict[int, int]] = {}
    memory: dict[str, float] = {}
    for device, node in zip(cluster.devices, cluster.node_of, strict=True):
        by_node = nodes.setdefault(device.name, {})
        by_node[node] = by_node.get(node, 0) + 1
        memory[device.name] = device.memory_bytes * memory_fraction
    return tuple(Pool(name, tuple(by_node.values()), memory[name]) for name, by_node in nodes.items())


def any_sizes(pool: Pool) -> tuple[int, ...]:
    """Return every count."""
    return tuple(range(1, pool.n_devices + 1))


def alpa_sizes(pool: Pool) -> tuple[int, ...]:
    """Return powers of two within a node, nodes, and runs of nodes; fewer runs of many alike nodes, see MANY_NODES."""
    sizes = set(pool.node_sizes)
    for size in set(pool.node_sizes):
        sizes |= {1 << i for i in range(size.bit_length()) if 1 << i <= size}
    n = len(pool.node_sizes)
    if n >= MANY_NODES and len(set(pool.node_sizes)) == 1:
        counts = {1 << i for i in range(n.bit_length())} | {c for c in range(1, n + 1) if n % c == 0}
        sizes |= {c * pool.node_sizes[0] for c in counts}
    else:
        for i in range(n):
            total = 0
            for size in pool.node_sizes[i:]:
                total += size
                sizes.add(total)
    return tuple(sorted(sizes))


def sizes(pool: Pool) -> tuple[int, ...]:
    """Return the default: any count in a small pool, else Alpa's."""
    return any_sizes(pool) if pool.n_devices <= SMALL else alpa_sizes(pool)


def submeshes(
    pools: Iterable[Pool], shapes: Callable[[int], Sequence[str]] = lambda _: ("",),
    rule: Callable[[Pool], Sequence[int]] = sizes,
) -> tuple[Submesh, ...]:  # fmt: skip
    """Return every size of `rule` in every shape that `shapes` gives for it."""
    return tuple(Submesh(p.device_type, n, shape) for p in pools for n in rule(p) for shape in shapes(n))


def place(pools: Sequence[Pool], stages: Sequence[Submesh]) -> list[tuple[int, ...]] | None:
    """Return the device numbers of each stage, counted within its pool node after node; None if they do not pack.

    Stages that do not fill a node stay inside one; larger ones take whole nodes and, where their size needs it, a
    part of one more. Stages that follow each other stand as near as that allows.
    """
    devices: list[tuple[int, ...]] = [()] * len(stages)
    for pool in pools:
        starts = [sum(pool.node_sizes[:i]) for i in range(len(pool.node_sizes))]
        free = [list(range(a, a + size)) for a, size in zip(starts, pool.node_sizes)]
        of_pool = [i for i, s in enumerate(stages) if s.device_type == pool.device_type]
        # The largest first: what is left over from whole nodes is then filled by the small ones.
        for i in sorted(of_pool, key=lambda i: -stages[i].n_devices):
            taken = _take(free, pool.node_sizes, stages[i].n_devices)
            if taken is None:
                return None
            devices[i] = taken
    return devices


def _take(free: list[list[int]], node_sizes: Sequence[int], n: int) -> tuple[int, ...] | None:
    """Remove n devices: from the fullest fitting node, or whole free nodes in a row and a part of one more."""
    fitting = [i for i, in_node in enumerate(free) if len(in_node) >= n]
    if fitting:
        best = min(fitting, key=lambda i: (len(free[i]), i))
        taken, free[best] = free[best][:n], free[best][n:]
        return tuple(taken)
    if n <= max(node_sizes):
        return None
    for i in range(len(free)):
        nodes: list[int] = []
        total = 0
        for j in range(i, len(free)):
            if len(free[j]) < min(node_sizes[j], n - total):
                break
            nodes.append(j)
            total += len(free[j])
            if total >= n:
                taken = [d for j in nodes for d in free[j]]
                for j in nodes:
                    free[j] = []
                free[nodes[-1]] = taken[n:]
                return tuple(taken[:n])
    return None
