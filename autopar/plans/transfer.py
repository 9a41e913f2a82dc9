"""The transfer of a tensor from one submesh to another: which rank sends which shard to which rank.

Every shard is sent once. A tensor that is replicated on several target ranks arrives in slices and is gathered there,
on the target's own links, unless it does not divide: then every rank receives all of it. A tensor that several source
ranks hold is sent by the nearest one, or by all in turn. What a rank holds already stays where it is.

The runtime sends these messages, and the planner prices them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State, path, shard
from autopar.words.shards import Box, box_of, divides

RECEIVED_AHEAD = 2
"""Messages from one peer that are received before they are asked for, on processors."""
RECEIVED_AHEAD_ON_DEVICE = 1
"""The same on GPUs. A receive is a kernel there, and with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all
that is launched later waits behind a second one of the same stream: behind the first, only what needs it anyway."""


@dataclass(frozen=True)
class Side:
    """A tensor's state on a submesh; ``devices`` are ranks in row-major order of ``mesh``."""

    state: State
    mesh: Mesh
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One message: the part ``box`` of the global tensor, from rank ``source`` to rank ``target``."""

    source: int
    target: int
    box: Box

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(n for _, n in self.box)


@dataclass(frozen=True)
class Transfer:
    """All messages of one tensor, and the state in which it lands; the target gathers from there to its own."""

    spec: Spec
    source: Side
    target: Side
    landing: State
    pieces: tuple[Piece, ...]


def box_at(shape: Sequence[int], side: Side, at: int, state: State | None = None) -> Box:
    """Return the part of a tensor that device number ``at`` of a side holds."""
    return box_of(shape, state or side.state, side.mesh, side.mesh.coordinate(at))


def transfer(spec: Spec, source: Side, target: Side) -> Transfer:
    """Return the messages that bring a tensor from one side to another. States are made of S, I and R."""
    holders: dict[Box, list[int]] = {}
    at_home: dict[int, Box] = {}
    for at, device in enumerate(source.devices):
        at_home[device] = box_at(spec.shape, source, at)
        holders.setdefault(at_home[device], []).append(device)
    landing = target.state
    wanted = [box_at(spec.shape, target, at) for at in range(len(target.devices))]
    if not all(d in at_home and _meet(at_home[d], w) == w for d, w in zip(target.devices, wanted, strict=True)):
        landing = _landing(spec, target)
        wanted = [box_at(spec.shape, target, at, landing) for at in range(len(target.devices))]
    # the boxes of the source are a grid: of every dim, its pieces in order
    grid = [sorted({box[d] for box in holders}) for d in range(len(spec.shape))]
    pieces = []
    for at, (device, want) in enumerate(zip(target.devices, wanted, strict=True)):
        for have in product(*(_near(sides, side) for sides, side in zip(grid, want, strict=True))):
            common = _meet(have, want)
            if common is not None:
                pieces.append(Piece(_nearest(holders[have], device, at), device, common))
    return Transfer(spec, source, target, landing, tuple(pieces))


@dataclass(frozen=True)
class Load:
    """The messages that one rank sends, or receives: their number, and their bytes together."""

    n_messages: int
    n_bytes: int


def loads(moved: Transfer) -> tuple[Load, ...]:
    """Return what each rank sends, and what each receives, equal ones once; nothing if nothing is sent."""
    ends: Counter[tuple[bool, int]] = Counter()
    n_bytes: Counter[tuple[bool, int]] = Counter()
    for piece in moved.pieces:
        if piece.source != piece.target:
            for end in ((True, piece.source), (False, piece.target)):
                ends[end] += 1
                n_bytes[end] += piece.n_elements * moved.spec.item_bytes
    return tuple(dict.fromkeys(Load(n, n_bytes[end]) for end, n in ends.items()))


def _landing(spec: Spec, target: Side) -> State:
    """Return the target's state with replicated axes cut too, where they can be, so that nothing arrives twice."""
    axes = enumerate(zip(target.state, target.mesh, strict=True))
    whole = [axis for axis, (placement, (_, size)) in axes if not placement.is_shard and size > 1]
    options = [[shard(d) for d in range(len(spec.shape))] for _ in whole]
    for n in range(len(whole), 0, -1):
        for dims in product(*options[:n]):
            state = list(target.state)
            for axis, placement in zip(whole[:n], dims, strict=True):
                state[axis] = placement
            landing = State(state)
            if divides(spec.shape, landing, target.mesh) and path(landing, target.state) is not None:
                return landing
    return target.state


def _near(pieces: Sequence[tuple[int, int]], want: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Return those of the shards of a dim, in order, that have elements of a stretch of it."""
    first = max(0, bisect_right(pieces, want[0], key=lambda piece: piece[0]) - 1)
    return pieces[first : bisect_left(pieces, sum(want), key=lambda piece: piece[0])]


def _meet(a: Box, b: Box) -> Box | None:
    box = []
    for (start_a, n_a), (start_b, n_b) in zip(a, b, strict=True):
        start, end = max(start_a, start_b), min(start_a + n_a, start_b + n_b)
        if end <= start:
            return None
        box.append((start, end - start))
    return tuple(box)


def _nearest(owners: Sequence[int], device: int, turn: int) -> int:
    return device if device in owners else owners[turn % len(owners)]


__all__ = ["Box", "Load", "Piece", "Side", "Transfer", "box_at", "loads", "transfer"]
