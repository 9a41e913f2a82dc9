"""Batches of which every rank has its own rows, as with DistributedDataParallel (``parallelize(..., batch="local")``).

The batch of a step is all ranks' rows, one rank after the other in the order of the mesh. A rank's rows go in as they
lie: where the program cuts them over all ranks they are its piece already, and on an axis along which ranks compute
together with the same rows they are gathered. What a call gives is the rank's own rows again; scalars, such as the
loss, are those of the whole batch.

Every group of ranks of a pipeline needs the batch: the first stage the inputs, the last one the labels, others maybe a
mask. So the nth ranks of all groups have the same rows, and :attr:`~RowsOfRanks.ranks` of them make up the batch of a
step. A microbatch has rows of each, one rank's after the other's.

Where ranks have not equally many rows the batch is put together (:mod:`.uneven_rows`); a pipeline cuts it into
microbatches as one that all ranks are called with.

A loss that the script computes of a rank's own rows counts as it does there: gradients are those of the mean of the
ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from autopar.capture.microbatches import have_rows, rows_of
from autopar.errors import CaptureError, MeshError, RunError
from autopar.runtime.batches.row_sampler import RowSampler, Samplers
from autopar.runtime.batches.uneven_rows import Exchange, OwnOfUneven, put_together
from autopar.runtime.parameters.state import as_dtensor, torch_placements
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.torch_private import pytree
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATED, State, shard
from autopar.words.trees import Context, PyTree

Call = tuple[tuple[Any, ...], dict[str, Any]]


def rows_in(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], without: Collection[str] = ()) -> int | None:
    """Return the rows of a call; None of one with DTensors, or in which nothing has rows.

    Args:
        without: inputs without rows, by name.
    """
    plain = pytree.tree_map(lambda x: None if type(x) is DTensor else x, (tuple(args), dict(kwargs)))
    try:
        return rows_of(plain, without)
    except CaptureError:
        return None


def parts_on(meshes: Sequence[Mesh]) -> int:
    """Return the largest number of parts of a batch that the ranks of each mesh can hold, along their first axes."""
    return max(set.intersection(*({1, *accumulate(mesh.sizes, mul)} for mesh in meshes)))


class RowsOfRanks:
    """Who has which rows of a batch.

    Attributes:
        ranks: how many have rows of their own: on one mesh all of them.
        place: which of them this rank's are; ``places``: those of all ranks, in their order.
        exchange: tells before each call how many rows each rank has; None if all have equally many.
        counts: rows of each part in the last call, if they were not equally many.
        without: inputs without rows, by name (:func:`~autopar.capture.microbatches.leaves_of_call`).
    """

    def __init__(
        self, stages: Sequence[tuple[Mesh, Sequence[int]]], group: Callable[[], dist.ProcessGroup],
        without: frozenset[str],
    ) -> None:  # fmt: skip
        """Initialize the object; all ranks call it.

        Args:
            stages: the mesh of each stage, and its ranks in row-major order of it.
            group: gives the group of all these ranks, for the tensors' device.
        """
        self.ranks, self.group, self.without = parts_on([mesh for mesh, _ in stages]), group, without
        place_of: dict[int, int] = {}
        for _, devices in stages:
            for number, device in enumerate(devices):
                place_of.setdefault(device, number // (len(devices) // self.ranks))
        in_order, rank = sorted(place_of), dist.get_rank()
        self.place, self.places = place_of[rank], [place_of[each] for each in in_order]
        mine = next(devices for _, devices in stages if rank in devices)
        self._senders = [in_order.index(each) for each in mine[:: len(mine) // self.ranks]]
        self.exchange = Exchange.of(in_order)
        self.counts: list[int] | None = None

    def put_together(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], logs: Sequence[CollectiveLog]
    ) -> Call | None:
        """Return the call with all rows of all ranks if their numbers are unequal.

        None if they are equal, or where the call has DTensors or nothing with rows. All ranks call it before each
        call.

        Args:
            logs: where ranks that wait elsewhere read that this one waits here.

        Raises:
            RunError: ranks that are to have the same rows have other numbers of them, or the ranks' calls differ in
                more than their rows; on all of them.
        """
        self.counts = None
        rows = rows_in(args, kwargs, self.without)
        if self.exchange is None or rows is None:
            return None
        of_all = [n for n, _ in self.exchange(rows, 0, logs)]
        if len(set(of_all)) == 1:
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
        return put_together(call, of_all, counts, self.place, self.group(), self._senders, self.exchange, self.without)

    # -- a batch on its way in

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
        return as_dtensor(leaf.contiguous(), self.state_on(device_mesh), shape, device_mesh)

    def state_on(self, device_mesh: DeviceMesh) -> State:
        """Return how the rows of a batch lie on a mesh."""
        sizes = [device_mesh.size(axis) for axis in range(device_mesh.ndim)]
        cut = next(n for n in range(device_mesh.ndim + 1) if prod(sizes[:n]) == self.ranks)
        return State([shard(0)] * cut + [REPLICATED] * (device_mesh.ndim - cut))

    def whole(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], device_mesh: DeviceMesh) -> Call:
        """Return the call with the whole batch: DTensors in place of tensors, of which this rank holds its rows.

        Inputs with rows are cut among the ranks; DTensors keep their own placements.
        """
        call = tuple(args), dict(kwargs)
        rows = rows_in(args, kwargs, self.without)
        if rows is None:
            return call
        leaves, spec = pytree.tree_flatten(call)
        state = self.state_on(device_mesh)
        joined = [
            as_dtensor(leaf, state, (self.ranks * rows, *leaf.shape[1:]), device_mesh)
            if cut and not isinstance(leaf, DTensor) else leaf
            for leaf, cut in zip(leaves, have_rows(call, rows, self.without), strict=True)
        ]  # fmt: skip
        positional, by_name = pytree.tree_unflatten(joined, spec)
        return positional, by_name

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

    def refuse_gradients(self, tensors: Mapping[str, torch.Tensor], shown: Mapping[str, str]) -> None:
        """Refuse inputs of a pipeline that want gradients.

        Raises:
            RunError: an input wants a gradient, of which each rank would have another part.
        """
        for name, leaf in tensors.items():
            if leaf.requires_grad and torch.is_grad_enabled():
                raise RunError(
                    f"input {shown[name]} requires grad, and a pipeline with batch='local' gives its inputs none: "
                    "detach() it, or parallelize with batch='global'"
                )

    # -- what comes out

    def of_output(
        self, value: torch.Tensor, state: State, shape: tuple[int, ...], device_mesh: DeviceMesh
    ) -> torch.Tensor:
        """Return this rank's rows of an output, in the caller's autograd graph.

        Args:
            value: this rank's piece of it, in ``state``; ``shape`` is that of the whole.
        """
        rows_here: torch.Tensor
        if self.counts is None:
            rows_here = _LocalBatch.apply(value, state, shape, self.state_on(device_mesh), device_mesh)
        else:
            rows_here = OwnOfUneven.apply(value, state, shape, device_mesh, self.counts, self.place)
        return rows_here

    def of_uneven(self, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of an output with the rows of a whole batch of unequal parts."""
        assert self.counts is not None
        return output.narrow(0, sum(self.counts[: self.place]), self.counts[self.place])

    def rows_of(self, output: torch.Tensor, microbatches: int) -> torch.Tensor:
        """Return this rank's rows of an output with the rows of all microbatches, one after the other."""
        by_rank = output.unflatten(0, (microbatches, self.ranks, -1))
        return by_rank[:, self.place].flatten(0, 1)


