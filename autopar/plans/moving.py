"""Moving a model's parameters from the layout of one plan to that of another: which rank sends what to which rank.

Every element that a rank needs and does not have comes from the nearest rank that has it: one on its machine, else one
on another machine. A part that several ranks of a machine need enters it once, in slices that one of them receives in
the first round and sends to the others in the second.

Layouts are :class:`autopar.plans.transfer.Side`, one for each stage that stores the parameter; devices are ranks of one
cluster, whether the two plans share devices or not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.errors import PlanError
from autopar.plans.plan import Plan
from autopar.plans.transfer import Side, box_at
from autopar.words.graph import Graph, Spec
from autopar.words.precision import Precision
from autopar.words.shards import Box, shard_of

Sides = tuple[Side, ...]
MOST_TIMES_SENT = 1.5
"""The most that a rank sends by itself to others of its machine, as a multiple of what one of them receives."""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter as a plan stores it.

    Attributes:
        spec: its shape, and the format in which it is stored.
        moment_bytes: bytes of optimizer state for each element.
        sides: its layout in each stage that stores it.
    """

    name: str
    spec: Spec
    moment_bytes: int
    sides: Sides


@dataclass(frozen=True)
class MovedPart:
    """One message, or a part that stays: ``box`` of the global tensor, from rank ``source`` to rank ``target``.

    ``round`` is 0 or 1; a part of round 1 is sent on by a rank that received it in round 0.
    """

    source: int
    target: int
    box: Box
    round: int = 0

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(n for _, n in self.box)


def stored_parameters(
    plan: Plan, graph: Graph, devices: Sequence[int], *, as_used: bool = False, n_moments: int = 0
) -> dict[str, StoredParameter]:
    """Return the parameters of a plan by name, in the order of the graph.

    Args:
        graph: the graph of the whole model.
        devices: the device that each rank of the plan is.
        as_used: in the placement and the format in which programs read them, not in which the optimizer steps.
        n_moments: tensors of optimizer state of a parameter's shape.
    """
    precision = graph.precision or Precision("own", reduce="float32")
    found = {}
    for _, node in graph.of_kind("param"):
        name, read_as = node.target, node.outs[0]
        assert read_as is not None
        sides = []
        for stage in plan.stages:
            if name in stage.params:
                choice = stage.params[name]
                state = choice.used if as_used else choice.stored
                sides.append(Side(state, stage.mesh, tuple(devices[rank] for rank in stage.devices)))
        spec = read_as if as_used else Spec(read_as.shape, precision.stored(read_as.dtype))
        kept = Spec(read_as.shape, precision.kept(read_as.dtype))
        moments = n_moments * kept.item_bytes if node.needs_grad else 0
        found[name] = StoredParameter(name, spec, moments, tuple(dict.fromkeys(sides)))
    return found


def check_same_model(old: Mapping[str, StoredParameter], new: Mapping[str, StoredParameter]) -> None:
    """Refuse plans of models whose parameters differ in names or shapes.

    Raises:
        PlanError: with the first difference and how many there are.
    """
    for here, there, plan in ((old, new, "second"), (new, old, "first")):
        missing = [name for name in here if name not in there]
        if missing:
            raise PlanError(
                f"the plans are for different models: {len(missing)} of {len(here)} parameters, such as "
                f"'{missing[0]}', are not in the {plan} plan's model; give two plans of one model"
            )
    unlike = [name for name in old if old[name].spec.shape != new[name].spec.shape]
    if unlike:
        a, b = (list(plan[unlike[0]].spec.shape) for plan in (old, new))
        raise PlanError(
            f"the plans are for models of different sizes: '{unlike[0]}' is {a} in the first and {b} in the second "
            f"({len(unlike)} parameters differ); give two plans of one model"
        )


