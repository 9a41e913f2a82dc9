"""Options to run a block on a mesh: a few plans from the fastest to the smallest, with more and less recomputed.

Stages are put together from these (:mod:`.filling`) before any stage is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from typing import NamedTuple

from autopar.errors import InfeasibleError
from autopar.planner.effort import EFFORT
from autopar.planner.inter_op.blocks import Block
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.intra_op.building.parameter_load import NOTHING, ParameterLoad
from autopar.planner.intra_op.building.parameter_sharding import peak_bytes
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import patterns_in
from autopar.planner.intra_op.mesh_plan import Options, PlansByMemory, repriced
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from hardware_profiles import Cluster

MOST_OPTIONS = 1 + len(EFFORT.byte_prices)
"""Plans of a block on a mesh, at most."""
ALONE = Mesh.of(data=1)
"""The mesh of one device."""


@dataclass(frozen=True)
class BlockOption:
    """One option to run a block; seconds of one microbatch (except ``step_seconds``), bytes of one device.

    Attributes:
        step_seconds: seconds of the whole step: the optimizer, and what is waited for of collectives of parameters if
            the block stands alone. Blocks of a stage hide theirs together (:mod:`.filling`).
        weight_seconds: the part of the backward that computes gradients of weights and may run later.
        static_bytes: whatever does not grow with the microbatches in flight, but for ``peak_bytes``.
        kept_bytes: bytes saved for one microbatch in flight.
        recompute_peak_bytes: transient bytes of the peak, while parts of the block are recomputed say: once for all
            blocks of a stage.
        recomputed: something of it is recomputed.
        peak_bytes: bytes of parameters that are gathered for each use: once for all blocks of a stage, too.
        optimizer_seconds: the optimizer's part of ``step_seconds``.
        load: its parameters' collectives, and what is computed beside them.
    """

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    static_bytes: float
    kept_bytes: float
    recompute_peak_bytes: float = 0.0
    recomputed: bool = False
    weight_seconds: float = 0.0
    peak_bytes: float = 0.0
    optimizer_seconds: float = 0.0
    load: ParameterLoad = NOTHING

    @property
    def seconds(self) -> float:
        """Forward and backward of a microbatch."""
        return self.forward_seconds + self.backward_seconds


class SizedPlans(NamedTuple):
    """Plans of a block of one size on a mesh, and by how many devices its tensors could be cut (:func:`evenly_cut`)."""

    plans: list[StagePlan]
    cuts: tuple[frozenset[int], ...]

    def serves(self, cuts: tuple[frozenset[int], ...]) -> bool:
        """Return whether the plans are good at the size with `cuts` too: nothing else can be cut there."""
        return len(cuts) == len(self.cuts) and all(a <= b for a, b in zip(cuts, self.cuts, strict=True))


@dataclass
class BlockPlans:
    """Plans of blocks, which serve for the same blocks with microbatches of other sizes too.

    Attributes:
        every: the plans of a block from the fastest to the smallest, by kind, mesh and devices.
        fastest: the single fastest plan by kind and mesh, where the mesh was too slow to be planned further.
    """

    every: dict[tuple[object, ...], SizedPlans] = field(default_factory=dict)
    fastest: dict[tuple[object, ...], SizedPlans] = field(default_factory=dict)

    def alike(
        self, key: tuple[object, ...], share: bool, cuts: tuple[frozenset[int], ...]
    ) -> list[StagePlan] | None:  # fmt: skip
        """Return plans for the key or, if shared, for its kind and mesh, of a size where ``cuts`` can be made."""
        if key in self.every and self.every[key].serves(cuts):
            return self.every[key].plans
        alike = (sized for place, sized in self.every.items() if share and place[:2] == key[:2])
        return next((sized.plans for sized in alike if sized.serves(cuts)), None)

    def fastest_alike(self, key: tuple[object, ...], cuts: tuple[frozenset[int], ...]) -> list[StagePlan]:
        """Return the fastest plan for the key's kind and mesh on any devices; empty if there is none."""
        sized = self.fastest.get(key[:2])
        return sized.plans if sized is not None and sized.serves(cuts) else []


