"""Placements: where the values of one tensor live on each mesh axis.

A :class:`State` has one :class:`Placement` per mesh axis, in mesh order:

==========  =======================================  ==============================
placement   value on the ranks of the axis           gradient on the same ranks
==========  =======================================  ==============================
``S<d>``    a slice of dim ``d``                     the same slice of the gradient
``S<d>*<u>``  the same, of whole blocks of u         the same slice of the gradient
``I``       the whole value, the same everywhere     whole and the same everywhere
``R``       the whole value, the same everywhere     pending: the ranks' gradients sum to it
``P``       pending: the ranks' values sum to it     whole and the same everywhere
==========  =======================================  ==============================

These are the per-axis types of the ``spmd_types`` package (its ``V`` is our ``S``), so that every program can be
checked by it. For a tensor without gradient ``I`` and ``R`` mean the same, and ``R`` is used.

If several axes shard one dim, the earlier axis is the major one, as in DTensor. Slices are those of ``torch.chunk``, as
in DTensor: equal where the axis divides the dim, else the later ones are smaller or empty
(:mod:`autopar.words.shards`).

``S2*64`` cuts dim 2 into pieces that are multiples of 64 elements, its *unit*: ``torch.chunk`` of the blocks. A dim
``(heads width)`` of 6 heads of 64 is cut over 4 ranks into 2, 2, 2 and 0 heads so, where ``S2`` would be one and a half
heads each. Where both are the same pieces, only the placement without a unit is used
(:func:`autopar.words.shards.fits`). DTensor has no such thing, so parameters are not stored so; they are used so, and
come there from another dim or from whole values.

Both words are texts and tuples of texts with names for what is in them: they compare, sort and hash as such, and plan
files have them as they are. Nothing outside of this module takes a text of them apart (a test sees to it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from autopar.errors import MeshError
from autopar.words.meshes import Mesh

MOST_DIMS = 64
"""Of a tensor: torch's own limit."""


class Placement(str):
    """What one mesh axis does with a tensor. Of every text there is one object; all are immutable.

    Attributes:
        kind: one of ``S I R P``.
        dim: the dim that it cuts, None where it cuts none.
        unit: of how many elements the pieces are multiples; 1 where nothing is cut or any number will do.
        is_shard: it cuts a dim.
        is_pending: the ranks' values sum to the tensor's.
        is_whole: every rank has the value.

    Raises:
        MeshError: the text is no placement.
    """

    __slots__ = ("dim", "is_pending", "is_replicated", "is_shard", "kind", "unit")

    kind: str
    dim: int | None
    unit: int
    is_shard: bool
    is_pending: bool
    is_replicated: bool

    def __new__(cls, text: str) -> Placement:
        placement = _PLACEMENTS.get(text)
        return _read(text) if placement is None else placement

    @property
    def adjoint(self) -> Placement:
        """The placement of the gradient: whole where the value is pending, pending where the value is ``R``."""
        return {"P": INVARIANT, "R": PENDING}.get(self.kind, self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"placements are immutable: {name} of {self} cannot be set")

    def __reduce__(self) -> tuple[type[Placement], tuple[str]]:
        return Placement, (str(self),)


_PLACEMENTS: dict[str, Placement] = {}
"""Every placement that was ever asked for, by its text."""


def _read(text: str) -> Placement:
    """The placement of a text that was not asked for before."""
    match = re.fullmatch(r"S(0|[1-9]\d?)(?:\*([1-9]\d{0,17}))?|[IRP]", text)
    if match is None or (match[1] and int(match[1]) >= MOST_DIMS) or match[2] == "1":
        raise MeshError(f"'{text}' is no placement; use S0, S1, ... or R, I, P")
    placement = str.__new__(Placement, text)
    attributes = {
        "kind": text[0], "dim": int(match[1]) if match[1] else None, "unit": int(match[2] or 1),
        "is_shard": text[0] == "S", "is_pending": text[0] == "P", "is_replicated": text[0] in "IR",
    }  # fmt: skip
    for name, value in attributes.items():
        object.__setattr__(placement, name, value)
    return _PLACEMENTS.setdefault(text, placement)


INVARIANT, REPLICATED, PENDING = Placement("I"), Placement("R"), Placement("P")
REPLICATE = "replicate"
"""As people write that a parameter is whole everywhere, or an operator not cut."""

_SHARDS = tuple(Placement(f"S{d}") for d in range(MOST_DIMS))


def shard(dim: int, unit: int = 1) -> Placement:
    """The placement that cuts dim number ``dim``, into multiples of ``unit`` elements."""
    return _SHARDS[dim] if unit == 1 else Placement(f"S{dim}*{unit}")


def kinds_listed(kinds: str) -> str:
    """Placements of these kinds in a message: ``S<dim>, I``."""
    return ", ".join("S<dim>" if kind == "S" else kind for kind in kinds)


