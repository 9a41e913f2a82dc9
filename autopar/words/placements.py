"""Placements: the layout of one tensor on each mesh axis.

A :class:`State` has one :class:`Placement` per mesh axis, in mesh order:

==========  =======================================  ==============================
placement   value on the ranks of the axis           gradient on the same ranks
==========  =======================================  ==============================
``S<d>``    a slice of dim ``d``                     the same slice of the gradient
``S<d>*<u>`` the same, of whole blocks of u          the same slice of the gradient
``I``       the whole value, the same everywhere     whole and the same everywhere
``R``       the whole value, the same everywhere     pending: the ranks' gradients sum to it
``P``       pending: the ranks' values sum to it     whole and the same everywhere
==========  =======================================  ==============================

These are the per-axis types of the ``spmd_types`` package (its ``V`` is our ``S``), so that every program can be
checked by it. For a tensor without gradient ``I`` and ``R`` mean the same, and ``R`` is used.

If several axes shard one dim, the earlier axis is the major one, as in DTensor. Slices are those of ``torch.chunk``, as
in DTensor: equal where the axis divides the dim, else the later ones are smaller or empty
(:mod:`autopar.words.shards`).

``S2*64`` cuts dim 2 into shards of multiples of 64 elements, its *block size*: ``torch.chunk`` of the blocks. A dim
``(heads width)`` of 6 heads of 64 is cut over 4 ranks into 2, 2, 2 and 0 heads so, where ``S2`` would be one and a half
heads each. Where both give the same shards, only the placement without a block size is used
(:func:`autopar.words.shards.fits`). DTensor has no such placement, so parameters are used but not stored in it.

Placements are texts and states are tuples of them: they compare, sort and hash as such, and plan files contain them
unchanged. Only this module parses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.errors import MeshError
from autopar.words.exchanges import without_exchange
from autopar.words.meshes import Mesh

MOST_DIMS = 64
"""The limit of torch."""


class Placement(str):
    """The placement of a tensor along one mesh axis. Each text has one object; all are immutable.

    Attributes:
        kind: one of ``S I R P``.
        dim: the dim that is cut, or None.
        unit: the block size of the shards, in elements; 1 for any size.
        is_shard: it cuts a dim.
        is_pending: the ranks' values sum to the tensor.
        is_replicated: every rank has the whole value.

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
        """Return the placement of a text."""
        placement = _PLACEMENTS.get(text)
        return _read(text) if placement is None else placement

    @property
    def adjoint(self) -> Placement:
        """The placement of the gradient: whole where the value is pending, pending where the value is ``R``."""
        return {"P": INVARIANT, "R": PENDING}.get(self.kind, self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"placements are immutable: {name} of {self} cannot be set")

    def __reduce__(self) -> tuple[type[Placement], tuple[str]]:
        return Placement, (str(self),)


_PLACEMENTS: dict[str, Placement] = {}
"""Every placement so far, by its text."""


def _read(text: str) -> Placement:
    """Parse a text that was not seen before."""
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
"""The word for a parameter that is replicated, or an operator that is not cut."""

_SHARDS = tuple(Placement(f"S{d}") for d in range(MOST_DIMS))


def shard(dim: int, unit: int = 1) -> Placement:
    """Return the placement that cuts a dim into shards of multiples of ``unit`` elements."""
    return _SHARDS[dim] if unit == 1 else Placement(f"S{dim}*{unit}")


def kinds_listed(kinds: str) -> str:
    """Return the placements of `kinds` for a message: ``S<dim>, I``."""
    return ", ".join("S<dim>" if kind == "S" else kind for kind in kinds)