def evenly_cut(graph: Graph, mesh: Mesh) -> tuple[frozenset[int], ...]:
    """Return the numbers of even shards into which the axes of a mesh can cut each dim of every tensor."""
    sizes = [size for size in mesh.sizes if size > 1]
    pieces = {prod(axes) for n in range(1, len(sizes) + 1) for axes in combinations(sizes, n)}
    sets: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        for dim in (dim for out in node.outs if out is not None for dim in out.shape):
            if dim not in sets:
                sets[dim] = frozenset(n for n in pieces if dim % n == 0)
    return tuple(sets[dim] for node in graph.nodes for out in node.outs if out is not None for dim in out.shape)


@dataclass
class Menus:
    """Ways of every kind of block on every mesh.

    Attributes:
        graph_of: the graph of one block.
        options: the options of the blocks' plans; options that name operators or placements are left out.
        recompute: whether operators of a block may be recomputed.
        rare: kinds of which there are so few that one smaller option is enough.
        common: the one kind for which programs of more than ``EFFORT.first_axes`` axes are worth solving; None for all.
        decided: plans of the same blocks at another size: these are priced at this size, which takes a tenth of the
            time of finding the best ones here, unless more can be cut here. What is decided here is added.
        share: whether what is decided for some devices serves for others too.
    """

    cluster: Cluster
    graph_of: Callable[[Block], Graph]
    options: Options
    recompute: bool
    rare: frozenset[tuple[int, ...]] = frozenset()
    decided: BlockPlans = field(default_factory=lambda: BlockPlans())
    share: bool = False
    common: tuple[int, ...] | None = None
    _graphs: dict[tuple[int, ...], Graph] = field(default_factory=dict)
    _known: dict[tuple[object, ...], tuple[BlockOption, ...]] = field(default_factory=dict)
    _fastest: dict[tuple[object, ...], tuple[BlockOption, ...]] = field(default_factory=dict)
    _begun: dict[tuple[object, ...], PlansByMemory] = field(default_factory=dict)
    _launches: dict[tuple[object, ...], float] = field(default_factory=dict)
    _evenly_cut: dict[tuple[object, ...], tuple[frozenset[int], ...]] = field(default_factory=dict)

    def of(self, block: Block, mesh: Mesh, devices: Sequence[int]) -> tuple[BlockOption, ...]:
        """Return the options from the fastest to the smallest; those that regather copies are the last."""
        key = self._key(block, mesh, devices)
        if len(mesh) > EFFORT.first_axes and self.common not in (None, block.kind):
            return self._of_fewer_axes(self.of, block, mesh, devices)
        if not self._know(block, mesh, devices):
            rare = block.kind in self.rare or len(mesh) > EFFORT.first_axes
            prices = EFFORT.rare_byte_prices if rare else EFFORT.byte_prices
            plans = self._plans(block, mesh, devices).every(prices)
            self.decided.every[key] = SizedPlans(plans, self._cuts(block, mesh))
            self._known[key] = self._block_options(self._graph(block), plans, mesh, devices)
            del self._begun[key]
        return self._known[key]

    def _of_fewer_axes(
        self, of: Callable[[Block, Mesh, Sequence[int]], tuple[BlockOption, ...]], block: Block, mesh: Mesh,
        devices: Sequence[int],
    ) -> tuple[BlockOption, ...]:  # fmt: skip
        """Return the options of a block with two neighbouring axes taken as one, in a tenth of the time."""
        choices: list[BlockOption] = []
        failed: InfeasibleError | None = None
        for fewer in mesh.merged():
            try:
                choices += of(block, fewer, devices)
            except InfeasibleError as error:
                failed = error
        if not choices and failed is not None:
            raise failed
        return tuple(choices)

    def fastest(self, block: Block, mesh: Mesh, devices: Sequence[int]) -> float:
        """Return the seconds of a microbatch in the fastest option, which is found before the others."""
        return min(w.seconds for w in self.fastest_of(block, mesh, devices))

    def fastest_of(self, block: Block, mesh: Mesh, devices: Sequence[int]) -> tuple[BlockOption, ...]:
        """Return all options, if they are known; else the fastest alone, for a small part of the time.

        Where memory does not bind, no other is of interest.
        """
        key = self._key(block, mesh, devices)
        if key in self._known:
            return self._known[key]
        if key in self._fastest:
            return self._fastest[key]
        if len(mesh) > EFFORT.first_axes and self.common not in (None, block.kind):
            return self._of_fewer_axes(self.fastest_of, block, mesh, devices)
        plans: list[StagePlan] | None = None
        if key not in self._begun:  # begun: what was decided at another size is not possible here
            cuts = self._cuts(block, mesh)
            decided = (self.decided.alike(key, self.share, cuts) or [])[:1]
            if self.share and not decided:
                decided = self.decided.fastest_alike(key, cuts)
            plans = self._again(block, mesh, devices, decided)
        if not plans:
            plans = [self._plans(block, mesh, devices).fastest()]
            if self.share:
                self.decided.fastest[key[:2]] = SizedPlans(plans, self._cuts(block, mesh))
        self._fastest[key] = self._block_options(self._graph(block), plans, mesh, devices)
        return self._fastest[key]

    def launches(self, block: Block, device: int) -> float:
        """Return the seconds of a microbatch that launches of a block's operators take on any mesh with that device."""
        key = block.kind, device
        if key not in self._launches:
            self._launches[key] = pricer(self.cluster, ALONE, (device,)).launches(self._graph(block))
        return self._launches[key]

    def _know(self, block: Block, mesh: Mesh, devices: Sequence[int]) -> bool:
        """Return whether the options are known from another size or other devices, if these can be used here."""
        key = self._key(block, mesh, devices)
        if key not in self._known and key not in self._begun:  # begun: it was not possible
            decided = self.decided.alike(key, self.share, self._cuts(block, mesh))
            plans = self._again(block, mesh, devices, decided) if decided is not None else None
            if plans is not None:
                self._known[key] = self._block_options(self._graph(block), plans, mesh, devices)
        return key in self._known

    def _again(
        self, block: Block, mesh: Mesh, devices: Sequence[int], plans: Sequence[StagePlan]
    ) -> list[StagePlan] | None:
        graph = self._graph(block)
        return repriced(graph, self.cluster, mesh, self._options(graph), plans, devices=devices)

    def forget(self) -> None:
        """Let go of what was begun for :meth:`fastest` and not needed since."""
        self._begun.clear()

    @staticmethod
    def _key(block: Block, mesh: Mesh, devices: Sequence[int]) -> tuple[object, ...]:
        return block.kind, mesh, tuple(devices)

    def _plans(self, block: Block, mesh: Mesh, devices: Sequence[int]) -> PlansByMemory:
        key = self._key(block, mesh, devices)
        if key not in self._begun:
            graph = self._graph(block)
            self._begun[key] = PlansByMemory(graph, self.cluster, mesh, self._options(graph), devices=devices)
        return self._begun[key]

    def _cuts(self, block: Block, mesh: Mesh) -> tuple[frozenset[int], ...]:
        """Return :func:`evenly_cut` of a block."""
        key = block.kind, mesh
        if key not in self._evenly_cut:
            self._evenly_cut[key] = evenly_cut(self._graph(block), mesh)
        return self._evenly_cut[key]

    def _graph(self, block: Block) -> Graph:
        if block.kind not in self._graphs:
            self._graphs[block.kind] = self.graph_of(block)
        return self._graphs[block.kind]

    def _options(self, graph: Graph) -> Options:
        return replace(
            self.options, constraints=None, params=None, inputs=None, outputs=None,
            in_flight=min(EFFORT.weighed_in_flight, self.options.microbatches),
            recompute=patterns_in(graph, self.options.recompute), may_recompute=self.recompute,
        )  # fmt: skip

    def _block_options(
        self, graph: Graph, plans: Sequence[StagePlan], mesh: Mesh, devices: Sequence[int]
    ) -> tuple[BlockOption, ...]:  # fmt: skip
        priced = pricer(self.cluster, mesh, devices)
        rules = rules_of(graph)
        peaks = [peak_bytes(graph, plan, priced) for plan in plans]
        choices = []
        for plan, peak in _undominated(plans, peaks):
            spent, price = phases(graph, plan, priced, rules), plan.price
            waits = spent.load.exposed()
            choices.append(
                BlockOption(
                    spent.forward_seconds - waits.forward_each, spent.backward_seconds - waits.backward_each,
                    waits.of_step(plan.microbatches) + spent.optimizer_seconds,
                    price.stored_bytes - peak, plan.kept_bytes, max(0, price.transient_bytes),
                    recomputed=bool(plan.recompute), peak_bytes=peak,
                    weight_seconds=0.0 if _is_whole(plan) else min(spent.weight_seconds, spent.backward_seconds),
                    optimizer_seconds=spent.optimizer_seconds, load=spent.load,
                )
            )  # fmt: skip
        return tuple(choices)


