"""How a tensor gets from one submesh to another: which rank sends which piece to which rank.

Every piece crosses once. A tensor that is whole on several target ranks arrives in slices and is gathered there, on the
target's own links; a tensor that several source ranks hold is sent by the one that lies nearest, or by all in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.graph import Spec
from autopar.placements import Mesh, State, coordinates, fits
from autopar.planner.params import path

Box = tuple[tuple[int, int], ...]
"""``(start, length)`` per dim."""


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
        return prod(n for _, n in self.box)


@dataclass(frozen=True)
class Transfer:
    """All messages of one tensor, and the state in which it lands; the target gathers from there to its own."""

    spec: Spec
    source: Side
    target: Side
    landing: State
    pieces: tuple[Piece, ...]


def box_of(shape: Sequence[int], side: Side, at: int, state: State | None = None) -> Box:
    """The part of a tensor that device number ``at`` of a side holds."""
    box = [(0, n) for n in shape]
    for placement, (_, size), c in zip(state or side.state, side.mesh, coordinates(at, side.mesh), strict=True):
        if placement[0] == "S":
            d = int(placement[1:])
            start, length = box[d]
            box[d] = (start + c * (length // size), length // size)
    return tuple(box)


def transfer(spec: Spec, source: Side, target: Side) -> Transfer:
    """The messages that bring a tensor from one side to another. States are made of S, I and R."""
    landing = _landing(spec, target)
    holders: dict[Box, list[int]] = {}
    for at, device in enumerate(source.devices):
        holders.setdefault(box_of(spec.shape, source, at), []).append(device)
    pieces = []
    for at, device in enumerate(target.devices):
        want = box_of(spec.shape, target, at, landing)
        for have, owners in holders.items():
            common = _meet(have, want)
            if common is not None:
                pieces.append(Piece(_nearest(owners, device, at), device, common))
    return Transfer(spec, source, target, landing, tuple(pieces))


def _landing(spec: Spec, target: Side) -> State:
    """The target's state with whole axes cut too, where they can be, so that nothing arrives twice."""
    whole = [
        a for a, (p, (_, size)) in enumerate(zip(target.state, target.mesh, strict=True)) if p[0] != "S" and size > 1
    ]
    options = [[f"S{d}" for d in range(len(spec.shape))] for _ in whole]
    for n in range(len(whole), 0, -1):
        for dims in product(*options[:n]):
            state = list(target.state)
            for axis, placement in zip(whole[:n], dims, strict=True):
                state[axis] = placement
            found = tuple(state)
            if fits(spec.shape, found, target.mesh) and path(found, target.state) is not None:
                return found
    return target.state


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


__all__ = ["Box", "Piece", "Side", "Transfer", "box_of", "transfer"]
