"""Stages on unequal groups of devices: the staging search of :mod:`cost_models.staging`, fed with planned blocks.

For clusters of several device types, and for numbers of devices that few numbers divide. Schedules with one stage a
group only. The search takes one of the ways of its menu for all blocks of a stage, and recomputes as many of them as it
must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.meshes import Mesh, mesh_shapes
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.menu import WAYS, Menus, Way
from autopar.planner.intra_op.options import Options
from autopar.wishes import MEMORY_FRACTION
from cost_models.costs import costs_of
from cost_models.pipeline import fill_of
from cost_models.staging import NothingFits, Pool, StageCost, StagingProblem, Submesh, stage
from cost_models.staging.submeshes import place, pools_of, sizes, submeshes
from hardware_profiles import Cluster


@dataclass(frozen=True)
class UnequalCut:
    """Cuts (block numbers) with the mesh and the ranks of every stage."""

    bounds: tuple[int, ...]
    meshes: tuple[Mesh, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass
class Unequal:
    """A search over what the menus offer."""

    cluster: Cluster
    n_devices: int
    blocks: Sequence[Block]
    menus: Menus
    options: Options
    microbatches: int

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Devices by type, each type's in order of rank."""
        pools = pools_of(self.cluster, MEMORY_FRACTION)
        limit = self.options.memory_limit_bytes
        return tuple(replace(p, memory_bytes=limit) for p in pools) if limit is not None else pools

    @cached_property
    def ranks(self) -> dict[str, list[int]]:
        """Ranks of each device type."""
        by_type: dict[str, list[int]] = {}
        for rank, device in enumerate(self.cluster.devices):
            by_type.setdefault(device.name, []).append(rank)
        return by_type

    def candidates(self, schedule: str, n: int, groups: int | None = None) -> list[UnequalCut]:
        """The best ways to cut, by estimate.

        Args:
            groups: exactly so many stages; None for any number.
        """
        places = submeshes(self.pools, self._labels, sizes)
        problem = StagingProblem(
            len(self.blocks), self.pools, places, self._cost, self._transfer,
            classes=[b.kind for b in self.blocks], place=lambda s: (s.device_type, s.n_devices), all_devices=True,
            recompute="blocks" if self.menus.recompute else "never", max_stages=groups,
        )  # fmt: skip
        try:
            fill = replace(fill_of(schedule), drain=0.0)  # nothing hides in the simulated step either
            best = stage(problem, self.microbatches, fill, n_candidates=n)
        except NothingFits as error:
            raise InfeasibleError(str(error)) from None
        candidates = []
        for candidate in best:
            chosen = [s.choice for s in candidate.stages]
            if groups is not None and len(chosen) != groups:
                continue
            numbers = place(self.pools, [c.submesh for c in chosen])
            if numbers is None:
                continue
            devices = tuple(
                tuple(self.ranks[c.submesh.device_type][i] for i in ns) for c, ns in zip(chosen, numbers, strict=True)
            )
            meshes = tuple(self._mesh(c.submesh) for c in chosen)
            candidates.append(UnequalCut(tuple(c.first for c in chosen[1:]), meshes, devices, candidate.seconds))
        return candidates

    def _labels(self, n: int) -> list[str]:
        near = max(1, self.cluster.n_devices // self.cluster.n_nodes)
        shapes = [m for m in mesh_shapes(n) if len(m) == 1 or m[-1][1] <= near]
        return [m.text + f" {w}" for m in shapes for w in range(WAYS)]

    @staticmethod
    def _mesh(submesh: Submesh) -> Mesh:
        return Mesh.parse(submesh.shape.partition(" ")[0])

    def _cost(self, first: int, last: int, submesh: Submesh) -> StageCost | None:
        ways = [self._way(self.blocks[i], submesh) for i in range(first, last + 1)]
        if any(pair is None for pair in ways):
            return None
        pairs = [pair for pair in ways if pair is not None]
        plain, again = [p[0] for p in pairs], [p[1] for p in pairs]
        least = sum(w.kept_bytes for w in again)
        return StageCost(
            sum(w.forward_seconds for w in plain), sum(w.backward_seconds for w in plain),
            sum(w.step_seconds for w in plain),
            sum(w.static_bytes for w in plain) + max(w.peak_bytes for w in plain),
            sum(w.kept_bytes for w in plain), least, sum(a.seconds - w.seconds for w, a in pairs),
        )  # fmt: skip

    def _way(self, block: Block, submesh: Submesh) -> tuple[Way, Way] | None:
        """The way that a submesh names, and the same cuts with as much made again as may, if that saves bytes."""
        devices = self.ranks[submesh.device_type][: submesh.n_devices]
        try:
            ways = self.menus.ways(block, self._mesh(submesh), devices)
        except InfeasibleError:
            return None
        plain = [w for w in ways if not w.recomputed]
        number = int(submesh.shape.partition(" ")[2])
        if number >= len(plain):
            return None
        way = plain[number]
        alike = [w for w in ways if (w.static_bytes, w.forward_seconds) == (way.static_bytes, way.forward_seconds)]
        return way, min(alike, key=lambda w: w.kept_bytes)

    def _transfer(self, at: int, source: Submesh, target: Submesh) -> float:
        a = self.ranks[source.device_type][0]
        ranks = self.ranks[target.device_type]
        b = ranks[min(source.n_devices, len(ranks) - 1)] if source.device_type == target.device_type else ranks[0]
        if a == b:
            return 0.0
        n_bytes = self.blocks[at].crossing_bytes / min(source.n_devices, target.n_devices)
        return costs_of(self.cluster).transfer(a, b, n_bytes)


__all__ = ["Unequal", "UnequalCut"]