def _is_whole(plan: StagePlan) -> bool:
    """Return whether the backward is not split, because of a decision about memory."""
    return plan.whole_backward


def _undominated(plans: Sequence[StagePlan], peaks: Sequence[int]) -> list[tuple[StagePlan, int]]:
    """Return the plans, with their peaks, of which no other is as good in everything.

    That is seconds and bytes of every sort, and whether the backward is split; the first of equal ones. To find when
    within a step the seconds of a plan are spent takes half as long as to make the plan, and many are dominated.
    """

    def account(plan: StagePlan, peak: int) -> tuple[float, ...]:
        price = plan.price
        once = price.exposed_seconds + price.optimizer_seconds
        stored, passing = price.stored_bytes - peak, max(0, price.transient_bytes)
        return (
            price.microbatch_seconds, once, once + price.hidden_seconds, stored, plan.kept_bytes, passing, peak,
            _is_whole(plan), bool(plan.recompute),
        )  # fmt: skip

    accounts = [account(plan, peak) for plan, peak in zip(plans, peaks, strict=True)]
    best: list[tuple[StagePlan, int]] = []
    for k, mine in enumerate(accounts):
        better = (
            all(a <= b for a, b in zip(each, mine, strict=True)) and (each != mine or n < k)
            for n, each in enumerate(accounts) if n != k
        )  # fmt: skip
        if not any(better):
            best.append((plans[k], peaks[k]))
    return best