class State(tuple[Placement, ...]):
    """Where a tensor is: a placement for each axis of a mesh."""

    __slots__ = ()

    @classmethod
    def of(cls, *texts: str) -> State:
        """The state of these placements: ``State.of("S0", "R")``."""
        return cls(map(Placement, texts))

    @classmethod
    def parse(cls, text: str, mesh: Mesh, where: str) -> State:
        """Inverse of :attr:`text`.

        Raises:
            MeshError: the text does not name one valid placement per mesh axis; ``where`` says whose it is.
        """
        parts = text.split(",")
        if len(parts) != len(mesh):
            raise MeshError(f"{where}: '{text}' has {len(parts)} placements, the mesh has {len(mesh)} axes")
        try:
            return cls.of(*(part.strip() for part in parts))
        except MeshError as error:
            raise MeshError(f"{where}: {error}") from None

    @property
    def text(self) -> str:
        """``S0,R`` form, as written in plan files."""
        return ",".join(self)

    @property
    def is_cut(self) -> bool:
        """Whether some axis cuts the tensor."""
        return any(placement.is_shard for placement in self)

    @property
    def in_shards(self) -> bool:
        """Whether no rank has the value by itself: some axis cuts it, or its sum is pending there."""
        return not all(placement.is_replicated for placement in self)

    @property
    def has_units(self) -> bool:
        """Whether some axis cuts a dim into multiples of a unit."""
        return any(placement.unit > 1 for placement in self)

    def started(self, grad: bool) -> State:
        """The state with whole values where it has pending sums: a value that is read or stored starts whole."""
        return State(replicated_placement(grad) if placement.is_pending else placement for placement in self)

    @property
    def adjoint(self) -> State:
        """Where the gradient is."""
        return State(placement.adjoint for placement in self)

    def changed(self, axis: int, placement: Placement) -> State:
        """The state where one axis does something else."""
        return State((*self[:axis], placement, *self[axis + 1 :]))


def replicated_placement(grad: bool) -> Placement:
    """The placement of a whole value: gradients, if any flow, are whole too."""
    return INVARIANT if grad else REPLICATED


def whole_state(mesh: Mesh, grad: bool = False) -> State:
    """The state of a tensor that every rank has whole."""
    return State((replicated_placement(grad),) * len(mesh))


# --- steps ------------------------------------------------------------------------------------------------------------

_STEPS: dict[tuple[str, str], tuple[str | None, str | None]] = {
    # (from, to): (collective of the forward, collective of the backward); None costs no communication
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("S", "I"): ("all_gather", None),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "P"): (None, None),
    ("I", "S"): (None, "all_gather"),
    ("I", "R"): (None, "all_reduce"),
    ("I", "P"): (None, None),
    ("R", "S"): (None, None),
    ("R", "I"): (None, None),
    ("R", "P"): (None, None),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("P", "I"): ("all_reduce", None),
    ("P", "R"): ("all_reduce", "all_reduce"),
}


class Step(NamedTuple):
    """One axis of a state changes: a collective, or a free slice or reinterpretation."""

    axis: int
    src: State
    dst: State

    @classmethod
    def between(cls, src: State, dst: State) -> Step:
        """The step between two states that differ on one axis."""
        return cls(changed_axis(src, dst), src, dst)

    @property
    def before(self) -> Placement:
        """What the axis did."""
        return self.src[self.axis]

    @property
    def after(self) -> Placement:
        """What it does now."""
        return self.dst[self.axis]

    @property
    def collectives(self) -> tuple[str | None, str | None]:
        """Of forward and backward; None is free of communication."""
        return _STEPS[self.before.kind, self.after.kind]


def changed_axis(src: State, dst: State) -> int:
    """The first axis on which two states differ: the one that a step between them changes."""
    for axis, (before, after) in enumerate(zip(src, dst, strict=True)):
        if before is not after:  # of every text there is one object
            return axis
    raise ValueError(f"no axis changes between {src.text} and {dst.text}")


def step_collectives(src: Placement, dst: Placement) -> tuple[str | None, str | None]:
    """Collectives (forward, backward) of changing one axis from ``src`` to ``dst``; None is free of communication."""
    return _STEPS[src.kind, dst.kind]


def step_is_legal(state: State, axis: int, dst: Placement) -> bool:
    """Whether ``axis`` may change to ``dst`` in one step: nested shards of one dim are changed innermost first."""
    src = state[axis]
    if src is dst or (src.kind, dst.kind) not in _STEPS:
        return False
    if src.dim is None and dst.dim is None:
        return True
    if src.dim == dst.dim:
        return False  # from one unit to another one
    return not any(later.is_shard and later.dim in (src.dim, dst.dim) for later in state[axis + 1 :])


def path(src: State, dst: State) -> list[Step] | None:
    """The steps from one state to another, innermost axis first; None if they are not legal."""
    steps = []
    state = src
    for axis in range(len(src) - 1, -1, -1):
        if state[axis] != dst[axis]:
            if not step_is_legal(state, axis, dst[axis]):
                return None
            after = state.changed(axis, dst[axis])
            steps.append(Step(axis, state, after))
            state = after
    return steps


def steps_from(state: State, choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[int, State]]:
    """All ``(axis, new state)`` that one legal step reaches; ``choices`` limits the placements of each axis."""
    for axis, options in enumerate(choices):
        for dst in options:
            if step_is_legal(state, axis, dst):
                yield axis, state.changed(axis, dst)


# --- axes with units, as programs name them ---------------------------------------------------------------------------


def axis_text(axis: str, unit: int) -> str:
    """An axis that cuts into multiples of a unit, as programs name it: ``tensor*64``; without one, its name."""
    return axis if unit == 1 else f"{axis}*{unit}"


def axis_and_block(text: str) -> tuple[str, int]:
    """Inverse of :func:`axis_text`."""
    axis, _, unit = text.partition("*")
    return axis, int(unit or 1)
