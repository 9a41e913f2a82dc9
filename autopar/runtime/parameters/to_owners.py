"""Tensors in pieces on a mesh, each brought whole to one rank, its owner, and back: one all-to-all there, one back.

What all owners get travels at once. Of a piece that several ranks hold, the owner takes the one of the rank that is
nearest to it on the mesh: the one at its own coordinate along the axes that do not cut. On the way back every rank gets
the piece that it stores. Nothing is padded, and what a rank has itself is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.parameters.state import mesh_of
from autopar.runtime.ranks.groups import groups_on
from autopar.words.placements import State
from autopar.words.shards import Box, box_of


class Stored(NamedTuple):
    """A tensor as a mesh stores it: its whole shape, and how it is cut."""

    shape: tuple[int, ...]
    state: State


def ranks_of(device_mesh: DeviceMesh) -> tuple[Any, list[int]]:
    """Return the group of all ranks of a mesh, and for each of its members the place on the mesh, in row-major order.

    Raises:
        MeshError: the ranks cannot make a group.
    """
    group = groups_on(device_mesh).of_mesh(device_mesh)
    places = {rank: place for place, rank in enumerate(device_mesh.mesh.flatten().tolist())}
    return group, [places[rank] for rank in dist.get_process_group_ranks(group)]


class ToOwners:
    """The way of some tensors on one mesh to their owners and back.

    Attributes:
        owned: the numbers of the tensors that this rank owns, in order.
        sent, sent_back: elements that this rank sends to owners, and as an owner.
    """

    def __init__(self, device_mesh: DeviceMesh, tensors: Sequence[Stored], owners: Sequence[int]) -> None:
        """Find out who sends what to whom; nothing is sent.

        Args:
            owners: for each tensor a member of the group of the mesh's ranks (:func:`ranks_of`), by its number there.
        """
        self.tensors, self.owners, self.device_mesh = tensors, owners, device_mesh
        group, places = ranks_of(device_mesh)
        self.me = dist.get_rank(group)
        mesh = mesh_of(device_mesh)
        coordinates = list(product(*(range(size) for size in mesh.sizes)))
        at = [coordinates[place] for place in places]
        boxes: dict[Stored, list[Box]] = {}
        for stored in tensors:
            if stored not in boxes:
                boxes[stored] = [box_of(stored.shape, stored.state, mesh, each) for each in at]
        self.boxes = [boxes[stored] for stored in tensors]
        self.owned = [i for i, owner in enumerate(owners) if owner == self.me]
        n, me = len(at), self.me
        self._sources = [_sources(stored.state, at, owner) for stored, owner in zip(tensors, owners, strict=True)]
        mine = set(self.owned)
        self._to = [
            [i for i, owner in enumerate(owners) if owner == other != me and me in self._sources[i]]
            for other in range(n)
        ]
        self._from = [[i for i in self.owned if other != me and other in self._sources[i]] for other in range(n)]
        self._back_to = [[i for i in self.owned if other != me] for other in range(n)]
        self._back_from = [
            [i for i, owner in enumerate(owners) if owner == other and i not in mine] for other in range(n)
        ]
        self.sent = sum(self._elements(i, me) for ids in self._to for i in ids)
        self.sent_back = sum(self._elements(i, r) for r, ids in enumerate(self._back_to) for i in ids)

    def gather(self, pieces: Sequence[torch.Tensor]) -> Gathering:
        """Begin to bring the pieces to the owners; all ranks of the mesh call it.

        Args:
            pieces: this rank's piece of each tensor, all of one dtype and on one device.
        """
        sent = [[pieces[i] for i in ids] for ids in self._to]
        sizes = [sum(self._elements(i, r) for i in ids) for r, ids in enumerate(self._from)]
        return Gathering(self, pieces, _Sending(sent, sizes, pieces[0], self._group))

    def scatter(self, wholes: Mapping[int, torch.Tensor], example: torch.Tensor) -> Scattering:
        """Begin to give every rank its pieces; all ranks of the mesh call it.

        Args:
            wholes: the tensors that this rank owns, by number, all of one dtype.
            example: a tensor with the dtype and the device of all.
        """
        sent = [[_part(wholes[i], self.boxes[i][r]) for i in ids] for r, ids in enumerate(self._back_to)]
        sizes = [sum(self._elements(i, self.me) for i in ids) for ids in self._back_from]
        return Scattering(self, wholes, _Sending(sent, sizes, example, self._group))

    @property
    def _group(self) -> Any:
        """The group as it is now: after a failure it is another one."""
        return ranks_of(self.device_mesh)[0]

    def _elements(self, i: int, member: int) -> int:
        return prod(length for _, length in self.boxes[i][member])


class _Sending:
    """An all-to-all under way."""

    def __init__(
        self, sent: Sequence[Sequence[torch.Tensor]], sizes: list[int], example: torch.Tensor, group: Any
    ) -> None:  # fmt: skip
        flat = [piece.reshape(-1) for pieces in sent for piece in pieces]
        self._sent = torch.cat(flat) if flat else example.new_empty(0)
        self._got = example.new_empty(sum(sizes))
        n_bytes = example.element_size()
        self._work = dist.all_to_all_single(  # as bytes: not every backend takes every format
            self._got.view(torch.uint8), self._sent.view(torch.uint8), [n_bytes * size for size in sizes],
            [n_bytes * sum(piece.numel() for piece in pieces) for pieces in sent], group=group, async_op=True,
        )  # fmt: skip

    def wait(self) -> torch.Tensor:
        """Return what came, flat, in the order of the ranks; on a GPU the host does not wait."""
        if self._work is not None:
            self._work.wait()
        self._sent = self._sent.new_empty(0)
        return self._got


class Gathering:
    """Pieces on their way to the owners."""

    def __init__(self, way: ToOwners, pieces: Sequence[torch.Tensor], sending: _Sending) -> None:
        self._way, self._pieces, self._sending = way, pieces, sending

    def wait(self) -> dict[int, torch.Tensor]:
        """Return the tensors that this rank owns, whole and contiguous, by number."""
        way, got, start = self._way, self._sending.wait(), 0
        wholes = {i: self._pieces[i].new_empty(way.tensors[i].shape) for i in way.owned}
        for i in way.owned:
            if way.me in way._sources[i]:
                _part(wholes[i], way.boxes[i][way.me]).copy_(self._pieces[i])
        for member, ids in enumerate(way._from):
            for i in ids:
                part = _part(wholes[i], way.boxes[i][member])
                part.copy_(got[start : start + part.numel()].view(part.shape))
                start += part.numel()
        return wholes


class Scattering:
    """Pieces on their way back."""

    def __init__(self, way: ToOwners, wholes: Mapping[int, torch.Tensor], sending: _Sending) -> None:
        self._way, self._wholes, self._sending = way, wholes, sending

    def wait(self) -> list[torch.Tensor]:
        """Return this rank's piece of every tensor: views of what came, or of the tensor that it owns."""
        way, got, start = self._way, self._sending.wait(), 0
        pieces: dict[int, torch.Tensor] = {i: _part(self._wholes[i], way.boxes[i][way.me]) for i in way.owned}
        for ids in way._back_from:
            for i in ids:
                shape = [length for _, length in way.boxes[i][way.me]]
                pieces[i] = got[start : start + prod(shape)].view(shape)
                start += prod(shape)
        return [pieces[i] for i in range(len(way.tensors))]


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (start, length) in enumerate(box):
        if length != whole.shape[d]:
            whole = whole.narrow(d, start, length)
    return whole


def _sources(state: State, at: Sequence[tuple[int, ...]], owner: int) -> frozenset[int]:
    """Return the members whose pieces make up the tensor: of equal ones, those nearest to the owner."""
    uncut = [axis for axis, placement in enumerate(state) if placement.dim is None]
    return frozenset(m for m, each in enumerate(at) if all(each[axis] == at[owner][axis] for axis in uncut))
