"""Stages on equal groups of devices: for every group size, mesh shape and schedule, the cut with the best estimate.

The estimate is that of :mod:`cost_models.staging.estimate`. For a pace (seconds that no stage may exceed) blocks are
filled in from the last stage to the first, as many as fit the pace and the memory with the microbatches that the place
in the schedule keeps in flight; the least pace at which all blocks find room is found by bisection. Greedy filling is
optimal here: a stage that takes fewer blocks never helps those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from autopar.errors import InfeasibleError
from autopar.placements import Mesh
from autopar.planner.blocks import Block
from autopar.planner.menu import Filled, Filler, Menus, kinds_of, menus_of
from autopar.planner.search import size_text
from cost_models import mesh_axes
from cost_models.pipeline import build
from cost_models.staging.fill import FILLS, Fill
from hardware_profiles import Cluster

FAR = 1.3
"""A mesh is looked at further if its lower bound is within this factor of the best estimate."""
SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that compute gradients of inputs and of weights apart."""
PRECISE = 0.01
"""Relative precision of the pace."""


@dataclass(frozen=True)
class Cut:
    """A cut with its estimate: the first block of every stage but the first, how many of each stage's run again."""

    groups: int
    mesh: Mesh
    schedule: str
    bounds: tuple[int, ...]
    recomputed: tuple[int, ...]
    seconds: float