def moved_parts(shape: Sequence[int], old: Sides, new: Sides, node_of: Sequence[int]) -> tuple[MovedPart, ...]:
    """Return the parts of one tensor that ranks need, those that stay (``source`` is ``target``) and messages.

    Args:
        shape: of the whole tensor.
        old, new: its layout before and after, in each stage that stores it.
        node_of: the machine of every rank.
    """
    holders = [_Holders.of(shape, side) for side in old]
    parts: list[MovedPart] = []
    needed: dict[tuple[int, Box], _Need] = {}
    wants = dict.fromkeys((device, box_at(shape, side, at)) for side in new for at, device in enumerate(side.devices))
    for device, want in wants:
        if not all(n for _, n in want):
            continue
        options = [each.parts_of(want) for each in holders]
        best = min(options, key=lambda parts: _missing(parts, device, node_of))
        for box, ranks in best:
            if device in ranks:
                parts.append(MovedPart(device, device, box))
            else:
                needed.setdefault((node_of[device], box), _Need(box, [], ranks)).devices.append(device)
    near: dict[int, list[_Need]] = {}
    far: dict[int, list[_Need]] = {}
    for (node, _), need in needed.items():
        here = [rank for rank in need.ranks if node_of[rank] == node]
        (near if here else far).setdefault(node, []).append(_Need(need.box, need.devices, here or need.ranks))
    for needs in near.values():
        parts += _from_machine(needs)
    for needs in far.values():
        for turn, need in enumerate(needs):
            parts += need.shared(turn, -(-len(need.devices) // len(needs)))
    return tuple(parts)


@dataclass(frozen=True)
class _Need:
    """A part that ranks of one machine lack, and ranks that have it."""

    box: Box
    devices: list[int]
    ranks: list[int]

    def direct(self, turn: int) -> list[MovedPart]:
        """Return the messages that bring the whole part to each rank; ``turn`` varies who sends."""
        ranks = self.ranks
        return [MovedPart(ranks[(turn + k) % len(ranks)], each, self.box) for k, each in enumerate(self.devices)]

    def shared(self, turn: int, n_slices: int) -> list[MovedPart]:
        """Return the messages if each slice comes to one rank, which sends it on to the others."""
        parts = []
        for k, piece in enumerate(_slices(self.box, n_slices), turn):
            first = self.devices[k % len(self.devices)]
            parts.append(MovedPart(self.ranks[k % len(self.ranks)], first, piece))
            parts += [MovedPart(first, other, piece, 1) for other in self.devices if other != first]
        return parts


def _from_machine(needs: Sequence[_Need]) -> list[MovedPart]:
    """Return the messages for parts that ranks of the same machine have.

    Those ranks send to each of the others, unless few of them would send much more than a rank receives.
    """
    direct = [part for turn, need in enumerate(needs) for part in need.direct(turn)]
    sent, received = Counter[int](), Counter[int]()
    for part in direct:
        sent[part.source] += part.n_elements
        received[part.target] += part.n_elements
    if max(sent.values()) <= MOST_TIMES_SENT * max(received.values()):
        return direct
    return [part for turn, need in enumerate(needs) for part in need.shared(turn, len(need.devices))]


def _missing(parts: Sequence[tuple[Box, list[int]]], device: int, node_of: Sequence[int]) -> tuple[int, int]:
    """Return the elements that a rank lacks, and those of them that its machine lacks."""
    lacks = away = 0
    for box, ranks in parts:
        if device not in ranks:
            size = prod(n for _, n in box)
            lacks += size
            away += 0 if any(node_of[rank] == node_of[device] for rank in ranks) else size
    return lacks, away


def _slices(box: Box, n: int) -> list[Box]:
    """Return at most ``n`` slices of a box, along its longest dim."""
    if not box:
        return [box]
    dim = max(range(len(box)), key=lambda d: box[d][1])
    start, length = box[dim]
    cuts = [shard_of(length, n, k) for k in range(n)]
    return [(*box[:dim], (start + first, size), *box[dim + 1 :]) for first, size in cuts if size]


@dataclass(frozen=True)
class _Holders:
    """The ranks that hold each box of a tensor; of every dim, ``grid`` has the stretches of the boxes in order."""

    ranks: Mapping[Box, list[int]]
    grid: tuple[list[tuple[int, int]], ...]

    @classmethod
    def of(cls, shape: Sequence[int], side: Side) -> _Holders:
        ranks: dict[Box, list[int]] = {}
        for at, device in enumerate(side.devices):
            box = box_at(shape, side, at)
            if all(n for _, n in box):
                ranks.setdefault(box, []).append(device)
        return cls(ranks, tuple(sorted({box[d] for box in ranks}) for d in range(len(shape))))

    def parts_of(self, want: Box) -> list[tuple[Box, list[int]]]:
        """Return the parts of a box that lie in one box of a holder each, with the ranks that hold them."""
        near = []
        for stretches, (start, length) in zip(self.grid, want, strict=True):
            first = max(0, bisect_right(stretches, start, key=lambda stretch: stretch[0]) - 1)
            near.append(stretches[first : bisect_left(stretches, start + length, key=lambda stretch: stretch[0])])
        parts = []
        for have in product(*near):
            ends = [(max(a, b), min(a + n, b + m)) for (a, n), (b, m) in zip(have, want, strict=True)]
            if all(end > start for start, end in ends):
                parts.append((tuple((start, end - start) for start, end in ends), self.ranks[have]))
        return parts
