"""Stages on unequal groups of devices: the staging search of :mod:`cost_models.staging`, fed with planned blocks.

For clusters of several device types, and for numbers of devices that few numbers divide. Schedules with one stage a
group only. Every block is planned alone in every shape, as fast as it can be and in less memory; the search takes
whichever of the two a stage has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.placements import Mesh, mesh_shapes
from autopar.planner.blocks import Block
from autopar.planner.phases import phases
from autopar.planner.price import pricer
from autopar.planner.recompute import patterns_in
from autopar.planner.search import MEMORY_FRACTION, Options, plan_graph
from cost_models import mesh_axes
from cost_models.staging import NothingFits, Pool, Problem, StageCost, Submesh, stage
from cost_models.staging.submeshes import place, pools_of, sizes, submeshes
from hardware_profiles import Cluster

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
LEAN = " in less memory"
LEAN_SHARE = 0.6
"""Of the memory of a block's fastest plan, what its second plan may take."""


@dataclass(frozen=True)
class Found:
    """Cuts (block numbers) with the mesh and the ranks of every stage."""

    bounds: tuple[int, ...]
    meshes: tuple[Mesh, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass
class Unequal:
    """A search; ``graph_of`` gives the graph of one block."""

    cluster: Cluster
    n_devices: int
    blocks: Sequence[Block]
    graph_of: Callable[[Block], Graph]
    options: Options
    microbatches: int
    _solved: dict[tuple[tuple[int, ...], Submesh], StageCost | None] = field(default_factory=dict)

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Devices by type, each type's in order of rank."""
        found = pools_of(self.cluster, MEMORY_FRACTION)
        limit = self.options.memory_limit_bytes
        return tuple(replace(p, memory_bytes=limit) for p in found) if limit is not None else found

    @cached_property
    def ranks(self) -> dict[str, list[int]]:
        """Ranks of each device type."""
        found: dict[str, list[int]] = {}
        for rank, device in enumerate(self.cluster.devices):
            found.setdefault(device.name, []).append(rank)
        return found

    def candidates(self, schedule: str, n: int, groups: int | None = None) -> list[Found]:
        """The best ways to cut, by estimate.

        Args:
            groups: exactly so many stages; None for any number.
        """
        places = submeshes(self.pools, self._labels, sizes)
        problem = Problem(
            len(self.blocks), self.pools, places, self._cost, self._transfer,
            classes=[b.kind for b in self.blocks], place=lambda s: (s.device_type, s.n_devices), all_devices=True,
            recompute="never", max_stages=groups,
        )  # fmt: skip
        try:
            best = stage(problem, self.microbatches, schedule, n_candidates=n)
        except NothingFits as error:
            raise InfeasibleError(str(error)) from None
        found = []
        for candidate in best:
            chosen = [s.choice for s in candidate.stages]
            if groups is not None and len(chosen) != groups:
                continue
            numbers = place(self.pools, [c.submesh for c in chosen])
            if numbers is None:
                continue
            devices = tuple(
                tuple(self.ranks[c.submesh.device_type][i] for i in own) for c, own in zip(chosen, numbers, strict=True)
            )
            meshes = tuple(self._mesh(c.submesh) for c in chosen)
            found.append(Found(tuple(c.first for c in chosen[1:]), meshes, devices, candidate.seconds))
        return found

    def _labels(self, n: int) -> list[str]:
        near = max(1, self.cluster.n_devices // self.cluster.n_nodes)
        shapes = [m for m in mesh_shapes(n) if len(m) == 1 or m[-1][1] <= near]
        return [",".join(f"{a}={k}" for a, k in m) + lean for m in shapes for lean in ("", LEAN)]

    @staticmethod
    def _mesh(submesh: Submesh) -> Mesh:
        parts = (p.partition("=") for p in submesh.shape.removesuffix(LEAN).split(","))
        return tuple((name, int(size)) for name, _, size in parts)

    def _cost(self, first: int, last: int, submesh: Submesh) -> StageCost | None:
        costs = [self._block(self.blocks[i], submesh) for i in range(first, last + 1)]
        if any(c is None for c in costs):
            return None
        known = [c for c in costs if c is not None]
        return StageCost(
            sum(c.forward_seconds for c in known), sum(c.backward_seconds for c in known),
            sum(c.step_seconds for c in known), sum(c.static_bytes for c in known),
            sum(c.activation_bytes for c in known),
        )  # fmt: skip

    def _block(self, block: Block, submesh: Submesh) -> StageCost | None:
        key = block.kind, submesh
        if key in self._solved:
            return self._solved[key]
        limit = float("inf")
        if submesh.shape.endswith(LEAN):
            fast = self._block(block, replace(submesh, shape=submesh.shape.removesuffix(LEAN)))
            assert fast is not None
            limit = LEAN_SHARE * (fast.static_bytes + fast.activation_bytes)
        mesh = self._mesh(submesh)
        devices = self.ranks[submesh.device_type][: submesh.n_devices]
        graph = self.graph_of(block)
        options = replace(
            self.options, memory_limit_bytes=limit, constraints=None, params=None, inputs=None, outputs=None,
            recompute=patterns_in(graph, self.options.recompute), microbatches=self.microbatches, memory_gap=0.05,
        )  # fmt: skip
        try:
            plan = plan_graph(graph, self.cluster, mesh, options, devices=devices)
        except InfeasibleError:
            self._solved[key] = None
            return None
        spent, p = phases(graph, plan, pricer(self.cluster, mesh, devices)), plan.price
        static = p.memory_bytes - p.activation_bytes
        self._solved[key] = StageCost(
            spent.forward_seconds, spent.backward_seconds, spent.step_seconds, static, p.activation_bytes
        )
        return self._solved[key]

    def _transfer(self, at: int, source: Submesh, target: Submesh) -> float:
        a = self.ranks[source.device_type][0]
        own = self.ranks[target.device_type]
        b = own[min(source.n_devices, len(own) - 1)] if source.device_type == target.device_type else own[0]
        if a == b:
            return 0.0
        wire = mesh_axes(self.cluster, {"pair": 2}, [a, b])["pair"]
        n_bytes = self.blocks[at].crossing_bytes / min(source.n_devices, target.n_devices)
        return wire.seconds("send_recv", n_bytes)


__all__ = ["SCHEDULES", "Found", "Unequal"]
