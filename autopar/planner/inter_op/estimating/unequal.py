"""Stages on unequal groups of devices: the staging search of :mod:`cost_models.staging` over planned blocks.

For clusters of several device types, and for numbers of devices that few numbers divide. Schedules with one stage a
group only. The shape of a group and its number of blocks are decided together, from every number of devices that may be
left: that is a dynamic program over labels, which takes one of the options of the menu for all blocks of a stage, and
recomputes as many of them as it must. The stages of the best cuts are then filled as those of equal groups are
(:mod:`.filling`), and their estimate is the same (:mod:`.estimates`).
``docs/decisions/2026-11-26-two-searches-of-cuts.md`` has why there are two searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.estimating.block_costs import MOST_OPTIONS, BlockOption
from autopar.planner.inter_op.estimating.estimates import EstimatedCut, Group, estimated, stage_edge_seconds
from autopar.planner.inter_op.estimating.filling import Fillers
from autopar.words.meshes import Mesh
from cost_models.costs import costs_of
from cost_models.schedules import Fill, fill_of
from cost_models.staging import NothingFits, Pool, StageCost, StagingEstimate, StagingProblem, Submesh, stage
from cost_models.staging.submeshes import place, pools_of, sizes, submeshes
from hardware_profiles import Cluster


@dataclass
class Unequal:
    """A search over what the menus offer.

    Attributes:
        shapes: meshes of a group, by its number of devices.
        limit: bytes of a device of those given, what may be filled.
    """

    cluster: Cluster
    blocks: Sequence[Block]
    fillers: Fillers
    shapes: Callable[[int], Sequence[Mesh]]
    microbatches: int
    limit: Callable[[Sequence[int]], float]

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Devices by type, each type's in order of rank."""
        pools = pools_of(self.cluster, 1.0)
        return tuple(replace(pool, memory_bytes=self.limit(self.ranks[pool.device_type])) for pool in pools)

    @cached_property
    def ranks(self) -> dict[str, list[int]]:
        """Ranks of each device type."""
        by_type: dict[str, list[int]] = {}
        for rank, device in enumerate(self.cluster.devices):
            by_type.setdefault(device.name, []).append(rank)
        return by_type

    def cuts(self, schedules: Sequence[str], n: int, groups: int | None = None) -> list[EstimatedCut]:
        """Return the ``n`` best cuts into ``groups`` stages (None: two or more), by the estimate of the first schedule.

        Each is returned under every schedule.
        """
        places = submeshes(self.pools, self._labels, sizes)
        problem = StagingProblem(
            len(self.blocks), self.pools, places, self._cost, self._transfer,
            classes=[b.kind for b in self.blocks], place=lambda s: (s.device_type, s.n_devices), all_devices=True,
            recompute="blocks" if self.fillers.menus.recompute else "never", max_stages=groups,
        )  # fmt: skip
        try:
            fill = fill_of(schedules[0])
            best = stage(problem, self.microbatches, fill, n_candidates=n)
        except NothingFits as error:
            raise InfeasibleError(str(error)) from None
        cuts = []
        for candidate in best:
            chosen = [s.choice for s in candidate.stages]
            if len(chosen) == 1 or groups not in (None, len(chosen)):
                continue
            numbers = place(self.pools, [c.submesh for c in chosen])
            if numbers is None:
                continue
            of_groups = [
                Group(self._mesh(c.submesh), tuple(self.ranks[c.submesh.device_type][i] for i in ns))
                for c, ns in zip(chosen, numbers, strict=True)
            ]  # fmt: skip
            cuts += [self._estimated(candidate, of_groups, fill_of(name)) for name in schedules]
        return cuts

    def _estimated(self, candidate: StagingEstimate, groups: Sequence[Group], fill: Fill) -> EstimatedCut:
        """Return the cut, its stages filled as those of equal groups are, if they are known to fit so."""
        chosen = [s.choice for s in candidate.stages]
        stages = []
        for number, (choice, group) in enumerate(zip(chosen, groups, strict=True)):
            filler = self.fillers.of(group.mesh, self._devices(choice.submesh))
            in_flight = fill.in_flight(number, len(groups), self.microbatches)
            end = choice.last + 1
            filled = filler.stage(choice.first, end, in_flight, self.limit(group.devices)) if filler else None
            if filled is None:
                firsts = tuple(c.first for c in chosen[1:])
                return EstimatedCut(tuple(groups), fill, firsts, (), (), candidate.seconds)
            stages.append((choice.first, filled))
        return estimated(groups, fill, stages, self.microbatches, self._crossing)

    def _crossing(self, block: int, source: Group, target: Group) -> float:
        size = min(len(source.devices), len(target.devices))
        return stage_edge_seconds(self.cluster, self.blocks[block], source, target, size)

    def _labels(self, n: int) -> list[str]:
        return [f"{mesh.text} {option}" for mesh in self.shapes(n) for option in range(MOST_OPTIONS)]

    def _devices(self, submesh: Submesh) -> list[int]:
        """Return the first devices of a type: a block is taken to cost the same on the others."""
        return self.ranks[submesh.device_type][: submesh.n_devices]

    @staticmethod
    def _mesh(submesh: Submesh) -> Mesh:
        return Mesh.parse(submesh.shape.partition(" ")[0])

    def _cost(self, first: int, last: int, submesh: Submesh) -> StageCost | None:
        choices = [self._option(self.blocks[i], submesh) for i in range(first, last + 1)]
        if any(pair is None for pair in choices):
            return None
        pairs = [pair for pair in choices if pair is not None]
        plain, again = [p[0] for p in pairs], [p[1] for p in pairs]
        least = sum(w.kept_bytes for w in again)
        return StageCost(
            sum(w.forward_seconds for w in plain), sum(w.backward_seconds for w in plain),
            sum(w.step_seconds for w in plain),
            sum(w.static_bytes for w in plain) + max(w.peak_bytes for w in plain),
            sum(w.kept_bytes for w in plain), least, sum(a.seconds - w.seconds for w, a in pairs),
        )  # fmt: skip

    def _option(self, block: Block, submesh: Submesh) -> tuple[BlockOption, BlockOption] | None:
        """Return the option that a submesh names, and the one with the same cuts that keeps the fewest bytes."""
        try:
            choices = self.fillers.menus.of(block, self._mesh(submesh), self._devices(submesh))
        except InfeasibleError:
            return None
        plain = [w for w in choices if not w.recomputed]
        number = int(submesh.shape.partition(" ")[2])
        if number >= len(plain):
            return None
        option = plain[number]
        same = option.static_bytes, option.forward_seconds
        alike = [w for w in choices if (w.static_bytes, w.forward_seconds) == same]
        return option, min(alike, key=lambda w: w.kept_bytes)

    def _transfer(self, at: int, source: Submesh, target: Submesh) -> float:
        a = self.ranks[source.device_type][0]
        ranks = self.ranks[target.device_type]
        b = ranks[min(source.n_devices, len(ranks) - 1)] if source.device_type == target.device_type else ranks[0]
        if a == b:
            return 0.0
        n_bytes = self.blocks[at].stage_edge_bytes / min(source.n_devices, target.n_devices)
        return costs_of(self.cluster).transfer(a, b, n_bytes)
