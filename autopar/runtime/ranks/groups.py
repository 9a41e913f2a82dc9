"""Process groups that autopar makes: on all ranks, in one order, each once, each warmed up; ended at exit.

``torch.distributed.new_group`` has to be called by all ranks of the world, in one order, for every group, also by those
that are not in it: it counts the calls, and the count is the group's name. Where only some ranks call it, the next
group that the user makes has another name on each rank, and nobody finds the others. And the first operation of an NCCL
communicator blocks the host until all of its ranks have come there: two ranks that begin with different communicators
wait for each other for ever. So all that a plan needs is known beforehand (:mod:`autopar.runtime.stages.plan_groups`),
and made and used once here, in that order, before anything else. Ranks may come late; nobody passes anybody.

Groups are kept: the next plan that needs the same ranks for the same purpose has the same group, since communicators
take memory and seconds. A group has the backend of the device that it is for, and no other: under
``cpu:gloo,cuda:nccl`` no processor ever talks to another one in these.

A model on a part of the world's ranks has groups that these make among themselves, in a way that torch does not count:
the other ranks know nothing of the model (:func:`group_of_members`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError, RunError
from autopar.rules.lowering_helpers.joined_axes import find_groups_in
from autopar.runtime.ranks.store_meeting import any_of
from autopar.runtime.ranks.store_names import name_of, next_number
from autopar.torch_private import GROUP_NAME, has_other_groups, timeout_of_world
from autopar.words.meshes import Mesh


class Wanted(NamedTuple):
    """A group to be made: its ranks in ascending order, and its purpose if ranks alone do not say it.

    A channel's purpose is its direction.
    """

    ranks: tuple[int, ...]
    use: str = ""


def channel(source: int, target: int) -> Wanted:
    """Describe the channel from one rank to another; nothing passes back on it."""
    return Wanted((min(source, target), max(source, target)), f"{source}>{target}")


def blocks(mesh: Mesh, devices: Sequence[int], axes: Sequence[int]) -> list[tuple[int, ...]]:
    """List the ranks of a mesh (``devices`` in row-major order) in sets that differ only along ``axes``."""
    return [tuple(sorted(devices[place] for place in group)) for group in mesh.groups(axes)]


class Groups:
    """The groups of some ranks of one world, for one type of device.

    Attributes:
        ranks: all that make them, in ascending order: the whole world, or the ranks of a mesh that is a part of it.
        made: the groups, in the order in which all of these ranks made them; None if this rank is not in one.
        aborted: this rank has aborted them; no operation on them is possible any more.
        generation: how often all of them have been made anew since.
    """

    def __init__(self, world: Any, device: torch.device, ranks: tuple[int, ...]) -> None:
        self.world, self.device, self.ranks = world, device, ranks
        self.made: dict[Wanted, Any] = {}
        self.aborted = False
        self.generation = 0
        self._of_members: dict[tuple[int, ...], Any] = {}
        self._meshes: dict[tuple[Mesh, tuple[int, ...]], DeviceMesh] = {}
        self._sockets: set[tuple[int, str]] = set()

    @property
    def of_all(self) -> bool:
        """True if all ranks of the world make the groups."""
        return len(self.ranks) == dist.get_world_size()

    @property
    def possible(self) -> bool:
        """True if the ranks can make groups.

        Not those of a part of a world that was made with ``device_id=``, where NCCL splits communicators with all
        ranks of the world.
        """
        return self.of_all or getattr(self.world, "bound_device_id", None) is None

    def make(self, wanted: Iterable[Wanted]) -> None:
        """Make what there is not yet, and warm it up. All of :attr:`ranks` call it with the same list.

        Raises:
            MeshError: the world has no backend for the device, or groups are not :attr:`possible`.
        """
        backend, timeout = backend_for(self.device.type), timeout_of_world()
        if not self.possible:
            raise MeshError(
                f"the mesh has {len(self.ranks)} of {dist.get_world_size()} ranks, and the process group was made with "
                "device_id=: NCCL makes groups of its ranks with all ranks of the world then. Leave device_id= out of "
                "init_process_group, or make the mesh of all ranks"
            )
        self._drop_aborted()
        new = [each for each in dict.fromkeys(wanted) if each not in self.made]
        rank = dist.get_rank()
        for each in new:
            before = open_sockets() if backend == "gloo" else set()
            what = f"autopar {each.use}".strip()
            if self.of_all:
                group = dist.new_group(list(each.ranks), timeout, backend, group_desc=what)
            else:
                group = group_of_members(each.ranks, backend, timeout, what) if rank in each.ranks else None
            self._sockets |= open_sockets() - before if backend == "gloo" else set()
            self.made[each] = group if rank in each.ranks else None
        for each in new:
            if rank in each.ranks and len(each.ranks) > 1:
                self._warm_up(each)
        for (mesh, devices), device_mesh in self._meshes.items():  # made anew, after they were aborted
            if any(each in new for each in self._axes(mesh, devices)):
                has_other_groups(device_mesh, self._along_axes(mesh, devices))

    def _drop_aborted(self) -> None:
        """Forget all groups on all ranks if one rank has aborted its own: all ranks have the same ones then, too."""
        if not self.made:  # on all ranks alike
            return
        if any_of(self.ranks, self.aborted):
            self.destroy()
            self.aborted, self.generation = False, self.generation + 1

    def check(self, generation: int) -> None:
        """Refuse to go on with groups of a generation that was aborted, maybe by another module's step.

        Raises:
            RunError: it says what to do.
        """
        if self.aborted or generation != self.generation:
            raise RunError(
                "the process groups of this module were aborted when a rank failed in a step, of this module or of "
                "another one with the same ranks: call parallelize again on all ranks, or begin at the last checkpoint"
            )

    def abort(self) -> None:
        """End what is under way in all of the groups, from any thread: whoever waits in one of them gets an error.

        NCCL does that itself. gloo does not, so the connections of its groups are shut down.
        """
        self.aborted = True
        for fd, name in self._sockets:
            shut_down(fd, name)
        if not self._sockets:
            for group in (*self.made.values(), *self._of_members.values()):
                if group is not None:
                    with contextlib.suppress(RuntimeError):
                        group.abort()

    def _warm_up(self, wanted: Wanted) -> None:
        nothing, group = torch.zeros(1, device=self.device), self.made[wanted]
        if not wanted.use:
            dist.all_reduce(nothing, group=group)
            return
        source, target = map(int, wanted.use.split(">"))
        if dist.get_rank() == source:
            dist.isend(nothing, dst=target, group=group).wait()  # type: ignore[union-attr]
        else:
            dist.irecv(nothing, src=source, group=group).wait()  # type: ignore[union-attr]

    def of(self, ranks: Sequence[int]) -> Any:
        """Return the group of a set of ranks for collectives, which has been made."""
        return self.made[Wanted(tuple(sorted(ranks)))]

    def channels(self, pairs: Iterable[tuple[int, int]]) -> Mapping[tuple[int, int], Any]:
        """Return the groups of some pairs of sender and receiver."""
        return {pair: self.made[channel(*pair)] for pair in pairs}

    def mesh(self, mesh: Mesh, devices: Sequence[int]) -> DeviceMesh:
        """Return a mesh of this rank and others, from existing groups; ``devices`` in row-major order.

        It is one object as long as the world exists, also after its groups have been made anew: torch keeps the mesh
        of the first DTensors in the caches of its operators, and gives it to the results of later ones.
        """
        key = (mesh, tuple(devices))
        if key not in self._meshes:
            order = torch.tensor(devices).reshape(mesh.sizes)
            names = mesh.names
            along = self._along_axes(mesh, devices)
            self._meshes[key] = DeviceMesh.from_group(along, self.device.type, order, mesh_dim_names=names)
        return self._meshes[key]

    def has(self, device_mesh: DeviceMesh) -> bool:
        """Check whether a mesh was made here (:meth:`mesh`)."""
        return any(each is device_mesh for each in self._meshes.values())

    def _axes(self, mesh: Mesh, devices: Sequence[int]) -> list[Wanted]:
        """List the groups along each axis of a mesh that this rank is in."""
        rank = dist.get_rank()
        return [Wanted(next(b for b in blocks(mesh, devices, (axis,)) if rank in b)) for axis in range(len(mesh))]

    def _along_axes(self, mesh: Mesh, devices: Sequence[int]) -> list[Any]:
        return [self.made[each] for each in self._axes(mesh, devices)]

    def along(self, device_mesh: DeviceMesh, axes: Sequence[int]) -> Any:
        """Return this rank's group along several axes of any mesh of these ranks.

        All of them ask for the same in one order.

        Raises:
            MeshError: as for :meth:`make`.
        """
        names = device_mesh.mesh_dim_names or ()
        shape = Mesh((name, device_mesh.size(axis)) for axis, name in enumerate(names))
        sets = blocks(shape, device_mesh.mesh.flatten().tolist(), axes)
        rank = dist.get_rank()
        wanted = Wanted(next(block for block in sets if rank in block))
        if wanted not in self.made:
            if wanted.ranks == tuple(range(dist.get_world_size())):
                return dist.group.WORLD
            self.make(map(Wanted, sets))
        return self.made[wanted]

    def of_mesh(self, device_mesh: DeviceMesh) -> Any:
        """Return the group of all ranks of a mesh, which call it together.

        Where no plan needed one, these ranks make it among themselves: ranks of other stages know nothing of it.

        Raises:
            MeshError: the world was made with ``device_id=``, so that only all ranks together could make one.
        """
        ranks = tuple(sorted(device_mesh.mesh.flatten().tolist()))
        wide = [axis for axis in range(device_mesh.ndim) if device_mesh.size(axis) > 1]
        if len(wide) < 2:
            return device_mesh.get_group(wide[0] if wide else 0)
        if Wanted(ranks) in self.made:
            return self.made[Wanted(ranks)]
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if ranks not in self._of_members:
            if getattr(self.world, "bound_device_id", None) is not None:
                raise MeshError(
                    f"a step on whole matrices needs a group of the {len(ranks)} ranks of its mesh, of "
                    f"{dist.get_world_size()}, and the process group was made with device_id=: NCCL makes groups of "
                    "its ranks with all ranks of the world then. Leave device_id= out of init_process_group"
                )
            backend = backend_for(self.device.type)
            before = open_sockets() if backend == "gloo" else set()
            group = group_of_members(ranks, backend, timeout_of_world(), "autopar steps on matrices")
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            self._sockets |= open_sockets() - before if backend == "gloo" else set()
            self._of_members[ranks] = group
        return self._of_members[ranks]

    def destroy(self) -> None:
        """End all groups, the last one first."""
        for group in reversed([*self.made.values(), *self._of_members.values()]):
            if group is not None:
                with contextlib.suppress(Exception):  # the world, or the peer, may be gone
                    dist.destroy_process_group(group)
        self.made, self._of_members, self._sockets = {}, {}, set()


def group_of_members(ranks: Sequence[int], backend: str, timeout: Any = None, what: str = "autopar") -> Any:
    """Make a group of its members alone; all of them make those of the same ranks in the same order.

    torch would name it by how many groups this rank is in. Members that are in different numbers of groups, as ranks
    of a pipeline are, would never find each other.
    """
    name = f"autopar {name_of(ranks)} {next_number('group', ranks)}"
    with GROUP_NAME.replaced(lambda *args, **options: name):
        return dist.new_group(list(ranks), timeout, backend, group_desc=what, use_local_synchronization=True)


def open_sockets() -> set[tuple[int, str]]:
    """List the connections of this process: file descriptor and name of its target; empty but on Linux."""
    connections = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                name = os.readlink(f"{_DESCRIPTORS}/{entry}")
                if name.startswith("socket:"):
                    connections.add((int(entry), name))
    return connections


def shut_down(fd: int, name: str) -> None:
    """Shut down a connection, if the descriptor still stands for it."""
    with contextlib.suppress(OSError):
        if os.readlink(f"{_DESCRIPTORS}/{fd}") != name:
            return
        connection = socket.socket(fileno=os.dup(fd))
        try:
            connection.getpeername()  # not one that listens: gloo has one for all groups, also those to come
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.close()


_DESCRIPTORS = "/proc/self/fd"
_of_worlds: dict[tuple[str, tuple[int, ...]], Groups] = {}


def groups_for(device: torch.device, ranks: Iterable[int] | None = None) -> Groups:
    """Return the groups of some ranks of the present world (all by default), for devices of this type."""
    members = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
    groups = _of_worlds.get((device.type, members))
    if groups is None or groups.world is not dist.group.WORLD:
        groups = _of_worlds[device.type, members] = Groups(dist.group.WORLD, device, members)
    return groups


def groups_on(device_mesh: DeviceMesh) -> Groups:
    """Return the groups that a mesh was made of; of another's mesh, those of its ranks."""
    for groups in _of_worlds.values():
        if groups.world is dist.group.WORLD and groups.has(device_mesh):
            return groups
    return groups_for(torch.device(device_mesh.device_type), device_mesh.mesh.flatten().tolist())