class _LocalBatch(torch.autograd.Function):
    """A piece of an output becomes this rank's rows; their gradient becomes that piece's, of the mean over ranks."""

    @staticmethod
    def forward(
        ctx: Context, value: torch.Tensor, state: State, shape: tuple[int, ...], rows_state: State,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:  # fmt: skip
        ctx.state, ctx.shape, ctx.rows_state, ctx.device_mesh = state, shape, rows_state, device_mesh
        whole = as_dtensor(value, state, shape, device_mesh)
        rows: torch.Tensor = whole.redistribute(placements=torch_placements(rows_state)).to_local()
        return rows.clone() if rows is value or rows._base is not None else rows

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rows = grad.contiguous() / ctx.device_mesh.size()
        whole = as_dtensor(rows, ctx.rows_state, ctx.shape, ctx.device_mesh)
        return whole.redistribute(placements=torch_placements(ctx.state)).to_local(), None, None, None, None


def sampler_of(
    rows: RowsOfRanks | None, samplers: Samplers, dataset: Dataset[Any], shuffle: bool, drop_last: bool, seed: int,
    together: int = 1,
) -> RowSampler:  # fmt: skip
    """Return what draws the rows that this rank loads, and is saved with the module."""
    if rows is None:
        sampler = RowSampler(dataset, 1, 0, shuffle=shuffle, seed=seed, drop_last=drop_last)
    else:
        sampler = RowSampler(
            dataset, rows.ranks, rows.place, shuffle=shuffle, seed=seed, drop_last=drop_last, together=together
        )
    return samplers.add(sampler)


def sharded(rows: RowsOfRanks | None, samplers: Samplers, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader of whole batches as one that gives this rank's rows of each.

    Raises:
        MeshError: its batches cannot be cut.
        RunError: it draws in a way of its own.
    """
    ranks = 1 if rows is None else rows.ranks
    kinds = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
    if loader.batch_size is None or not isinstance(loader.sampler, kinds):
        raise RunError(
            "shard: the loader draws rows in a way of its own (a batch_sampler, a sampler, or an iterable data "
            "set); make one with sampler=pm.sampler(dataset), which gives this rank's rows"
        )
    if loader.batch_size % ranks:
        raise MeshError(f"shard: batches of {loader.batch_size} rows do not divide among {ranks} ranks")
    shuffled, each = isinstance(loader.sampler, torch.utils.data.RandomSampler), loader.batch_size // ranks
    return DataLoader(
        loader.dataset, each, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        sampler=sampler_of(rows, samplers, loader.dataset, shuffled, loader.drop_last, seed, each),
        pin_memory=loader.pin_memory, drop_last=loader.drop_last, timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn, prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )  # fmt: skip
