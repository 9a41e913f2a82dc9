"""A pipeline of which every rank is called with rows of its own (``parallelize(..., batch="local")``).

Every group of ranks needs the batch: the first stage the inputs, the last one the labels, others maybe a mask. So the
nth ranks of all groups have the same rows, and :attr:`~RowsInStages.ranks` of them make up the batch of a step. A
microbatch has rows of each, one rank's after the other's; where a stage cuts it over all of its ranks these are its
pieces already, and along an axis on which ranks compute together they are gathered.

Where these have not equally many rows (:mod:`.uneven_rows`) every rank gets the whole batch for that step, which is cut
into microbatches as one that all ranks are called with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError
from autopar.runtime.batches.local_batch import Call, RowsOfRanks
from autopar.runtime.batches.uneven_rows import put_together
from autopar.runtime.parameters.state import as_dtensor
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATED, State, shard
from autopar.words.trees import PyTree


def parts_on(meshes: Sequence[Mesh]) -> int:
    """Return the largest number of parts of a batch that the ranks of each mesh can hold, along their first axes."""
    return max(set.intersection(*({1, *accumulate(mesh.sizes, mul)} for mesh in meshes)))


class RowsInStages(RowsOfRanks):
    """The batches of one pipeline on its ranks.

    Attributes:
        ranks: how many have rows of their own.
        place: which of them this rank's are.
        places: those of all ranks of the pipeline.
    """

    def __init__(self, stages: Sequence[tuple[Mesh, Sequence[int]]], rank: int) -> None:
        """Initialize the object; all ranks of the pipeline call it.

        Args:
            stages: the mesh of each, and its ranks in row-major order of it.
        """
        parts = parts_on([mesh for mesh, _ in stages])
        place_of: dict[int, int] = {}
        for _, devices in stages:
            for number, device in enumerate(devices):
                place_of.setdefault(device, number // (len(devices) // parts))
        super().__init__(parts, place_of[rank], range(len(place_of)))
        self.places = [place_of[each] for each in sorted(place_of)]
        mine = next(devices for _, devices in stages if rank in devices)
        self._senders = list(mine[:: len(mine) // parts])

    def put_together(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], logs: Sequence[CollectiveLog], everyone: Any
    ) -> Call | None:
        """Return the call with the rows of the whole batch if its parts are unequal; None if they are equal.

        All ranks call it before each step.

        Args:
            everyone: the group of all ranks, for the tensors' device.

        Raises:
            RunError: ranks that are to have the same rows have other numbers of them, or the ranks' calls differ in
                more than their rows; on all of them.
        """
        of_all = self.uneven_counts(args, kwargs, logs)
        if of_all is None or self.exchange is None:
            return None
        counts = [of_all[self.places.index(place)] for place in range(self.ranks)]
        wrong = [rank for rank, place in enumerate(self.places) if of_all[rank] != counts[place]]
        if wrong:
            rank, like = wrong[0], self.places.index(self.places[wrong[0]])
            raise RunError(
                f"ranks are called with {', '.join(map(str, of_all))} rows, and rank {rank} is to have the same as "
                f"rank {like}, which has {of_all[like]}: each group of the pipeline needs the whole batch, so the nth "
                "ranks of all groups are called with the same rows; pm.sampler(dataset) and pm.shard(loader) see to it"
            )
        self.counts = counts
        call = tuple(args), dict(kwargs)
        return put_together(
            call, of_all, counts, self.place, everyone, self._senders, self.exchange, self.without
        )  # fmt: skip

    def of_uneven(self, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of an output with the rows of a whole batch of unequal parts."""
        assert self.counts is not None
        return output.narrow(0, sum(self.counts[: self.place]), self.counts[self.place])

    def refuse_gradients(self, tensors: Mapping[str, torch.Tensor], shown: Mapping[str, str]) -> None:
        """Refuse inputs that want gradients.

        Raises:
            RunError: an input wants a gradient, of which each rank would have another part.
        """
        for name, leaf in tensors.items():
            if leaf.requires_grad and torch.is_grad_enabled():
                raise RunError(
                    f"input {shown[name]} requires grad, and a pipeline with batch='local' gives its inputs none: "
                    "detach() it, or parallelize with batch='global'"
                )

    def microbatches(
        self, tensors: Mapping[str, torch.Tensor], cut: Collection[int], count: int
    ) -> list[dict[str, torch.Tensor]]:
        """Return this rank's rows of every microbatch.

        Args:
            cut: the tensors that have rows, by ``id``; others go into every microbatch.
        """
        pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, leaf in tensors.items():
            rows = leaf.chunk(count) if id(leaf) in cut else [leaf] * count
            for piece, part in zip(pieces, rows, strict=True):
                piece[name] = part
        return pieces

    def joined(self, leaf: torch.Tensor, shape: Sequence[int], device_mesh: DeviceMesh) -> torch.Tensor:
        """Return an input of a microbatch as the whole of which this rank has its rows; one without rows unchanged.

        Args:
            shape: the shape of the whole tensor.
            device_mesh: the mesh of the stage that reads it.

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
        """Return this rank's rows of an output with the rows of all microbatches, one after the other."""
        by_rank = output.unflatten(0, (microbatches, self.ranks, -1))
        return by_rank[:, self.place].flatten(0, 1)
