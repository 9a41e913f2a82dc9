"""A pipeline of which every rank is called with rows of its own (``parallelize(..., batch="local")``).

Every group of ranks needs the batch: the first stage the inputs, the last one the labels, others maybe a mask. So the
nth ranks of all groups have the same rows, and :attr:`~RowsInStages.ranks` of them make up the batch of a step. A
microbatch has rows of each, one rank's after the other's; where a stage cuts it over all of its ranks these are its
pieces already, and along an axis on which ranks compute together they are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError
from autopar.meshes import Mesh
from autopar.placements import REPLICATED, State, shard
from autopar.runtime.own_rows import RowsOfRanks
from autopar.runtime.state import as_dtensor


def parts_on(meshes: Sequence[Mesh]) -> int:
    """How many parts of a batch the ranks of each of some meshes can have, along their first axes: as many as can
    be."""
    return max(set.intersection(*({1, *accumulate(mesh.sizes, mul)} for mesh in meshes)))


class RowsInStages(RowsOfRanks):
    """How the batches of one pipeline lie on its ranks.

    Attributes:
        ranks: how many have rows of their own.
        place: which of them this rank's are.
    """

    def __init__(self, meshes: Sequence[Mesh], devices: Sequence[int], rank: int) -> None:
        """
        Args:
            meshes: of the stages.
            devices: of this rank's group, in row-major order of its mesh.
        """
        parts = parts_on(meshes)
        super().__init__(parts, devices.index(rank) // (len(devices) // parts))

    def microbatches(
        self, tensors: Mapping[str, torch.Tensor], cut: Collection[int], count: int, shown: Mapping[str, str]
    ) -> list[dict[str, torch.Tensor]]:
        """This rank's rows of every microbatch.

        Args:
            cut: the tensors that have rows, by ``id``; others go into every microbatch.

        Raises:
            RunError: an input wants a gradient, of which each rank would have another part.
        """
        pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, leaf in tensors.items():
            if leaf.requires_grad and torch.is_grad_enabled():
                raise RunError(
                    f"input {shown[name]} requires grad, and a pipeline with batch='local' gives its inputs none: "
                    "detach() it, or parallelize with batch='global'"
                )
            rows = leaf.chunk(count) if id(leaf) in cut else [leaf] * count
            for piece, part in zip(pieces, rows, strict=True):
                piece[name] = part
        return pieces

    def joined(self, leaf: torch.Tensor, shape: Sequence[int], device_mesh: DeviceMesh) -> torch.Tensor:
        """An input of a microbatch as the whole of it, of which this rank has its rows; one without rows as it is.

        Args:
            shape: of the whole.
            device_mesh: of the stage that reads it.

        Raises:
            RunError: it has neither this shape nor this rank's part of it.
        """
        if tuple(leaf.shape) == tuple(shape):
            return leaf
        if not leaf.dim() or (self.ranks * leaf.shape[0], *leaf.shape[1:]) != tuple(shape):
            raise RunError(
                f"an input was captured with shape {tuple(shape)} for a microbatch of {self.ranks} ranks, and this "
                f"rank's part is {tuple(leaf.shape)}"
            )
        sizes = [device_mesh.size(axis) for axis in range(device_mesh.ndim)]
        cut = next(n for n in range(device_mesh.ndim + 1) if prod(sizes[:n]) == self.ranks)
        state = State([shard(0)] * cut + [REPLICATED] * (device_mesh.ndim - cut))
        return as_dtensor(leaf.contiguous(), state, shape, device_mesh)

    def rows_of(self, output: torch.Tensor, microbatches: int) -> torch.Tensor:
        """This rank's rows of an output that has the rows of all microbatches, one after the other."""
        by_rank = output.unflatten(0, (microbatches, self.ranks, -1))
        return by_rank[:, self.place].flatten(0, 1)


__all__ = ["RowsInStages", "parts_on"]
