"""Meshes: devices in row-major order of axes that have names.

A :class:`Mesh` is a tuple of ``(axis name, size)`` pairs with names for what is in it. It compares, sorts and hashes as
such, and plan files have its text: ``data=2,tensor=4``. Nothing outside of this module takes the pairs apart by their
places (a test sees to it).
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
"""Of a mesh that is given."""


class Mesh(tuple[tuple[str, int], ...]):
    """The axes of a grid of devices, the last one joining neighbours: ``Mesh.of(data=2, tensor=4)``."""

    __slots__ = ()

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """The mesh of these axes, in the order in which they are given."""
        return cls(sizes.items())

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], named: Collection[str] = ()) -> Mesh:
        """A mesh of axes of these sizes, with names of :data:`AXIS_NAMES`: the first ones, or ``named`` among them."""
        if len(named) > len(sizes) or not set(named) <= set(AXIS_NAMES):
            named = ()
        others = [name for name in AXIS_NAMES if name not in named][: len(sizes) - len(named)]
        return cls(zip([name for name in AXIS_NAMES if name in (*named, *others)], sizes, strict=False))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Inverse of :attr:`text`.

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
        """Of the axes."""
        return tuple(name for name, _ in self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes."""
        return tuple(size for _, size in self)

    @property
    def size_of(self) -> dict[str, int]:
        """Sizes by the names of the axes."""
        return dict(self)

    def name(self, axis: int) -> str:
        """Of one axis, by its number."""
        return self[axis][0]

    def size(self, axis: int) -> int:
        """Of one axis, by its number."""
        return self[axis][1]

    @property
    def n_devices(self) -> int:
        """How many devices the mesh has."""
        return prod(size for _, size in self)

    @property
    def text(self) -> str:
        """``data=2,tensor=4``, as written in plan files."""
        return self.shown(",")

    def shown(self, between: str = " x ") -> str:
        """``data=2 x tensor=4``, as messages and tables show a mesh."""
        return between.join(f"{axis}={size}" for axis, size in self)

    def inner(self, axis: int) -> Mesh:
        """The mesh of an axis and those after it: of devices that are neighbours."""
        return Mesh(self[axis:])

    def outer(self, axis: int) -> Mesh:
        """The mesh of the axes before one."""
        return Mesh(self[:axis])

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The place of a rank on each axis; ranks are counted from 0, the last axis fastest."""
        coordinate = []
        for _, size in reversed(self):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Inverse of :meth:`coordinate`."""
        rank = 0
        for (_, size), at in zip(self, coordinate, strict=True):
            rank = rank * size + at
        return rank

    def groups(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The ranks in sub-groups that differ only along ``axes``: each in ascending order, the groups by their first
        ranks."""
        apart = [axis for axis in range(len(self)) if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.n_devices):
            coordinate = self.coordinate(rank)
            groups.setdefault(tuple(coordinate[axis] for axis in apart), []).append(rank)
        return [tuple(group) for group in groups.values()]

    def merged(self) -> list[Mesh]:
        """The meshes of the same devices with two neighbouring axes taken as one."""
        sizes = self.sizes
        pairs = range(len(sizes) - 1)
        return [Mesh.of_sizes((*sizes[:k], sizes[k] * sizes[k + 1], *sizes[k + 2 :])) for k in pairs]

    def refines(self, fewer: Mesh) -> bool:
        """Whether this is a mesh of fewer axes with axes of it split in several."""
        return fewer._boundaries <= self._boundaries

    @property
    def _boundaries(self) -> set[int]:
        """Devices of which neighbours are a group, on any number of the last axes."""
        return {self.inner(axis).n_devices for axis in range(len(self))}


def mesh_shapes(n: int, max_axes: int = 2, named: Collection[str] = ()) -> list[Mesh]:
    """Every way to arrange ``n`` devices on 1 to ``max_axes`` axes, each larger than 1 (but for one device).

    Args:
        named: names of :data:`AXIS_NAMES` that are among those of a shape with as many axes or more; not of one device,
            which nothing is cut over.
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


__all__ = ["AXIS_NAMES", "Mesh", "mesh_shapes"]