FREE = BlockOption(0.0, 0.0, 0.0, 0.0, 0.0)
"""The option of a block that is left out of account."""


def menus_of(
    menus: Menus, blocks: Sequence[Block], mesh: Mesh, devices: Sequence[int], only: int | None = None,
    fastest: bool = False,
) -> dict[int, tuple[BlockOption, ...]] | None:
    """Return the options of every kind, numbered as :func:`kinds_of` does; None if a block has none on this mesh.

    ``only`` is the one kind that is taken into account, the others being free; with ``fastest`` one option of each is
    enough.
    """
    choices = menus.fastest_of if fastest else menus.of
    menus_by_kind: dict[int, tuple[BlockOption, ...]] = {}
    for number, block in zip(kinds_of(blocks), blocks, strict=True):
        if only is not None and number != only:
            menus_by_kind[number] = (FREE,)
        elif number not in menus_by_kind:
            try:
                menus_by_kind[number] = choices(block, mesh, devices)
            except InfeasibleError:
                return None
    return menus_by_kind


def kinds_of(blocks: Sequence[Block]) -> list[int]:
    """Return the number of every block's kind, in order of appearance."""
    number_of: dict[tuple[int, ...], int] = {}
    return [number_of.setdefault(b.kind, len(number_of)) for b in blocks]
