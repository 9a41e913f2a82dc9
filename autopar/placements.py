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
in DTensor: equal where the axis divides the dim, else the later ones are smaller or empty (:func:`piece_of`).

``S2*64`` cuts dim 2 into pieces that are multiples of 64 elements, its *unit*: ``torch.chunk`` of the blocks. A dim
``(heads width)`` of 6 heads of 64 is cut over 4 ranks into 2, 2, 2 and 0 heads so, where ``S2`` would be one and a half
heads each. Where both are the same pieces, only the placement without a unit is used (:func:`fits`). DTensor has no
such thing, so parameters are not stored so; they are used so, and come there from another dim or from whole values.

Both words are texts and tuples of texts with names for what is in them: they compare, sort and hash as such, and plan
files have them as they are. Nothing outside of this module takes a text of them apart (a test sees to it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from autopar.errors import MeshError

Mesh = tuple[tuple[str, int], ...]
"""Ordered ``(axis name, size)`` pairs."""

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

    __slots__ = ("dim", "is_pending", "is_shard", "is_whole", "kind", "unit")

    kind: str
    dim: int | None
    unit: int
    is_shard: bool
    is_pending: bool
    is_whole: bool

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
        "is_shard": text[0] == "S", "is_pending": text[0] == "P", "is_whole": text[0] in "IR",
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
    def in_pieces(self) -> bool:
        """Whether no rank has the value by itself: some axis cuts it, or its sum is pending there."""
        return not all(placement.is_whole for placement in self)

    @property
    def has_units(self) -> bool:
        """Whether some axis cuts a dim into multiples of a unit."""
        return any(placement.unit > 1 for placement in self)

    def started(self, grad: bool) -> State:
        """The state with whole values where it has pending sums: a value that is read or stored starts whole."""
        return State(whole_placement(grad) if placement.is_pending else placement for placement in self)

    @property
    def adjoint(self) -> State:
        """Where the gradient is."""
        return State(placement.adjoint for placement in self)

    def changed(self, axis: int, placement: Placement) -> State:
        """The state where one axis does something else."""
        return State((*self[:axis], placement, *self[axis + 1 :]))


def whole_placement(grad: bool) -> Placement:
    """The placement of a whole value: gradients, if any flow, are whole too."""
    return INVARIANT if grad else REPLICATED


def whole_state(mesh: Mesh, grad: bool = False) -> State:
    """The state of a tensor that every rank has whole."""
    return State((whole_placement(grad),) * len(mesh))


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
        return cls(next(axis for axis in range(len(src)) if src[axis] != dst[axis]), src, dst)

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


def step_collectives(src: Placement, dst: Placement) -> tuple[str | None, str | None]:
    """Collectives (forward, backward) of changing one axis from ``src`` to ``dst``; None is free of communication."""
    return _STEPS[src.kind, dst.kind]


def step_is_legal(state: State, axis: int, dst: Placement) -> bool:
    """Whether ``axis`` may change to ``dst`` in one step: nested shards of one dim are changed innermost first."""
    src = state[axis]
    if src == dst or (src.kind, dst.kind) not in _STEPS:
        return False
    dims = {p.dim for p in (src, dst) if p.is_shard}
    if len(dims) == 1 and src.kind == dst.kind:
        return False  # from one unit to another one
    return not any(later.dim in dims for later in state[axis + 1 :])


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


def axis_and_unit(text: str) -> tuple[str, int]:
    """Inverse of :func:`axis_text`."""
    axis, _, unit = text.partition("*")
    return axis, int(unit or 1)


# --- pieces -----------------------------------------------------------------------------------------------------------


def piece_of(n: int, size: int, at: int, unit: int = 1) -> tuple[int, int]:
    """``(start, length)`` of piece number ``at`` of ``n`` elements over ``size`` ranks, as ``torch.chunk`` cuts them.

    All pieces have ``ceil(n / size)`` elements, but for later ones, which are smaller or empty where ``size`` does not
    divide ``n``. With a unit, which divides ``n``, the same is true of blocks of so many elements.
    """
    length = largest_piece(n, size, unit)
    start = min(at * length, n)
    return start, min(length, n - start)


def nested_piece_of(n: int, cuts: Sequence[tuple[int, int]], at: Sequence[int]) -> tuple[int, int]:
    """``(start, length)`` of the piece of ``n`` elements that axes of these ``(size, unit)`` cut one after the other,
    by its number on each of them."""
    start = 0
    for (size, unit), number in zip(cuts, at, strict=True):
        before, n = piece_of(n, size, number, unit)
        start += before
    return start, n


def largest_piece(n: int, size: int, unit: int = 1) -> int:
    """Elements of the first of the pieces (:func:`piece_of`), which is the largest."""
    return -(-n // (size * unit)) * unit


def lengths_of(n: int, cuts: Sequence[tuple[int, int]]) -> set[int]:
    """The lengths of all pieces of ``n`` elements that axes of these ``(size, unit)`` cut one after the other."""
    lengths = {n}
    for size, unit in cuts:
        shorter = set()
        for length in lengths:
            largest = largest_piece(length, size, unit)
            full = length // largest if largest else 0
            shorter |= {largest, *([length - full * largest] if full < size else []), *([0] if full + 1 < size else [])}
        lengths = shorter
    return lengths


def local_shape(shape: Sequence[int], state: State, mesh: Mesh, at: Sequence[int] | None = None) -> tuple[int, ...]:
    """Shape on one rank of a tensor of global ``shape`` in ``state``.

    Args:
        at: the rank's coordinate; without one, the shape is that of the first rank, whose piece is the largest.

    Raises:
        MeshError: a placement names a dim that the tensor does not have.
    """
    local = list(shape)
    for axis, (placement, (name, size)) in enumerate(zip(state, mesh, strict=True)):
        d = placement.dim
        if d is None:
            continue
        if d >= len(local):
            raise MeshError(f"placement {placement} on axis '{name}' names dim {d} of a tensor with {len(local)} dims")
        unit = placement.unit
        local[d] = largest_piece(local[d], size, unit) if at is None else piece_of(local[d], size, at[axis], unit)[1]
    return tuple(local)


Box = tuple[tuple[int, int], ...]
"""``(start, length)`` per dim: a part of a tensor."""


def box_of(shape: Sequence[int], state: State, mesh: Mesh, at: Sequence[int]) -> Box:
    """The part of a tensor of global ``shape`` in ``state`` that the rank at coordinate ``at`` holds."""
    box = [(0, n) for n in shape]
    for placement, (_, size), c in zip(state, mesh, at, strict=True):
        d = placement.dim
        if d is not None:
            start, length = box[d]
            inner, n = piece_of(length, size, c, placement.unit)
            box[d] = (start + inner, n)
    return tuple(box)


def cut_extent(shape: Sequence[int], state: State, mesh: Mesh, axis: int) -> tuple[int, tuple[int, ...], bool]:
    """How ``axis`` cuts its dim: ``(elements on all ranks, earlier axes that cut it, whether pieces are equal)``."""
    d = state[axis].dim
    assert d is not None
    earlier = tuple(a for a in range(axis) if state[a].dim == d and mesh[a][1] > 1)
    pieces = prod(mesh[a][1] * state[a].unit for a in (*earlier, axis))
    return shape[d], earlier, shape[d] % pieces == 0


def elements_moved(shape: Sequence[int], src: State, dst: State, mesh: Mesh) -> int:
    """Elements of the buffer of the collective of one step on one rank, pieces padded to the largest one.

    Of a gather or a reduce-scatter that is the whole of the axis, of an all-to-all what one rank sends.
    """
    step = Step.between(src, dst)
    size, d = mesh[step.axis][1], step.after.dim
    before = local_shape(shape, src, mesh)
    if d is None:
        return prod(before) * (size if step.before.is_shard else 1)
    after = local_shape(shape, dst, mesh)
    if not step.before.is_shard:
        return prod(after) * size
    return prod(before[:d]) * prod(before[d + 1 :]) * after[d] * size


def n_devices(mesh: Mesh) -> int:
    """How many devices a mesh has."""
    return prod(size for _, size in mesh)


def mesh_text(mesh: Mesh, between: str = " x ") -> str:
    """``data=2 x tensor=4``, as messages and tables show a mesh."""
    return between.join(f"{axis}={size}" for axis, size in mesh)


def format_mesh(mesh: Mesh) -> str:
    """``data=2,tensor=4``, as written in plan files."""
    return mesh_text(mesh, ",")


def parse_mesh(text: str) -> Mesh:
    """A mesh from ``data=2,tensor=4``, the inverse of :func:`format_mesh`.

    Raises:
        MeshError: the text is no list of ``axis=size``.
    """
    mesh = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*", part)
        if match is None:
            raise MeshError(f"mesh '{text}': '{part.strip()}' is no axis=size; write it like data=2,tensor=4")
        mesh.append((match[1], int(match[2])))
    names = [name for name, _ in mesh]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MeshError(f"mesh '{text}' names axis '{twice[0]}' twice; give each axis its own name")
    for name, size in mesh:
        if size < 1:
            raise MeshError(f"mesh '{text}': axis '{name}' has size {size}; sizes are 1 or more")
    return tuple(mesh)


def coordinates(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Row-major coordinate of a rank."""
    coordinate = []
    for _, size in reversed(mesh):
        coordinate.append(rank % size)
        rank //= size
    return tuple(reversed(coordinate))


def fits(shape: Sequence[int], state: State, mesh: Mesh) -> bool:
    """Whether a tensor can be in a state: the dims exist, and no axis cuts a dim into more pieces than it has elements.

    Pieces need not be equal, and the last ones may be empty (6 elements over 4 ranks are 2, 2, 2 and 0). Whether an
    operator may run on an empty one says its rule (``Rule.needs_some``).
    """
    local = list(shape)
    for placement, (_, size) in zip(state, mesh, strict=True):
        d, unit = placement.dim, placement.unit
        if d is not None:
            if d >= len(local) or local[d] < size * unit:
                return False
            local[d] = largest_piece(local[d], size, unit)
    return not state.has_units or _units_are_needed(shape, state, mesh)


def _units_are_needed(shape: Sequence[int], state: State, mesh: Mesh) -> bool:
    """Whether the units of a state can be, and none of them says what the placement without it says."""
    for axis, (placement, (_, size)) in enumerate(zip(state, mesh, strict=True)):
        d, unit = placement.dim, placement.unit
        if d is not None and unit > 1:
            before = [(mesh[a][1], state[a].unit) for a in range(axis) if state[a].dim == d]
            lengths = lengths_of(shape[d], before)
            if any(n % unit for n in lengths) or all(n % (size * unit) == 0 for n in lengths):
                return False
    return True


def divides(shape: Sequence[int], state: State, mesh: Mesh) -> bool:
    """Whether every dim divides by the axes that shard it, so that all pieces are equal."""
    local = list(shape)
    for placement, (_, size) in zip(state, mesh, strict=True):
        d, unit = placement.dim, placement.unit
        if d is not None:
            if d >= len(local) or local[d] % (size * unit):
                return False
            local[d] //= size
    return True


def all_have_some(n: int, sizes: Sequence[int]) -> bool:
    """Whether no rank is left without any of ``n`` elements that axes of these sizes cut one after the other."""
    return min(lengths_of(n, [(size, 1) for size in sizes])) > 0


AXIS_NAMES = ("data", "tensor", "context", "expert")
"""Names of the axes of a mesh whose shape autopar chooses."""


def mesh_shapes(n: int, max_axes: int = 2) -> list[Mesh]:
    """Every way to arrange ``n`` devices on 1 to ``max_axes`` axes, each larger than 1 (but for one device)."""
    shapes: list[Mesh] = []

    def split(rest: int, sizes: tuple[int, ...]) -> None:
        if sizes:
            shapes.append(tuple(zip(AXIS_NAMES, (*sizes, rest))))
        else:
            shapes.append(((AXIS_NAMES[0], rest),))
        if len(sizes) + 1 < max_axes:
            for size in range(2, rest // 2 + 1):
                if rest % size == 0:
                    split(rest // size, (*sizes, size))

    split(n, ())
    return sorted(shapes, key=lambda mesh: (len(mesh), mesh))
