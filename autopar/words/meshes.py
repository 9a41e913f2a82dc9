"""Meshes: devices in row-major order of axes that have names.

A :class:`Mesh` is a tuple of ``(axis name, size)`` pairs with named accessors. It compares, sorts and hashes as such,
and plan files contain its text: ``data=2,tensor=4``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from math import prod

from autopar.errors import MeshError
from hardware_profiles.strict import Unreadable, parse_count, shortened

AXIS_NAMES = ("data", "tensor", "context", "expert")
"""Names of the axes of a mesh whose shape autopar chooses."""

MOST_AXES = 16
"""The most axes of a mesh that is given."""


class Mesh(tuple[tuple[str, int], ...]):
    """The axes of a grid of devices, the last one joining neighbours: ``Mesh.of(data=2, tensor=4)``."""

    __slots__ = ()

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """Return the mesh of axes of `sizes`, by name, in the order in which they are given."""
        return cls(sizes.items())

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], named: Collection[str] = ()) -> Mesh:
        """Return a mesh of axes of `sizes`, with the first of :data:`AXIS_NAMES`, or with ``named`` among them."""
        if len(named) > len(sizes) or not set(named) <= set(AXIS_NAMES):
            named = ()
        others = [name for name in AXIS_NAMES if name not in named][: len(sizes) - len(named)]
        return cls(zip([name for name in AXIS_NAMES if name in (*named, *others)], sizes, strict=False))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Invert :attr:`text`.

        Raises:
            MeshError: the text is no list of ``axis=size``.
        """
        mesh = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(-?)(\d+)\s*", part)
            if match is None:
                raise MeshError(f"mesh '{text}': '{part.strip()}' is no axis=size; write it like data=2,tensor=4")
            try:
                size = parse_count(match[3])
            except Unreadable as error:
                raise MeshError(f"mesh '{shortened(text)}': axis '{match[1]}': {error}") from None
            mesh.append((match[1], -size if match[2] else size))
        names = [name for name, _ in mesh]
        if len(names) > MOST_AXES:
            raise MeshError(f"mesh '{shortened(text)}' has {len(names):,} axes, at most {MOST_AXES} are planned")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise MeshError(f"mesh '{text}' names axis '{twice[0]}' twice; give each axis its own name")
        for name, size in mesh:
            if size < 1:
                raise MeshError(f"mesh '{text}': axis '{name}' has size {size}; sizes are 1 or more")
        return cls(mesh)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(size for _, size in self)

    @property
    def size_of(self) -> dict[str, int]:
        """Sizes by the names of the axes."""
        return dict(self)

    def name(self, axis: int) -> str:
        """Return the name of an axis, by its number."""
        return self[axis][0]

    def size(self, axis: int) -> int:
        """Return the size of an axis, by its number."""
        return self[axis][1]

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return prod(size for _, size in self)

    @property
    def text(self) -> str:
        """The form ``data=2,tensor=4`` of plan files."""
        return self.shown(",")

    def shown(self, between: str = " x ") -> str:
        """Return ``data=2 x tensor=4``, for messages and tables."""
        return between.join(f"{axis}={size}" for axis, size in self)

    def inner(self, axis: int) -> Mesh:
        """Return the mesh of an axis and those after it: of devices that are neighbours."""
        return Mesh(self[axis:])

    def outer(self, axis: int) -> Mesh:
        """Return the mesh of the axes before one."""
        return Mesh(self[:axis])

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank on each axis; ranks are counted from 0, the last axis fastest."""
        coordinate = []
        for _, size in reversed(self):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Invert :meth:`coordinate`."""
        rank = 0
        for (_, size), at in zip(self, coordinate, strict=True):
            rank = rank * size + at
        return rank

    def groups(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only along ``axes``, in ascending order."""
        apart = [axis for axis in range(len(self)) if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.n_devices):
            coordinate = self.coordinate(rank)
            groups.setdefault(tuple(coordinate[axis] for axis in apart), []).append(rank)
        return [tuple(group) for group in groups.values()]

    def merged(self) -> list[Mesh]:
        """Return the meshes of the same devices with two neighbouring axes merged into one."""
        sizes = self.sizes
        pairs = range(len(sizes) - 1)
        return [Mesh.of_sizes((*sizes[:k], sizes[k] * sizes[k + 1], *sizes[k + 2 :])) for k in pairs]

    def refines(self, fewer: Mesh) -> bool:
        """Return whether this is a mesh of fewer axes with axes of it split in several."""
        return fewer._boundaries <= self._boundaries

    @property
    def _boundaries(self) -> set[int]:
        """Return the sizes of groups of neighbours, on any number of the last axes."""
        return {self.inner(axis).n_devices for axis in range(len(self))}


def mesh_shapes(n: int, max_axes: int = 2, named: Collection[str] = ()) -> list[Mesh]:
    """Return all meshes of ``n`` devices with 1 to ``max_axes`` axes, each larger than 1 (but for one device).

    Names of :data:`AXIS_NAMES` in ``named`` are among those of a mesh with as many axes or more.
    """
    named = named if n > 1 else ()
    shapes: list[Mesh] = []

    def split(rest: int, sizes: tuple[int, ...]) -> None:
        shapes.append(Mesh.of_sizes((*sizes, rest), named))
        if len(sizes) + 1 < max_axes:
            for size in range(2, rest // 2 + 1):
                if rest % size == 0:
                    split(rest // size, (*sizes, size))

    split(n, ())
    return sorted(shapes, key=lambda mesh: (len(mesh), mesh))
