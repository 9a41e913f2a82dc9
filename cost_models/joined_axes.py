"""Collectives along several neighbouring axes of a mesh, as if these were one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.costs import Axis, Costs

JOINED = "+"
"""Stands between the names of axes that are taken as one."""


class JoinableAxes(dict[str, Axis]):
    """The costs of collectives by axis name; ``data+tensor`` is priced when it is asked for.

    Args:
        costs: the source of seconds.
        sizes: the sizes of all axes of the mesh, in order.
        devices: ranks of the cluster, in row-major order of the mesh.
    """

    def __init__(self, costs: Costs, sizes: Mapping[str, int], devices: Sequence[int]) -> None:
        super().__init__(costs.axes(sizes, devices))
        self.costs, self.sizes, self.devices = costs, dict(sizes), tuple(devices)

    def __missing__(self, name: str) -> Axis:
        """Price axes as one, whose names are joined; those between them have one rank each."""
        parts = name.split(JOINED)
        if len(parts) < 2 or not self.sizes.keys() >= {*parts}:
            raise KeyError(name)
        merged: dict[str, int] = {}
        for axis, size in self.sizes.items():
            if axis not in parts:
                merged[axis] = size
            elif axis == parts[0]:
                merged[name] = size
            else:
                merged[name] *= size
        self[name] = self.costs.axes(merged, self.devices)[name]
        return self[name]