@dataclass
class Equal:
    """A search over equal groups.

    Attributes:
        shapes: meshes of a group of so many devices.
        memory_bytes: of a device, what may be filled.
    """

    cluster: Cluster
    n_devices: int
    blocks: Sequence[Block]
    menus: Menus
    shapes: Callable[[int], Sequence[Mesh]]
    schedules: Sequence[str]
    microbatches: int
    memory_bytes: float
    groups: int | None = None
    infeasible: InfeasibleError | None = field(default=None, init=False)

    def cuts(self) -> list[Cut]:
        """All that are worth a further look, best first."""
        n = self.n_devices
        counts = [g for g in range(1, n + 1) if n % g == 0 and self.groups in (None, g) and g <= len(self.blocks)]
        places = [(self._least(mesh, g), g, mesh) for g in counts for mesh in self.shapes(n // g)]
        found: list[Cut] = []
        allowed = False
        for least, groups, mesh in sorted(places):
            best = min((c.seconds for c in found), default=inf)
            if least > FAR * best:
                break
            known = menus_of(self.menus, self.blocks, mesh)
            if known is None:
                continue
            fillers = [Filler(kinds_of(self.blocks), known, self.microbatches, split) for split in (False, True)]
            names = dict.fromkeys(self.schedules) if groups > 1 else {self.schedules[0]: None}
            for name in names:
                if self._allows(name, groups):
                    allowed = True
                    one = self._cut(groups, mesh, name, fillers[groups > 1 and name in SPLIT])
                    found += [one] if one is not None else []
        if not found and allowed and self.infeasible is None:
            self.infeasible = self._too_small(places)
        return sorted(found, key=lambda c: (c.seconds, c.groups, c.mesh))

    def _too_small(self, places: Sequence[tuple[float, int, Mesh]]) -> InfeasibleError | None:
        """What the leanest cut would need, spread evenly."""
        needs = []
        for _, groups, mesh in places:
            known = menus_of(self.menus, self.blocks, mesh)
            if known is not None:
                least = {k: min(w.static_bytes + w.kept_bytes for w in ways) for k, ways in known.items()}
                needs.append((sum(least[k] for k in kinds_of(self.blocks)) / groups, groups, mesh))
        if not needs:
            return None
        n_bytes, groups, mesh = min(needs)
        if n_bytes <= self.memory_bytes:
            return InfeasibleError(
                f"no plan fits {size_text(self.memory_bytes)} per device with {self.microbatches} microbatches under "
                f"{', '.join(self.schedules)}: stages are too large, or too many microbatches are in flight; use more "
                "devices, smaller microbatches or other schedules"
            )
        shape = " x ".join(f"{a}={k}" for a, k in mesh)
        return InfeasibleError(
            f"no plan fits {size_text(self.memory_bytes)} per device: the leanest, {groups} group(s) of {shape}, needs "
            f"about {size_text(n_bytes)} with one microbatch in flight; use more devices or smaller microbatches"
        )

    def _least(self, mesh: Mesh, groups: int) -> float:
        """A lower bound of the step: the blocks of the commonest kind, as fast as they can be, at full pace."""
        kinds = kinds_of(self.blocks)
        common = max(set(kinds), key=lambda k: (kinds.count(k), -k))
        try:
            ways = self.menus.ways(self.blocks[kinds.index(common)], mesh)
        except InfeasibleError as error:
            self.infeasible = self.infeasible or error
            return inf
        return kinds.count(common) * min(w.seconds(False) for w in ways) * self.microbatches / groups

    def _allows(self, name: str, groups: int) -> bool:
        fill = FILLS[name]
        if groups == 1:
            return True
        if groups * fill.chunks > len(self.blocks) or self.microbatches < fill.least(groups):
            return False
        try:
            build(name, groups * fill.chunks, groups, self.microbatches)
        except ValueError:
            return False
        return True

    def _cut(self, groups: int, mesh: Mesh, name: str, filler: Filler) -> Cut | None:
        fill = FILLS[name] if groups > 1 else FILLS["1f1b"]
        places = Places(groups, fill, self.microbatches, self.memory_bytes, filler, len(self.blocks))
        stages = places.best()
        if stages is None:
            return None
        chunks = fill.chunks if groups > 1 else 1
        held = [[s for _, s in stages[g::groups]] for g in range(groups)]
        if fill.chunks > 1 and not name.startswith("interleaved"):
            held = [[stages[g][1], stages[-1 - g][1]] for g in range(groups)]
        crossing = [self._transfer(first, groups) for first, _ in stages[1:]]
        times = [sum(s.seconds for s in own) for own in held]
        pace = max(*times, *(chunks * c for c in crossing)) if crossing else max(times)
        step = max(sum(s.step_seconds for s in own) for own in held)
        bubble = fill.bubble if groups > 1 else 1.0
        seconds = bubble * (sum(times) + 2 * sum(crossing)) + (self.microbatches - bubble) * pace + step
        if groups == 1:
            seconds = self.microbatches * times[0] + step
        return Cut(
            groups, mesh, name, tuple(first for first, _ in stages[1:]), tuple(s.recomputed for _, s in stages), seconds
        )

    def _transfer(self, block: int, groups: int) -> float:
        size = self.n_devices // groups
        wire = mesh_axes(self.cluster, {"pair": 2}, [0, size])["pair"]
        return wire.seconds("send_recv", self.blocks[block].crossing_bytes / size)


@dataclass
class Places:
    """The stages of one schedule on so many groups, to be filled.

    Attributes:
        memory_bytes: of a device; stages of a group share it equally.
        in_flight: microbatches, by stage, counted for all that a group holds.
    """

    groups: int
    fill: Fill
    microbatches: int
    memory_bytes: float
    filler: Filler
    n_blocks: int

    def __post_init__(self) -> None:
        chunks = self.fill.chunks if self.groups > 1 else 1
        self.n_stages = self.groups * chunks
        self.memory = self.memory_bytes / chunks
        self.in_flight = [
            self.fill.in_flight(self._group(s), self.groups, self.microbatches) if self.groups > 1 else 1.0
            for s in range(self.n_stages)
        ]

    def _group(self, stage: int) -> int:
        if self.fill.chunks == 1 or self.fill.name.startswith("interleaved"):
            return stage % self.groups
        return min(stage, self.n_stages - 1 - stage)

    def best(self) -> list[tuple[int, Filled]] | None:
        """``(first block, stage)`` of every stage, at the least pace."""
        widest = self._filled(inf)
        if widest is None:
            return None
        high = max(s.seconds for _, s in widest)
        low, found = 0.0, widest
        while high - low > PRECISE * high:
            middle = (low + high) / 2
            stages = self._filled(middle)
            if stages is None:
                low = middle
            else:
                found, high = stages, max(s.seconds for _, s in stages)
        return found

    def _filled(self, pace: float) -> list[tuple[int, Filled]] | None:
        """Stages that no one is slower than a pace."""
        end, found = self.n_blocks, []
        for s in range(self.n_stages - 1, -1, -1):
            first = self._first(s, end, pace)
            stage = self.filler.stage(first, end, self.in_flight[s], self.memory) if first is not None else None
            if first is None or stage is None:
                return None
            found.append((first, stage))
            end = first
        return found[::-1] if end == 0 else None

    def _first(self, s: int, end: int, pace: float) -> int | None:
        """The first block of stage ``s`` that ends at ``end``: as early as it may be. Earlier stages get one each."""

        def fits(first: int) -> bool:
            stage = self.filler.stage(first, end, self.in_flight[s], self.memory)
            return stage is not None and stage.seconds <= pace

        if end - 1 < s or not fits(end - 1):
            return None
        low, high = s - 1, end - 1  # high fits
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle
        return high




__all__ = ["Cut", "Equal", "Places"]