@find_groups_in
def group_beside(ranks: tuple[int, ...], other: Any) -> Any:
    """Return the group of some ranks that was made with another one; None if none was."""
    wanted = Wanted(tuple(sorted(ranks)))
    for groups in _of_worlds.values():
        if any(group is other for group in groups.made.values()):
            return groups.made.get(wanted)
    return None


def backend_for(device_type: str) -> str:
    """Return the backend that the world uses for devices of a type, such as ``nccl``.

    Raises:
        MeshError: it has nothing for them.
    """
    of_devices = backends()
    if device_type not in of_devices:
        raise MeshError(
            f"the process group is for {', '.join(sorted(of_devices)) or 'nothing'} and the model is on {device_type}: "
            "move the model there, or make the group with a backend for both, such as "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )
    return of_devices[device_type]


def backends() -> dict[str, str]:
    """Return the backends that the world uses, by type of device."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config().split(",") if ":" in pair)


def abort_groups() -> None:
    """End what is under way in all groups that autopar made (:meth:`Groups.abort`)."""
    for groups in list(_of_worlds.values()):
        if groups.made and groups.world is dist.group.WORLD:
            groups.abort()


@atexit.register
def destroy_groups() -> None:
    """End all groups that were made here, if their world is still there.

    After an error that ended the script they are aborted: an orderly end would wait for what is under way, and for
    ranks that never come.
    """
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    for groups in _of_worlds.values():
        if dist.is_initialized() and groups.world is dist.group.WORLD:
            if failed or groups.aborted:
                groups.abort()
            groups.destroy()
    _of_worlds.clear()
