"""Process groups over several neighbouring axes of the ambient mesh, as if these were one axis.

Whoever makes the groups of a plan says where they are found (:func:`find_groups_in`); in a process that only simulates
ranks they are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.errors import RunError
from autopar.torch_private import group_of_axis

Finder = Callable[[tuple[int, ...], ProcessGroup], ProcessGroup | None]
_finders: list[Finder] = []
_simulated: dict[tuple[int, ...], ProcessGroup] = {}


def find_groups_in(finder: Finder) -> Finder:
    """Look groups up by a function of their ranks, and of a group along one of the axes."""
    _finders.append(finder)
    return finder


def group_along(axes: Sequence[str]) -> ProcessGroup:
    """Return this rank's group along axes of the ambient mesh.

    Raises:
        RunError: nobody has made it.
    """
    if len(axes) == 1:
        return group_of_axis(axes[0])
    me, ranks = dist.get_rank(), [0]
    for axis in axes:
        ranks = [r + other - me for r in ranks for other in dist.get_process_group_ranks(group_of_axis(axis))]
    members = tuple(me + r for r in ranks)
    if dist.get_backend() == "fake":
        return _of_simulated(members)
    for finder in _finders:
        group = finder(members, group_of_axis(axes[0]))
        if group is not None:
            return group
    raise RunError(
        f"rows are exchanged along axes {' and '.join(axes)} at once, and there is no process group of ranks "
        f"{list(members)}: autopar could make none on this mesh. Make the mesh of all ranks, or pin the experts to "
        f"'travel' on axis '{axes[-1]}', which makes one exchange after the other"
    )


def _of_simulated(members: tuple[int, ...]) -> ProcessGroup:
    """Return a group of a world without processes, of which there is one at a time."""
    world = dist.group.WORLD
    if _simulated.get(()) is not world:
        _simulated.clear()
        assert world is not None
        _simulated[()] = world
    if members not in _simulated:
        every = members == tuple(range(dist.get_world_size()))
        group = world if every else dist.new_group(list(members))
        assert isinstance(group, ProcessGroup)
        _simulated[members] = group
    return _simulated[members]