class State(tuple[Placement, ...]):
    """The layout of a tensor: a placement for each axis of a mesh."""

    __slots__ = ()

    @classmethod
    def of(cls, *texts: str) -> State:
        """Return the state of the placements in `texts`: ``State.of("S0", "R")``."""
        return cls(map(Placement, texts))

    @classmethod
    def parse(cls, text: str, mesh: Mesh, where: str) -> State:
        """Invert :attr:`text`.

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
        """The form ``S0,R`` of plan files."""
        return ",".join(self)

    @property
    def is_cut(self) -> bool:
        """True if some axis cuts the tensor."""
        return any(placement.is_shard for placement in self)

    @property
    def in_shards(self) -> bool:
        """True if no rank has the value by itself: some axis cuts it, or its sum is pending."""
        return not all(placement.is_replicated for placement in self)

    @property
    def has_units(self) -> bool:
        """True if some axis cuts a dim into blocks of more than one element."""
        return any(placement.unit > 1 for placement in self)

    def started(self, grad: bool) -> State:
        """Return the state with whole values for pending sums: a value that is read or stored starts whole."""
        return State(replicated_placement(grad) if placement.is_pending else placement for placement in self)

    @property
    def adjoint(self) -> State:
        """The state of the gradient."""
        return State(placement.adjoint for placement in self)

    def changed(self, axis: int, placement: Placement) -> State:
        """Return the state with another placement on one axis."""
        return State((*self[:axis], placement, *self[axis + 1 :]))


def replicated_placement(grad: bool) -> Placement:
    """Return the placement of a whole value; its gradients, if any flow, are whole too."""
    return INVARIANT if grad else REPLICATED


def whole_state(mesh: Mesh, grad: bool = False) -> State:
    """Return the state of a tensor that every rank has whole."""
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
    """A change of one axis of a state: a collective, or a free slice or reinterpretation."""

    axis: int
    src: State
    dst: State

    @classmethod
    def between(cls, src: State, dst: State) -> Step:
        """Return the step between two states that differ on one axis."""
        return cls(changed_axis(src, dst), src, dst)

    @property
    def before(self) -> Placement:
        """The placement before."""
        return self.src[self.axis]

    @property
    def after(self) -> Placement:
        """The placement after."""
        return self.dst[self.axis]

    @property
    def collectives(self) -> tuple[str | None, str | None]:
        """The collectives of forward and backward; None is free of communication."""
        return _STEPS[self.before.kind, self.after.kind]


def changed_axis(src: State, dst: State) -> int:
    """Return the first axis on which two states differ: the one that a step between them changes."""
    for axis, (before, after) in enumerate(zip(src, dst, strict=True)):
        if before is not after:  # of every text there is one object
            return axis
    raise ValueError(f"no axis changes between {src.text} and {dst.text}")


def step_collectives(src: Placement, dst: Placement) -> tuple[str | None, str | None]:
    """Return the collectives (forward, backward) of changing one axis; None is free of communication."""
    return _STEPS[src.kind, dst.kind]


def step_is_legal(state: State, axis: int, dst: Placement) -> bool:
    """Return whether one step may change ``axis``: nested shards of one dim are changed innermost first."""
    src = state[axis]
    if src is dst or (src.kind, dst.kind) not in _STEPS:
        return False
    if src.dim is None and dst.dim is None:
        return True
    if src.dim == dst.dim:
        return False  # from one block size to another one
    return not any(later.is_shard and later.dim in (src.dim, dst.dim) for later in state[axis + 1 :])


def path(src: State, dst: State) -> list[Step] | None:
    """Return the steps from one state to another, innermost axis first; None if they are not legal."""
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
    """Yield all ``(axis, new state)`` that one legal step reaches, with the placements of each axis in `choices`."""
    for axis, options in enumerate(choices):
        for dst in options:
            if step_is_legal(state, axis, dst):
                yield axis, state.changed(axis, dst)


# --- axes with block sizes, as programs name them ---------------------------------------------------------------------


def axis_text(axis: str, unit: int) -> str:
    """Return an axis with its block size as programs name it: ``tensor*64``; for size 1, its name."""
    return axis if unit == 1 else f"{axis}*{unit}"


def axis_and_block(text: str) -> tuple[str, int]:
    """Invert :func:`axis_text`; what else is written of an exchange (:mod:`autopar.words.exchanges`) is left out."""
    axis, _, unit = without_exchange(text).partition("*")
    return axis, int(unit or 1)
